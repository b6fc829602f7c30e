// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
)

func TestReconcileState(t *testing.T) {
	known1, known2, absent := stateOf(cmKey, h1), stateOf(cmKey, h2), stateOf(cmKey, "")
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
	rolled := []string{env(known2, "web/"+cmVar, h2)}
	web := pod(reads("app-config"))
	marked := func(hash string) corev1.PodTemplateSpec { return pod(reads("app-config"), variableSet(cmVar, hash)) }
	none := []string{}
	annotationMark := func(hash string) string {
		return `{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"` + hash + `","containerRefs":["web"],"observedAt":1}`
	}

	runCases(t, map[string]reconcileCase{
		"a variable of a source without a name, which the API server takes, is no reference": {
			objects: []runtime.Object{cm1(), deploy(pod(reads("app-config"), reads("")), kAuto, "true", nativeState, known1)},
			change:  changeCM,
			want:    rolled, events: reloaded,
		},
		"a change while no manager ran rolls once": {
			objects: []runtime.Object{cm2(), deploy(web, kAuto, "true", nativeState, known1)},
			want:    rolled, events: reloaded,
		},
		"migration records and rolls nothing, whatever the variable holds": {
			objects: []runtime.Object{cm2(), deploy(marked(h1), kAuto, "true")},
			want:    []string{stateOnly(known2)}, events: none,
		},
		"migration records and rolls nothing under the annotations strategy": {
			configure: strategyAnnotations,
			objects:   []runtime.Object{cm2(), deploy(pod(reads("app-config"), onTemplate(compatMark, annotationMark(h1))), kAuto, "true")},
			want:      []string{stateOnly(known2)}, events: none,
		},

		"a new workload is recorded once, also after another start": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true")},
			change:  func(w *fixture) { w.pass(time.Minute); w.restart() },
			want:    []string{stateOnly(known1)}, events: none,
		},
		"two changes within the quiet period are one patch": {
			objects: []runtime.Object{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db")), kAuto, "true",
				nativeState, stateOf(cmKey, h1, dbKey, p1))},
			change: func(w *fixture) { changeCM(w); w.pass(700 * time.Millisecond); changeDB(w) },
			want:   []string{env(stateOf(cmKey, h2, dbKey, p2), "web/"+cmVar, h2, "web/"+dbVar, p2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config, Secret shop/db"},
		},
		"the annotation names the source that changed last": {
			configure: strategyAnnotations,
			objects: []runtime.Object{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db")), kAuto, "true",
				nativeState, stateOf(cmKey, h1, dbKey, p1))},
			change: func(w *fixture) { changeDB(w); w.pass(300 * time.Millisecond); changeCM(w) },
			want: []string{ann(stateOf(cmKey, h2, dbKey, p2), compatMark,
				strings.Replace(annotationMark(h2), `"observedAt":1`, `"observedAt":`+fmt.Sprint(started+1), 1))},
			events: []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"},
		},
		"back and forth within the window is no change": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, known1)},
			change:  func(w *fixture) { changeCM(w); w.pass(900 * time.Millisecond); w.put(cm1()) },
			events:  none,
		},
		"next to the original, which is first, the template stays as it is": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				changeCM(w)
				w.put(deploy(marked(h2), kAuto, "true", nativeState, known1))
			},
			want: rolled, events: reloaded,
		},
		"creation is recorded": {
			objects: []runtime.Object{deploy(web, kAuto, "true", nativeState, absent)},
			change:  func(w *fixture) { w.put(cm1()) },
			want:    []string{stateOnly(known1)}, events: none,
		},
		"creation rolls with on-create": {
			configure: onCreate,
			objects:   []runtime.Object{deploy(web, kAuto, "true", nativeState, absent)},
			change:    changeCM,
			want:      rolled, events: reloaded,
		},
		"creation while no manager ran rolls with on-create": {
			configure: onCreate,
			objects:   []runtime.Object{cm2(), deploy(web, kAuto, "true", nativeState, absent)},
			want:      rolled, events: reloaded,
		},
		"a source that a pattern names rolls with on-create when it appears": {
			configure: onCreate,
			objects:   []runtime.Object{deploy(pod(), kCM, "app-.*")},
			change:    changeCM,
			want:      rolled, events: reloaded,
		},
		"a source that is deleted and comes back the same rolls nothing": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, known1)},
			change:  func(w *fixture) { w.remove(cm1()); w.pass(time.Minute); w.put(cm1()) },
			events:  none,
		},
		"coming back with other data is a change": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, known1)},
			change:  func(w *fixture) { w.remove(cm1()); w.pass(time.Minute); changeCM(w) },
			want:    rolled, events: reloaded,
		},
		"under search, a source that comes back with other data is a change": {
			objects: []runtime.Object{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.remove(cm1())
				w.pass(time.Minute)
				w.put(annotated(cm2(), kMatch, "true"))
			},
			want: rolled, events: reloaded,
		},
		"what only a pattern named is forgotten when it goes": {
			objects: []runtime.Object{cm1(), deploy(pod(), kCM, "app-.*", nativeState, known1)},
			change:  func(w *fixture) { w.remove(cm1()) },
			want:    []string{stateOnly("")}, events: none,
		},
		"on-delete removes the variable": {
			configure: onDelete,
			objects:   []runtime.Object{cm1(), deploy(marked(h1), kAuto, "true", nativeState, known1)},
			change:    func(w *fixture) { w.remove(cm1()) },
			want:      []string{env(absent, "web/"+cmVar, "")}, events: reloaded,
		},
		"on-delete without the variable is recorded": {
			configure: onDelete,
			objects:   []runtime.Object{cm1(), deploy(marked(h1), kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.remove(cm1())
				w.pass(time.Minute)
				w.put(cm1())
				w.pass(time.Minute)
				w.remove(cm1())
			},
			want:   []string{env(absent, "web/"+cmVar, ""), stateOnly(known1), stateOnly(absent)},
			events: reloaded,
		},
		"on-delete rolls for what only a pattern named, and forgets it": {
			configure: onDelete,
			objects:   []runtime.Object{cm1(), deploy(pod(variableSet(cmVar, h1)), kCM, "app-.*", nativeState, known1)},
			change:    func(w *fixture) { w.remove(cm1()) },
			want:      []string{env("", "web/"+cmVar, "")}, events: reloaded,
		},
		"on-delete under the annotations strategy marks the deletion": {
			configure: func(c *Config) { onDelete(c); strategyAnnotations(c) },
			objects:   []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, known1)},
			change:    func(w *fixture) { w.remove(cm1()) },
			want: []string{ann(absent, compatMark, strings.Replace(annotationMark(deletedHash), `"observedAt":1`,
				`"observedAt":`+fmt.Sprint(started+1), 1))},
			events: reloaded,
		},
		"on-delete rolls once for what is named by a pattern and referenced": {
			configure: onDelete,
			objects:   []runtime.Object{cm1(), deploy(marked(h1), kCM, "app-.*", nativeState, known1)},
			change:    func(w *fixture) { w.remove(cm1()) },
			want:      []string{env(absent, "web/"+cmVar, "")}, events: reloaded,
		},
		"a new reference is recorded, and rolls nothing by itself": {
			objects: []runtime.Object{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db")), kAuto, "true", nativeState, known1)},
			want:    []string{stateOnly(stateOf(cmKey, h1, dbKey, p1))}, events: none,
		},
		"a change right after the workload's creation is not swallowed by recording": {
			configure: func(c *Config) { c.QuietPeriod = 10 * time.Second },
			objects:   []runtime.Object{cm1()},
			change: func(w *fixture) {
				// Writing the state fails until the change is there.
				var fail bool
				w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
					fail = !fail
					return fail, nil, errors.New("not yet")
				})
				w.put(deploy(web, kAuto, "true"))
				w.pass(0)
				changeCM(w)
				w.pass(time.Minute)
			},
			want: []string{stateOnly(known1), env(known2, "web/"+cmVar, h2)}, // the first write fails
			events: []string{
				"Normal Reloaded Reloaded for ConfigMap shop/app-config",
				"Warning ReloadStateFail The state of its sources could not be recorded, so a change while no manager runs may be missed: not yet",
			},
		},
		"a state that is no state is reported and recorded anew": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", nativeState, "{")},
			want:    []string{stateOnly(known1)},
			events:  []string{"Warning InvalidReloadAnnotation quartermaster.dev/reload-state: not a JSON object of strings: unexpected end of JSON input"},
		},
		"an empty state on a workload that asks for nothing is removed, once": {
			objects: []runtime.Object{cm1(), deploy(web, nativeState, "")},
			change: func(w *fixture) {
				w.pass(time.Minute)
				w.put(annotated(w.deployment("web"), "example.org/touched", "1"))
			},
			want: []string{stateOnly("")},
		},
		"a change that comes with the annotation that makes the source count rolls": {
			objects: []runtime.Object{cm1(), deploy(web, kSearch, "true")},
			change:  func(w *fixture) { w.put(annotated(cm2(), kMatch, "true")) },
			want:    rolled, events: reloaded,
		},
		"a change that comes with the end of ignore rolls": {
			objects: []runtime.Object{annotated(cm1(), kIgnore, "true"), deploy(web, kAuto, "true")},
			change:  changeCM,
			want:    rolled, events: reloaded,
		},
	})
}

func TestFailingWorkloadHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		known1 := stateOf(cmKey, h1)
		api := deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOn("Deployment/shop/api", cmKey, h1))
		api.Name = "api"
		w := newFixture(t, nil, cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, known1), api)
		w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if a.(clienttesting.PatchAction).GetName() == "web" {
				return true, nil, apierrors.NewForbidden(a.GetResource().GroupResource(), "web", errors.New("no"))
			}
			return false, nil, nil
		})
		changeCM(w)
		w.pass(4500 * time.Millisecond) // due after 1 s, again 1 s and 3 s later
		web, other := env(stateOf(cmKey, h2), "web/"+cmVar, h2), envOn("deployments/api", stateOn("Deployment/shop/api", cmKey, h2), "web/"+cmVar, h2)
		got := w.writes()
		slices.Sort(got)
		if diff := cmp.Diff([]string{other, web, web, web}, got); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
		failed := "Warning ReloadFail Reload for ConfigMap shop/app-config failed: deployments.apps \"web\" is forbidden: no"
		want := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config", failed, failed, failed}
		if diff := cmp.Diff(want, w.events()); diff != "" {
			t.Errorf("events differ (-want +got):\n%s", diff)
		}
		if n := w.count("reloads_total", map[string]string{"kind": "Deployment", "result": resultError}); n != 3 {
			t.Errorf("%v errors counted, want 3", n)
		}
	})
}

func TestMaxDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The source changes every 1.9 s, so a quiet period of 3 s never passes.
		w := newFixture(t, func(c *Config) { c.QuietPeriod = 3 * time.Second },
			cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
		var when []time.Duration
		begun := time.Now()
		w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
			when = append(when, time.Since(begun))
			return false, nil, nil
		})
		for i := range 33 {
			w.put(cm("app-config", "i", fmt.Sprint(i)))
			w.pass(1900 * time.Millisecond)
		}
		w.pass(time.Minute)
		// The second window opens with the first change after the first patch, at 30.4 s. The
		// changes after the second window are quiet at 60.8 + 3 s.
		want := []time.Duration{30 * time.Second, 60400 * time.Millisecond, 63800 * time.Millisecond}
		if diff := cmp.Diff(want, when); diff != "" {
			t.Errorf("patches differ (-want +got):\n%s", diff)
		}
		if n := w.count("coalesced_changes_total", nil); n != 30 {
			t.Errorf("%v changes coalesced, want 30 of 33", n)
		}
	})
}

func TestStateRemovedByOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		known1 := stateOf(cmKey, h1)
		bare := deploy(pod(reads("app-config")), kAuto, "true")
		w := newFixture(t, nil, cm1(), annotated(bare.DeepCopy(), nativeState, known1))
		w.put(bare)
		w.pass(time.Second)
		if diff := cmp.Diff([]string{stateOnly(known1)}, w.writes()); diff != "" {
			t.Fatalf("it is written again at once (-want +got):\n%s", diff)
		}
		for range 20 { // ten minutes of removing and restoring
			w.put(bare)
			w.pass(29 * time.Second)
		}
		if n := len(w.writes()); n != 1 {
			t.Errorf("%d writes within ten minutes, want one", n)
		}
		// A change still rolls the workload, from memory, and writes the state with it.
		changeCM(w)
		w.pass(2 * time.Second)
		want := []string{stateOnly(known1), env(stateOf(cmKey, h2), "web/"+cmVar, h2)}
		if diff := cmp.Diff(want, w.writes()); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
	})
}
