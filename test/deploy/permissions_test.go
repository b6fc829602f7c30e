// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// permission is one verb on one resource, as RBAC distinguishes them. In a granted permission,
// empty fields match everything.
type permission struct {
	user, verb, group, resource, namespace, name, path string
}

func (p permission) String() string {
	s := strings.Join(strings.Fields(strings.Join([]string{p.user, "may", p.verb, p.resource, p.name, p.path}, " ")), " ")
	if p.group != "" {
		s += " of " + p.group
	}
	if p.namespace != "" {
		s += " in " + p.namespace
	}
	return s
}

// covers reports whether p permits the request.
func (p permission) covers(request permission) bool {
	matches := func(granted, asked string) bool { return granted == "" || granted == asked }
	return p.user == request.user && p.verb == request.verb && p.group == request.group && p.resource == request.resource &&
		matches(p.namespace, request.namespace) && matches(p.name, request.name) && p.path == request.path
}

// TestPermissionsAreAllUsed makes managers do everything that needs permission, and then looks in
// the audit log for a request for each verb on each resource that is granted. That nothing else is
// needed is checked by fleet.Main, for this and all other packages.
func TestPermissionsAreAllUsed(t *testing.T) {
	for name, components := range map[string][]string{
		"when the manager has one account":          {"compat-reloader", "argo-rollouts"},
		"without what a component adds, by default": nil,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
			installCRDs(ctx, t)
			begin := time.Now()
			shared.InstallWith(ctx, t, components...)
			granted := grantedPermissions(t, render(ctx, t, overlay(t, components...)))
			if len(granted) < 30 {
				t.Fatalf("%d permissions are granted: the test does not see them", len(granted))
			}
			driveEverything(ctx, t, slices.Contains(components, "argo-rollouts"))

			// Rare requests may take their time.
			fleet.Eventually(ctx, t, func() error {
				unused := maps.Clone(granted)
				for _, e := range shared.AuditSince(t, begin, fleet.Allowed) {
					request := requestPermission(e)
					maps.DeleteFunc(unused, func(p permission, _ bool) bool { return p.covers(request) })
				}
				if len(unused) == 0 {
					return nil
				}
				var list []string
				for p := range unused {
					list = append(list, p.String())
				}
				slices.Sort(list)
				return fmt.Errorf("granted, but no request has used it:\n%s", strings.Join(list, "\n"))
			})
			t.Logf("%d permissions, all of them used", len(granted))
		})
	}
}

// grantedPermissions returns what the roles among the manifests grant to their subjects. The roles for
// readers of metrics are bound to nobody here.
func grantedPermissions(t *testing.T, manifests string) map[permission]bool {
	t.Helper()
	type role struct{ kind, namespace, name string }
	rules := map[role][]rbacv1.PolicyRule{}
	objects := parseObjects(t, manifests)
	for _, o := range objects {
		switch o.GetKind() {
		case "Role", "ClusterRole":
			r := &rbacv1.ClusterRole{}
			fromUnstructured(t, o, r)
			rules[role{o.GetKind(), o.GetNamespace(), o.GetName()}] = r.Rules
		}
	}
	all := map[permission]bool{}
	for _, o := range objects {
		switch o.GetKind() {
		case "RoleBinding", "ClusterRoleBinding":
		default:
			continue
		}
		b := &rbacv1.ClusterRoleBinding{}
		fromUnstructured(t, o, b)
		reference := role{kind: b.RoleRef.Kind, name: b.RoleRef.Name}
		if b.RoleRef.Kind == "Role" {
			reference.namespace = o.GetNamespace()
		}
		for _, subject := range b.Subjects {
			user := "system:serviceaccount:" + subject.Namespace + ":" + subject.Name
			// No rules if the role is not ours, such as extension-apiserver-authentication-reader.
			for _, rule := range rules[reference] {
				for _, p := range rulePermissions(rule) {
					p.user, p.namespace = user, o.GetNamespace()
					all[p] = true
				}
			}
		}
	}
	return all
}

func fromUnstructured(t *testing.T, o *unstructured.Unstructured, object any) {
	t.Helper()
	assert.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, object))
}

func rulePermissions(rule rbacv1.PolicyRule) []permission {
	var list []permission
	for _, verb := range rule.Verbs {
		for _, path := range rule.NonResourceURLs {
			list = append(list, permission{verb: verb, path: path})
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				names := rule.ResourceNames
				if len(names) == 0 {
					names = []string{""}
				}
				for _, name := range names {
					list = append(list, permission{verb: verb, group: group, resource: resource, name: name})
				}
			}
		}
	}
	return list
}

func requestPermission(e auditv1.Event) permission {
	p := permission{user: e.User.Username, verb: e.Verb}
	ref := e.ObjectRef
	if ref == nil {
		p.path, _, _ = strings.Cut(e.RequestURI, "?")
		return p
	}
	p.group, p.resource, p.namespace, p.name = ref.APIGroup, ref.Resource, ref.Namespace, ref.Name
	if ref.Subresource != "" {
		p.resource += "/" + ref.Subresource
	}
	return p
}

// driveEverything makes a manager do everything for which deploy/ grants a permission.
func driveEverything(ctx context.Context, t *testing.T, rollouts bool) {
	t.Helper()
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	leader := startManager(t, replica, fleet.ShortTimings...)
	shared.WaitForLeader(ctx, t, leader)
	standby := shared.RunStandby(ctx, t, fleet.ShortTimings...)

	s := newTestNamespace(ctx, t)
	s.createAll(ctx, rollouts)
	s.waitUntilKnown(ctx)
	// Somebody else changes the workloads just before the manager does, so that it has to read them
	// again.
	s.disturb(ctx, proxy, func() { s.paint(ctx, "red") })
	s.reloadAll(ctx, 2) // the second repeats the Event of the first

	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	if err := fleet.Answers(leader.SecureURL+"/metrics", token, 200); err != nil {
		t.Error(err)
	}
	leader.Kill() // the standby asks every API server
	shared.WaitForLeader(ctx, t, standby)
	shared.RunStandby(ctx, t, fleet.ShortTimings...) // a leader whose Lease is deleted ends
	s.deleteLease(ctx, metav1.NamespaceSystem)
}
