// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var rollouts = schema.GroupVersionResource{Group: "argoproj.io", Version: "v1alpha1", Resource: "rollouts"}

func TestARolloutIsCachedAsADigestAndRolled(t *testing.T) {
	ctx := testContext(t)
	grantRollouts(ctx, t)
	create(ctx, t, crds, "", crd(rollouts.GroupResource(), "Rollout", []string{rollouts.Version}))
	waitUntilServed(ctx, t, rollouts)
	s := newShop(ctx, t)
	spec := podSpec()
	podSpec, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&spec)
	if err != nil {
		t.Fatal(err)
	}
	newRollout := func(name string, spec map[string]any) {
		t.Helper()
		create(ctx, t, rollouts, s.namespace, map[string]any{
			"apiVersion": rollouts.GroupVersion().String(), "kind": "Rollout",
			"metadata": map[string]any{"name": name, "annotations": map[string]any{"quartermaster.dev/reload": "auto"}},
			"spec":     spec,
		})
	}
	newRollout("web", map[string]any{"replicas": int64(1), "strategy": map[string]any{"canary": map[string]any{}},
		"template": map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": "web"}}, "spec": podSpec}})
	newRollout("broken", map[string]any{"template": "none"}) // must not be in the way of others

	m := startLeader(ctx, t, "--config-reload-argo-rollouts")
	get := func() *unstructured.Unstructured {
		t.Helper()
		o, err := objects.Resource(rollouts).Namespace(s.namespace).Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	eventually(ctx, t, func() error {
		if get().GetAnnotations()["quartermaster.dev/reload-state"] == "" {
			return fmt.Errorf("no state on Rollout web")
		}
		return nil
	})
	before := get()
	s.paint(ctx, t, "red")
	eventually(ctx, t, func() error {
		if get().GetGeneration() == before.GetGeneration() {
			return fmt.Errorf("Rollout web was not rolled")
		}
		return nil
	})
	after := get()
	annotations, _, err := unstructured.NestedStringMap(after.Object, "spec", "template", "metadata", "annotations")
	if err != nil || len(annotations) == 0 {
		t.Errorf("annotations of the template: %v, %v", annotations, err)
	}
	unstructured.RemoveNestedField(after.Object, "spec", "template", "metadata", "annotations")
	if want, got := fmt.Sprint(before.Object["spec"]), fmt.Sprint(after.Object["spec"]); want != got {
		t.Errorf("besides the annotation, the spec has changed from\n%s\nto\n%s", want, got)
	}

	checkStream(t, "rollouts", reads(t, m.Pod)["rollouts"])
	for _, r := range mustStatus(t, m).Resources {
		if r.Resource == "rollouts" && (r.Form != "content digest" || r.Objects != 2 || r.ApproximateBytes == 0 || r.Relists != 0) {
			t.Errorf("%s: %d objects of %d bytes, %d relists", r.Form, r.Objects, r.ApproximateBytes, r.Relists)
		}
	}
}

// grantRollouts gives the managers what config-reload needs for Rollouts, which deploy/ does not grant.
func grantRollouts(ctx context.Context, t *testing.T) {
	t.Helper()
	const name = "test-rollouts"
	_, err := admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{rollouts.Group}, Resources: []string{"rollouts"}, Verbs: []string{"get", "list", "watch", "patch"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "quartermaster", Namespace: "kube-system"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
