// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterRules returns what the manager must be allowed in a cluster to propagate some types. With roles, it
// may also write roles that hold more than its own rules, if there is a type for them: it is an administrator
// then.
func ClusterRules(all []TypeConfig, roles bool) []rbacv1.PolicyRule {
	targets := map[string][]string{}
	for _, t := range all {
		if t.Invalid == nil && t.unsupported(all) == "" {
			targets[t.Target.Group] = append(targets[t.Target.Group], t.Target.PluralName)
		}
	}
	var rules []rbacv1.PolicyRule
	rule := func(group string, resources []string, verbs ...string) {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs})
	}
	for _, group := range slices.Sorted(maps.Keys(targets)) {
		slices.Sort(targets[group])
		rule(group, targets[group], "get", "list", "watch", "create", "update", "patch", "delete")
	}
	if roles && len(targets[rbacv1.GroupName]) > 0 {
		rule(rbacv1.GroupName, []string{"clusterroles", "roles"}, "bind", "escalate")
	}
	if slices.ContainsFunc([]string{"deployments", "replicasets"}, func(t string) bool { return slices.Contains(targets["apps"], t) }) {
		rule("", []string{"pods"}, "list") // for replicas
	}
	rule("", []string{"namespaces"}, "get") // which cluster it is
	rules[len(rules)-1].ResourceNames = []string{metav1.NamespaceSystem}
	return append(rules, rbacv1.PolicyRule{NonResourceURLs: []string{"/healthz", "/version"}, Verbs: []string{"get"}})
}
