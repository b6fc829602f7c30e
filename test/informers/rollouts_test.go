// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func TestARolloutIsCachedAsADigestAndRolled(t *testing.T) {
	ctx, rollouts := fleet.Context(t), configreload.RolloutsResource
	if err := shared.InstallRollouts(ctx); err != nil {
		t.Fatal(err)
	}
	s := shared.NewShop(ctx, t)
	template, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&fleet.NewDeployment("web", "app-config", nil).Spec.Template)
	if err != nil {
		t.Fatal(err)
	}
	newRollout := func(name string, spec map[string]any) {
		t.Helper()
		create(ctx, t, rollouts, s.Namespace, map[string]any{
			"apiVersion": rollouts.GroupVersion().String(), "kind": "Rollout",
			"metadata": map[string]any{"name": name, "annotations": map[string]any{"quartermaster.dev/reload": "auto"}},
			"spec":     spec,
		})
	}
	newRollout("web", map[string]any{"replicas": int64(1), "strategy": map[string]any{"canary": map[string]any{}},
		"template": template})
	newRollout("broken", map[string]any{"template": "none"}) // it must not affect others

	shared.InstallWith(ctx, t, "argo-rollouts")
	m := shared.RunLeader(ctx, t)
	get := func() *unstructured.Unstructured {
		t.Helper()
		o, err := shared.Objects.Resource(rollouts).Namespace(s.Namespace).Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	fleet.Eventually(ctx, t, func() error {
		if get().GetAnnotations()["quartermaster.dev/reload-state"] == "" {
			return fmt.Errorf("no state on Rollout web")
		}
		return nil
	})
	before := get()
	s.Paint(ctx, t, "red")
	fleet.Eventually(ctx, t, func() error {
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
		if r.Resource == "rollouts" && (r.Form != "content digest" || r.Objects != 2 || r.Relists != 0) {
			t.Errorf("%s: %d objects, %d relists", r.Form, r.Objects, r.Relists)
		}
	}
}
