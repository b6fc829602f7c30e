// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import "testing"

// TestRolesFollowListsAsTheManagerReadsThem writes lists as the manager takes them. It must accept the
// arguments, and print the roles that the chart grants.
func TestRolesFollowListsAsTheManagerReadsThem(t *testing.T) {
	for name, values := range map[string]string{
		"no type for ttl":                                       "controllers: {ttl: {enabled: true, flags: {ttl-include-resources: []}}}",
		"types for ttl in one text":                             `controllers: {ttl: {enabled: true, flags: {ttl-include-resources: ["jobs.batch,pods."]}}}`,
		"no Jobs, but CronJobs":                                 "controllers: {config-reload: {flags: {config-reload-exclude-kinds: [jobs]}}}",
		"no CronJobs, but Jobs":                                 "controllers: {config-reload: {flags: {config-reload-exclude-kinds: [cronjobs]}}}",
		"neither, in one text":                                  `controllers: {config-reload: {flags: {config-reload-exclude-kinds: ["jobs,cronjobs"]}}}`,
		"kinds in upper case":                                   "controllers: {config-reload: {flags: {config-reload-exclude-kinds: [Jobs, CronJobs]}}}",
		"no Secrets, in upper case":                             "controllers: {config-reload: {flags: {config-reload-exclude-sources: [Secrets]}}}",
		"both kinds of copies in one text":                      `controllers: {replication: {enabled: true, flags: {replication-kinds: ["Secret,ConfigMap"]}}}`,
		"DNS records of KubeFed's own group":                    "controllers: {federation: {enabled: true, flags: {federation-dns: true, federation-dns-endpoint-group: multiclusterdns.kubefed.io}}}",
		"a controller that is set to null":                      "controllers: {config-reload: null, ttl: {enabled: true}}",
		"the release's own namespace is among the further ones": "namespaced: {enabled: true, additionalNamespaces: [ops, team-b]}",
		"a further namespace twice":                             "namespaced: {enabled: true, additionalNamespaces: [team-b, team-b]}",
	} {
		t.Run(name, func(t *testing.T) {
			o := mustRender(t, values, "ops")
			effectiveConfig(t, o.args(t))
			if missing, further := compareRoles(t, o); missing != "" || further != "" {
				t.Errorf("manager rbac prints, and the chart does not grant:%s\nthe chart grants besides:%s", missing, further)
			}
		})
	}
}
