// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	_ "embed"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"
)

// propagatedType is a type that the federation propagates.
type propagatedType struct{ group, kind, plural, scope, short string }

// propagatedTypes are the types of KubeFed's chart.
var propagatedTypes = []propagatedType{
	{"", "Namespace", "namespaces", "Cluster", "ns"},
	{"", "ConfigMap", "configmaps", "Namespaced", "cm"},
	{"", "Secret", "secrets", "Namespaced", ""},
	{"", "Service", "services", "Namespaced", "svc"},
	{"", "ServiceAccount", "serviceaccounts", "Namespaced", "sa"},
	{"apps", "Deployment", "deployments", "Namespaced", "deploy"},
	{"apps", "ReplicaSet", "replicasets", "Namespaced", "rs"},
	{"batch", "Job", "jobs", "Namespaced", ""},
	{"networking.k8s.io", "Ingress", "ingresses", "Namespaced", "ing"},
	{"rbac.authorization.k8s.io", "ClusterRole", "clusterroles", "Cluster", ""},
}

//go:embed federated.yaml
var federatedType string

const federationHeader = "# Written by make generate from hack/generate/federation.go. Do not edit.\n"

// federationFiles returns the CustomResourceDefinitions of the federated types, and their
// FederatedTypeConfigs.
func federationFiles() (map[string][]byte, error) {
	definitions, configs := []byte(federationHeader), []byte(federationHeader)
	for i, t := range propagatedTypes {
		scope := t.scope
		if t.kind == "Namespace" {
			scope = "Namespaced" // a FederatedNamespace is in the namespace that it federates
		}
		kind, plural := "Federated"+t.kind, "federated"+t.plural
		text := strings.NewReplacer("KIND", kind, "PLURAL", plural, "SINGULAR", strings.ToLower(kind), "SCOPE", scope).Replace(federatedType)
		if t.short != "" {
			text = strings.Replace(text, "shortNames: []", "shortNames: [f"+t.short+"]", 1)
		}
		// Only Deployments and ReplicaSets have an int32 spec.replicas.
		if t.group == "apps" {
			text = strings.Replace(text, "              overrides:\n", "              retainReplicas:\n"+
				"                description: Whether clusters keep the replicas that they have.\n                type: boolean\n              overrides:\n", 1)
		}
		resource := func(group, version, kind, plural, scope string) map[string]string {
			r := map[string]string{"version": version, "kind": kind, "pluralName": plural, "scope": scope}
			if group != "" {
				r["group"] = group
			}
			return r
		}
		config, err := yaml.Marshal(map[string]any{
			"apiVersion": "core.kubefed.io/v1beta1", "kind": "FederatedTypeConfig",
			"metadata": map[string]string{"name": strings.TrimSuffix(t.plural+"."+t.group, "."), "namespace": "kube-federation-system"},
			"spec": map[string]any{"propagation": "Enabled", "targetType": resource(t.group, "v1", t.kind, t.plural, t.scope),
				"federatedType": resource("types.kubefed.io", "v1beta1", kind, plural, scope)},
		})
		if err != nil {
			return nil, fmt.Errorf("FederatedTypeConfig of %s: %w", t.kind, err)
		}
		if i > 0 {
			definitions, configs = append(definitions, "---\n"...), append(configs, "---\n"...)
		}
		definitions, configs = append(definitions, text...), append(configs, config...)
	}
	return map[string][]byte{"federation/crds/federated.yaml": definitions, "federation/types.yaml": configs}, nil
}
