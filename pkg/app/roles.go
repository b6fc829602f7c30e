// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// serviceAccount is who the manager runs as, in the namespace of the installation.
const serviceAccount, installationNamespace = "quartermaster", "kube-system"

// Roles returns, by controller, the manifest of its ClusterRole and of the binding to the manager's ServiceAccount, as
// they stand in deploy/rbac. The rules are those of the default configuration.
func Roles() (map[string][]byte, error) {
	o, err := NewOptions()
	if err != nil {
		return nil, err
	}
	manifests := map[string][]byte{}
	for _, e := range o.entries {
		if manifests[e.Name], err = roleManifest(e.Name, e.Rules()); err != nil {
			return nil, err
		}
	}
	return manifests, nil
}

func roleManifest(controller string, rules []rbacv1.PolicyRule) ([]byte, error) {
	meta := metav1.ObjectMeta{Name: "quartermaster-controller-" + controller}
	role := rbacv1.ClusterRole{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole"},
		ObjectMeta: meta,
		Rules:      rules,
	}
	binding := rbacv1.ClusterRoleBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRoleBinding"},
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: serviceAccount, Namespace: installationNamespace}},
	}
	roleYAML, err := yaml.Marshal(role)
	if err != nil {
		return nil, err
	}
	bindingYAML, err := yaml.Marshal(binding)
	if err != nil {
		return nil, err
	}
	const header = "# Written by make generate from the rules that the controller declares. Do not edit.\n"
	return append(append([]byte(header), roleYAML...), append([]byte("---\n"), bindingYAML...)...), nil
}
