// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
)

// rolloutDefinition is as much of Argo's CustomResourceDefinition as the test's API server reads.
var rolloutDefinition = &unstructured.Unstructured{Object: map[string]any{
	"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "rollouts.argoproj.io"},
	"spec": map[string]any{"group": "argoproj.io", "scope": "Namespaced", "names": map[string]any{"kind": "Rollout", "plural": "rollouts"},
		"versions": []any{map[string]any{"name": "v1alpha1", "served": true, "storage": true}}},
}}

// rollout returns the Argo Rollout web; a nil template leaves the template out.
func rollout(t *testing.T, template *corev1.PodTemplateSpec, annotations ...string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout",
		"metadata": map[string]any{"namespace": "shop", "name": "web"},
		"spec":     map[string]any{"strategy": map[string]any{"canary": map[string]any{}}},
	}}
	if template != nil {
		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(template)
		if err != nil {
			t.Fatal(err)
		}
		u.Object["spec"].(map[string]any)["template"] = object
	}
	return annotated(u, annotations...)
}

func TestReconcileRollouts(t *testing.T) {
	stateOf := func(pairs ...string) string { return stateOn("Rollout/shop/web", pairs...) }
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	other := variableSet("OTHER", "x")
	fromSecret := func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{
			SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}},
		})
	}
	marked := pod(other, variableSet(cmVar, h1), reads("app-config"))
	two := pod(other, variableSet(dbVar, p1), variableSet(cmVar, h1), reads("app-config"), fromSecret)
	current, bare := pod(reads("app-config"), variableSet(cmVar, h2)), pod(reads("app-config"), fromSecret)
	patch := func(state string, spec object) string {
		return "patch rollouts/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: state}}, "spec": spec})
	}
	// containers is the patch that leaves the containers of a template.
	containers := func(state string, options ...podOption) string {
		template := pod(options...)
		list, _, err := unstructured.NestedSlice(rollout(t, &template).Object, "spec", "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		return patch(state, object{"template": object{"spec": object{"containers": list}}})
	}
	replaced := containers(known2, other, variableSet(cmVar, h2), reads("app-config"))
	// row has a Rollout with this template and this state.
	row := func(configure func(*config), template *corev1.PodTemplateSpec, state string, change func(f *fixture), want ...string) reconcileCase {
		return reconcileCase{
			configure: func(c *config) { c.ArgoRollouts = true; configure(c) }, change: change, want: want,
			objects: objs{rolloutDefinition, cm1(), db1(), rollout(t, template, kAuto, "true", nativeState, state)},
		}
	}
	plain := func(*config) {}
	both := func(template *corev1.PodTemplateSpec, options ...podOption) reconcileCase {
		tc := row(plain, template, stateOf(cmKey, h1, dbKey, p1), func(f *fixture) { changeCM(f); changeDB(f) },
			containers(stateOf(cmKey, h2, dbKey, p2), options...))
		tc.events = []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"}
		return tc
	}
	restarted := rollout(t, &current, kAuto, "true", compatStrategy, "restart", nativeState, known1)
	elsewhere := rollout(t, nil, kAuto, "true", kCM, "app-config")
	elsewhere.Object["spec"] = object{"template": nil, "workloadRef": object{"kind": "Deployment", "name": "web"}}
	argo := func(c *config) { c.ArgoRollouts = true }

	runCases(t, map[string]reconcileCase{
		"the first variable of a container is added": row(plain, &web, known1, changeCM, containers(known2, reads("app-config"), variableSet(cmVar, h2))),
		"several variables are each replaced where they stand": both(&two,
			other, variableSet(dbVar, p2), variableSet(cmVar, h2), reads("app-config"), fromSecret),
		"several variables are added one after the other": both(&bare, reads("app-config"), fromSecret, variableSet(dbVar, p2), variableSet(cmVar, h2)),
		"on-delete removes it where it stands": row(onDelete, &marked, known1, deleteCM,
			containers(stateOf(cmKey, ""), other, reads("app-config"))),
		"a conflict is decided on again": row(plain, &marked, known1, func(f *fixture) {
			f.refuse(1, "patch", "rollouts", apierrors.NewConflict(configreload.RolloutsResource.GroupResource(), "web", errTryAgain))
			changeCM(f)
			f.pass(time.Minute)
			f.noErrors()
		}, replaced, replaced),
		"the annotations strategy is a merge patch": row(strategyAnnotations, &web, known1, changeCM,
			patch(known2, object{"template": object{"metadata": object{"annotations": object{compatMark: markOf(h2, 1)}}}})),
		"the strategy restart marks nothing, and a variable that an earlier configuration left tells nothing": {
			configure: argo, objects: objs{rolloutDefinition, cm1(), restarted}, change: changeCM, want: []string{patch(known2, object{"restartAt": second(1)})},
		},
		"a Rollout whose template is null is left alone": {configure: argo, objects: objs{rolloutDefinition, cm1(), elsewhere}, change: changeCM},
		"without the flag Rollouts are left alone":       {objects: objs{rolloutDefinition, cm1(), rollout(t, &web, kAuto, "true", nativeState, known1)}, change: changeCM},
	})
}
