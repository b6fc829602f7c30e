// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
)

// rollout returns the Argo Rollout web; a nil template leaves the template out.
func rollout(t *testing.T, template *corev1.PodTemplateSpec, annotations ...string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout",
		"metadata": map[string]any{"namespace": "shop", "name": "web", "uid": "ro-1", "resourceVersion": "7"},
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
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
	plain, marked := pod(reads("app-config")), pod(variableSet("OTHER", "x"), variableSet(cmVar, h1), reads("app-config"))
	fromSecret := func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{
			SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}},
		})
	}
	two := pod(variableSet("OTHER", "x"), variableSet(dbVar, p1), variableSet(cmVar, h1), reads("app-config"), fromSecret)
	current := pod(reads("app-config"), variableSet(cmVar, h2))
	bare := pod(reads("app-config"), fromSecret)
	// containers is the patch that leaves the containers of a template.
	containers := func(state string, options ...podOption) string {
		template := pod(options...)
		u := rollout(t, &template)
		list, _, err := unstructured.NestedSlice(u.Object, "spec", "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		return toJSON(object{"metadata": object{"annotations": object{nativeState: recordedOn("7", state)}, "resourceVersion": "7"},
			"spec": object{"template": object{"spec": object{"containers": list}}}})
	}
	replaced := containers(known2, variableSet("OTHER", "x"), variableSet(cmVar, h2), reads("app-config"))
	state := object{"annotations": object{nativeState: recordedOn("7", known2)}, "resourceVersion": "7"}

	cases := map[string]struct {
		configure func(*Config)
		rollout   *unstructured.Unstructured
		remove    bool  // the source is deleted instead of changed
		denied    error // the first patch fails with this
		want      []string
		events    []string
	}{
		"the first variable of a container is added": {
			rollout: rollout(t, &plain, kAuto, "true", nativeState, known1),
			want:    []string{containers(known2, reads("app-config"), variableSet(cmVar, h2))}, events: reloaded,
		},
		"a variable that is there is replaced where it stands": {
			rollout: rollout(t, &marked, kAuto, "true", nativeState, known1),
			want:    []string{replaced}, events: reloaded,
		},
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
			want:    []string{containers(stateOf(cmKey, ""), variableSet("OTHER", "x"), reads("app-config"))}, events: reloaded,
		},
		"a conflict is decided on again": {
			rollout: rollout(t, &marked, kAuto, "true", nativeState, known1),
			denied:  apierrors.NewConflict(RolloutsResource.GroupResource(), "web", errors.New("changed")),
			want:    slices.Repeat([]string{replaced}, 2), events: reloaded,
		},
		"the annotations strategy is a merge patch": {
			configure: strategyAnnotations,
			rollout:   rollout(t, &plain, kAuto, "true", nativeState, known1),
			want: []string{toJSON(object{"metadata": state, "spec": object{"template": object{"metadata": object{"annotations": object{
				compatMark: `{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"` + h2 +
					`","containerRefs":["web"],"observedAt":` + fmt.Sprint(started+1) + `}`,
			}}}}})},
			events: reloaded,
		},
		"the strategy restart marks nothing": {
			rollout: rollout(t, &plain, kAuto, "true", compatStrategy, "restart", nativeState, known1),
			want:    []string{toJSON(object{"metadata": state, "spec": object{"restartAt": second(1)}})},
			events:  reloaded,
		},
		"under restart a variable that an earlier configuration left tells nothing": {
			rollout: rollout(t, &current, kAuto, "true", compatStrategy, "restart", nativeState, known1),
			want:    []string{toJSON(object{"metadata": state, "spec": object{"restartAt": second(1)}})},
			events:  reloaded,
		},
		"a Rollout whose template is null is left alone": {
			rollout: func() *unstructured.Unstructured {
				u := rollout(t, nil, kAuto, "true", kCM, "app-config")
				u.Object["spec"].(map[string]any)["template"] = nil
				u.Object["spec"].(map[string]any)["workloadRef"] = map[string]any{"kind": "Deployment", "name": "web"}
				return u
			}(),
		},
		"a Rollout whose template is another object's is left alone": {
			rollout: func() *unstructured.Unstructured {
				u := rollout(t, nil, kAuto, "true", kCM, "app-config")
				u.Object["spec"].(map[string]any)["workloadRef"] = map[string]any{"kind": "Deployment", "name": "web"}
				return u
			}(),
		},
		"without the flag Rollouts are left alone": {
			configure: func(c *Config) { c.ArgoRollouts = false },
			rollout:   rollout(t, &plain, kAuto, "true", nativeState, known1),
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
					map[schema.GroupVersionResource]string{RolloutsResource: "RolloutList"}, tc.rollout)
				w := &fixture{t: t, cfg: NewConfig(), client: fake.NewClientset(), dynamic: client, recorder: record.NewFakeRecorder(100)}
				w.cfg.Compat, w.cfg.ArgoRollouts = true, true
				client.PrependReactor("patch", "rollouts", func(clienttesting.Action) (bool, runtime.Object, error) {
					err := tc.denied
					tc.denied = nil
					return err != nil, nil, err
				})
				w.begin(nil, tc.configure, []runtime.Object{cm1(), db1()})
				if tc.remove {
					w.remove(cm1())
					w.pass(100 * time.Millisecond) // so that it is written first
				} else {
					changeCM(w)
				}
				if strings.Contains(tc.rollout.GetAnnotations()[nativeState], dbKey) {
					changeDB(w)
				}
				w.pass(time.Hour)
				var got []string
				for _, a := range client.Actions() {
					if p, ok := a.(clienttesting.PatchAction); ok {
						got = append(got, normalised(t, p.GetPatch()))
					}
				}
				if diff := cmp.Diff(tc.want, got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("patches differ (-want +got):\n%s", diff)
				}
				if n := w.c.Status().Errors; n != 0 {
					t.Errorf("%d reconciles failed", n)
				}
				if diff := cmp.Diff(tc.events, w.events(), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("events differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func normalised(t *testing.T, data []byte) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return toJSON(v)
}
