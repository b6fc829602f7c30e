// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// testAgent is the user agent of the test's own clients.
const testAgent = "the-test"

// hostAgents end the user agents of the manager's own clients. What they may do is not the
// controller's business.
var hostAgents = []string{testAgent, "startup", "discovery", "events", "leader-election", "service-account-tokens"}

// cacheAgent ends the user agent of the cache, which reads what is in Needs by the controller's rules.
const cacheAgent = "informers"

// by returns the last part of the user agent: the name of a controller, for its requests.
func by(r apiserver.Request) string { return r.UserAgent[strings.LastIndex(r.UserAgent, "/")+1:] }

// admit refuses what RBAC would, with the entry's permissions, and fails the test.
func (h *Host) admit(r apiserver.Request) error {
	who := by(r)
	if slices.Contains(hostAgents, who) {
		return nil
	}
	if !slices.ContainsFunc(h.entry.Permissions(h.settings), func(rule rbacv1.PolicyRule) bool { return allows(rule, r) }) {
		h.lacks(r, who)
		scope := "at the cluster scope"
		if r.Namespace != "" {
			scope = fmt.Sprintf("in the namespace %q", r.Namespace)
		}
		return apierrors.NewForbidden(r.Resource, r.Name, fmt.Errorf(
			`user "system:serviceaccount:kube-system:quartermaster" cannot %s resource %q in API group %q %s`,
			r.Verb, resourceOf(r), r.Resource.Group, scope))
	}
	h.mu.Lock()
	hook := h.hook
	h.mu.Unlock()
	// An apply that creates is admitted twice. The second time the server is locked, and the hook has
	// seen the write.
	creates := r.Verb == "create" && r.Patch == types.ApplyPatchType
	if hook != nil && who != cacheAgent && !creates && r.Verb != "get" && r.Verb != "list" && r.Verb != "watch" {
		h.hooking <- struct{}{}
		defer func() { <-h.hooking }()
		return hook(writeOf(r))
	}
	return nil
}

// lacks fails the test because of a rule that is missing, once for each.
func (h *Host) lacks(r apiserver.Request, who string) {
	missing := fmt.Sprintf("{APIGroups: []string{%q}, Resources: []string{%q}, Verbs: []string{%q}}", r.Resource.Group, resourceOf(r), r.Verb)
	h.mu.Lock()
	reported := h.missing[missing]
	h.missing[missing] = true
	h.mu.Unlock()
	if reported {
		return
	}
	does := "do not allow what it does"
	if who == cacheAgent {
		does = "do not allow what it declares in Needs"
	}
	h.t.Errorf("controller %s: Permissions %s; missing is %s", h.entry.Name, does, missing)
}

func resourceOf(r apiserver.Request) string {
	if r.Subresource == "" {
		return r.Resource.Resource
	}
	return r.Resource.Resource + "/" + r.Subresource
}

// allows reports whether RBAC allows the request by this rule.
func allows(rule rbacv1.PolicyRule, r apiserver.Request) bool {
	has := func(list []string, values ...string) bool {
		return slices.ContainsFunc(list, func(item string) bool { return item == "*" || slices.Contains(values, item) })
	}
	resources := []string{resourceOf(r)}
	if r.Subresource != "" {
		resources = append(resources, "*/"+r.Subresource)
	}
	return has(rule.Verbs, r.Verb) && has(rule.APIGroups, r.Resource.Group) && has(rule.Resources, resources...) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, r.Name))
}
