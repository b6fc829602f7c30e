// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// escalates refuses a role that allows more than its writer may do, unless the writer may escalate it, and
// a binding to such a role, unless the writer may bind it. The caller holds mu.
func (s *Server) escalates(c call) error {
	if s.hooks.Holds == nil || c.Resource.Group != rbacv1.GroupName || !slices.Contains([]string{"create", "update", "patch"}, c.Verb) {
		return nil
	}
	c.DryRun, c.metadata = true, false
	_, written, _, err := s.execute(c)
	if err != nil {
		return nil // the write itself fails with the same error
	}
	var role rbacv1.ClusterRole // or a Role: both have the same rules
	convert := runtime.DefaultUnstructuredConverter.FromUnstructured
	verb, found := "escalate", true
	if strings.HasSuffix(c.Resource.Resource, "bindings") {
		var binding rbacv1.ClusterRoleBinding // or a RoleBinding
		if err := convert(written.(map[string]any), &binding); err != nil {
			return apierrors.NewBadRequest(err.Error())
		}
		verb, role.Kind, role.Name = "bind", binding.RoleRef.Kind, binding.RoleRef.Name
		k := key{rbacv1.GroupName, role.Kind, c.Namespace, role.Name}
		if role.Kind == "ClusterRole" {
			k.namespace = ""
		}
		var bound *object
		if bound, found = s.objects[k]; found {
			written = bound.Object
		}
	}
	if found {
		if err := convert(written.(map[string]any), &role); err != nil {
			return apierrors.NewBadRequest(err.Error())
		}
	}
	resource := strings.ToLower(role.Kind) + "s"
	may := rbacv1.PolicyRule{Verbs: []string{verb}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{resource}, ResourceNames: []string{role.Name}}
	switch {
	case s.hooks.Holds(c.UserAgent, may):
		return nil
	case !found:
		return apierrors.NewNotFound(schema.GroupResource{Group: rbacv1.GroupName, Resource: resource}, role.Name)
	}
	for _, rule := range role.Rules {
		if !s.hooks.Holds(c.UserAgent, rule) {
			return apierrors.NewForbidden(c.Resource, role.Name, fmt.Errorf(
				"it would grant permissions that its writer does not have, who is not allowed to %s it either: %s", verb, rule.String()))
		}
	}
	return nil
}
