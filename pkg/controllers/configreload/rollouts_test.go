// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
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
	plain, marked := pod(reads("app-config")), pod(variableSet("OTHER", "x"), variableSet(cmVar, h1), reads("app-config"))
	fromSecret := func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{
			SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}},
		})
	}
	two := pod(variableSet("OTHER", "x"), variableSet(dbVar, p1), variableSet(cmVar, h1), reads("app-config"), fromSecret)
	current := pod(reads("app-config"), variableSet(cmVar, h2))
	bare := pod(reads("app-config"), fromSecret)
	patch := func(state string, spec object) string {
		return "patch rollouts/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: state}}, "spec": spec})
	}
	// containers is the patch that leaves the containers of a template.
	containers := func(state string, options ...podOption) string {
		template := pod(options...)
		u := rollout(t, &template)
		list, _, err := unstructured.NestedSlice(u.Object, "spec", "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		return patch(state, object{"template": object{"spec": object{"containers": list}}})
	}
	replaced := containers(known2, variableSet("OTHER", "x"), variableSet(cmVar, h2), reads("app-config"))

	cases := map[string]struct {
		configure func(*config)
		rollout   *unstructured.Unstructured
		remove    bool // the source is deleted instead of changed
		conflict  bool // at the first patch
		want      []string
		events    []string
	}{
		"the first variable of a container is added": {
			rollout: rollout(t, &plain, kAuto, "true", nativeState, known1),
			want:    []string{containers(known2, reads("app-config"), variableSet(cmVar, h2))},
		},
		"a variable that is there is replaced where it stands": {rollout: rollout(t, &marked, kAuto, "true", nativeState, known1), want: []string{replaced}},
		"several variables are each replaced where they stand": {
			rollout: rollout(t, &two, kAuto, "true", nativeState, stateOf(cmKey, h1, dbKey, p1)),
			want: []string{containers(stateOf(cmKey, h2, dbKey, p2),
				variableSet("OTHER", "x"), variableSet(dbVar, p2), variableSet(cmVar, h2), reads("app-config"), fromSecret)},
			events: []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"},
		},
		"several variables are added one after the other": {
			rollout: rollout(t, &bare, kAuto, "true", nativeState, stateOf(cmKey, h1, dbKey, p1)),
			want: []string{containers(stateOf(cmKey, h2, dbKey, p2),
				reads("app-config"), fromSecret, variableSet(dbVar, p2), variableSet(cmVar, h2))},
			events: []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"},
		},
		"on-delete removes it where it stands": {
			configure: onDelete, remove: true,
			rollout: rollout(t, &marked, kAuto, "true", nativeState, known1),
			want:    []string{containers(stateOf(cmKey, ""), variableSet("OTHER", "x"), reads("app-config"))},
		},
		"a conflict is decided on again": {rollout: rollout(t, &marked, kAuto, "true", nativeState, known1), conflict: true, want: []string{replaced, replaced}},
		"the annotations strategy is a merge patch": {
			configure: strategyAnnotations,
			rollout:   rollout(t, &plain, kAuto, "true", nativeState, known1),
			want: []string{patch(known2, object{"template": object{"metadata": object{"annotations": object{
				compatMark: `{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"` + h2 +
					`","containerRefs":["web"],"observedAt":` + fmt.Sprint(started+1) + `}`,
			}}}})},
		},
		"the strategy restart marks nothing, and a variable that an earlier configuration left tells nothing": {
			rollout: rollout(t, &current, kAuto, "true", compatStrategy, "restart", nativeState, known1),
			want:    []string{patch(known2, object{"restartAt": second(1)})},
		},
		"a Rollout whose template is null is left alone": {
			rollout: func() *unstructured.Unstructured {
				u := rollout(t, nil, kAuto, "true", kCM, "app-config")
				u.Object["spec"].(map[string]any)["template"] = nil
				u.Object["spec"].(map[string]any)["workloadRef"] = map[string]any{"kind": "Deployment", "name": "web"}
				return u
			}(),
		},
		"without the flag Rollouts are left alone": {configure: func(c *config) { c.ArgoRollouts = false }, rollout: rollout(t, &plain, kAuto, "true", nativeState, known1)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *config) {
					c.ArgoRollouts = true
					if tc.configure != nil {
						tc.configure(c)
					}
				}, rolloutDefinition, cm1(), db1(), tc.rollout)
				if tc.conflict {
					f.refuse("patch", "rollouts", apierrors.NewConflict(configreload.RolloutsResource.GroupResource(), "web", errTryAgain))
				}
				if tc.remove {
					f.Delete(cm1())
					f.pass(100 * time.Millisecond) // so that it is written first
				} else {
					changeCM(f)
				}
				if strings.Contains(tc.rollout.GetAnnotations()[nativeState], dbKey) {
					changeDB(f)
				}
				f.pass(time.Hour)
				f.expect(tc.want...)
				f.noErrors()
				f.told(eventsOf(tc.want, tc.events)...)
			})
		})
	}
}
