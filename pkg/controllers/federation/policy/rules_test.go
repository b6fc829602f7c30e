// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
)

// ruleTexts returns rules as "GROUP: RESOURCES: VERBS".
func ruleTexts(rules []rbacv1.PolicyRule) (texts []string) {
	for _, r := range rules {
		texts = append(texts, fmt.Sprintf("%s: %s: %s", strings.Join(r.APIGroups, ","),
			strings.Join(slices.Concat(r.Resources, r.ResourceNames, r.NonResourceURLs), " "), strings.Join(r.Verbs, " ")))
	}
	return texts
}

func TestClusterRulesGrantWhatTypesNeed(t *testing.T) {
	const verbs = "get list watch create update patch delete"
	commonRules := []string{": namespaces kube-system: get", ": /healthz /version: get"}
	for name, tc := range map[string]struct {
		targets    []string // group/plural
		allowRoles bool
		allowDNS   bool
		want       []string
	}{
		"no types":                             {},
		"types of several groups":              {[]string{"/secrets", "batch/jobs", "/configmaps"}, false, false, []string{": configmaps secrets: " + verbs, "batch: jobs: " + verbs}},
		"Pods are read for replicas":           {[]string{"apps/replicasets"}, false, false, []string{"apps: replicasets: " + verbs, ": pods: list"}},
		"Nodes and endpoints are read for DNS": {[]string{"/services"}, false, true, []string{": services: " + verbs, ": nodes: list", "discovery.k8s.io: endpointslices: list watch"}},
		"roles within the manager's own":       {[]string{"rbac.authorization.k8s.io/clusterroles"}, false, false, []string{"rbac.authorization.k8s.io: clusterroles: " + verbs}},
		"any roles":                            {[]string{"rbac.authorization.k8s.io/roles"}, true, false, []string{"rbac.authorization.k8s.io: roles: " + verbs, "rbac.authorization.k8s.io: clusterroles roles: bind escalate"}},
		"any roles without a type for it":      {[]string{"/secrets"}, true, false, []string{": secrets: " + verbs}},
		"what is never propagated":             {[]string{"/nodes", "core.kubefed.io/kubefedclusters"}, false, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var configs []TypeConfig
			for _, target := range tc.targets {
				group, plural, _ := strings.Cut(target, "/")
				configs = append(configs, TypeConfig{TypeSpec: TypeSpec{Target: Resource{Group: group, PluralName: plural}}})
			}
			if got, want := ruleTexts(ClusterRules(configs, tc.allowRoles, tc.allowDNS)), append(tc.want, commonRules...); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}
