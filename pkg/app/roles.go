// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Roles are the permissions that one controller makes necessary.
type Roles struct {
	Controller string
	// Cache is what the manager's cache reads for the controller, as the manager's own ServiceAccount, on every replica.
	Cache []rbacv1.PolicyRule
	// Own is what the controller does itself; with --use-service-account-credentials, as the ServiceAccount of its name.
	Own []rbacv1.PolicyRule
}

// Roles returns the permissions of each controller under the configuration that the flags were parsed into, in the
// order of the registry.
func (o *Options) Roles() ([]Roles, error) {
	var all []Roles
	for _, e := range o.entries {
		roles, err := e.roles()
		if err != nil {
			return nil, fmt.Errorf("controller %s: %w", e.Name, err)
		}
		all = append(all, roles)
	}
	return all, nil
}

// roles divides the entry's rules: to list and to watch what is in Needs is up to the cache.
func (e Entry) roles() (Roles, error) {
	needs, err := e.Needs()
	if err != nil {
		return Roles{}, err
	}
	inCache := map[schema.GroupResource]bool{}
	for _, need := range needs {
		inCache[need.Resource.GroupResource()] = true
	}
	roles := Roles{Controller: e.Name}
	readable := map[schema.GroupResource]bool{}
	for _, rule := range e.Rules() {
		if len(rule.APIGroups) != 1 || len(rule.ResourceNames) > 0 {
			roles.Own = append(roles.Own, rule)
			continue
		}
		var cached, others []string
		for _, resource := range rule.Resources {
			if gr := (schema.GroupResource{Group: rule.APIGroups[0], Resource: resource}); inCache[gr] {
				cached = append(cached, resource)
				readable[gr] = slices.Contains(rule.Verbs, "list") && slices.Contains(rule.Verbs, "watch")
			} else {
				others = append(others, resource)
			}
		}
		byCache := func(verb string) bool { return verb == "list" || verb == "watch" }
		own := slices.DeleteFunc(slices.Clone(rule.Verbs), byCache)
		roles.Cache = appendRule(roles.Cache, rule.APIGroups, cached, []string{"list", "watch"})
		roles.Own = appendRule(roles.Own, rule.APIGroups, cached, own)
		roles.Own = appendRule(roles.Own, rule.APIGroups, others, rule.Verbs)
	}
	for gr := range inCache {
		if !readable[gr] {
			return Roles{}, fmt.Errorf("needs %s in the cache, but its rules do not let it list and watch them", gr)
		}
	}
	return roles, nil
}

// appendRule leaves out a rule that would grant nothing.
func appendRule(rules []rbacv1.PolicyRule, groups, resources, verbs []string) []rbacv1.PolicyRule {
	if len(resources) == 0 || len(verbs) == 0 {
		return rules
	}
	return append(rules, rbacv1.PolicyRule{APIGroups: groups, Resources: resources, Verbs: verbs})
}
