// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// lagging returns a change in which one resource reaches the cache late.
func TestFirstSight(t *testing.T) {
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true") }
	rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	for name, tc := range map[string]struct {
		lags    map[string]time.Duration
		objects []runtime.Object
		change  func(w *world)
		want    []string
	}{
		"a change after the creation rolls, although the workload reaches the cache after it": {
			lags:    map[string]time.Duration{"deployments": 100 * time.Millisecond},
			objects: []runtime.Object{cm1()},
			change:  func(w *world) { w.put(web()); changeCM(w) },
			want:    []string{rolled},
		},
		"also if the source reaches it late, from its creation on": {
			lags:   map[string]time.Duration{"configmaps": 100 * time.Millisecond},
			change: func(w *world) { w.put(cm1()); w.put(web()); changeCM(w) },
			want:   []string{stateOnly(stateOf(cmKey, "")), rolled},
		},
		"a change before the creation does not, although the source reaches the cache after the workload": {
			lags:    map[string]time.Duration{"configmaps": 100 * time.Millisecond},
			objects: []runtime.Object{cm1()},
			change:  func(w *world) { changeCM(w); w.put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h1)), stateOnly(stateOf(cmKey, h2))},
		},
		"a change before the creation rolls nothing": {
			objects: []runtime.Object{cm1()},
			change:  func(w *world) { changeCM(w); w.pass(10 * time.Millisecond); w.put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"nor does one before the workload asks to be rolled": {
			objects: []runtime.Object{cm1(), deploy(pod(reads("app-config")))},
			change:  func(w *world) { changeCM(w); w.pass(10 * time.Millisecond); w.put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"nor one before the workload refers to the source": {
			objects: []runtime.Object{cm1(), db1(), deploy(pod(readsSecret("db")), kAuto, "true", nativeState, stateOf(dbKey, p1))},
			change: func(w *world) {
				changeCM(w)
				w.pass(10 * time.Millisecond)
				d := w.deployment("web")
				reads("app-config")(&d.Spec.Template)
				w.put(d)
			},
			want: []string{stateOnly(stateOf(cmKey, h2, dbKey, p1))},
		},
		"one right after it does": {
			lags:    map[string]time.Duration{"deployments": 100 * time.Millisecond},
			objects: []runtime.Object{cm1(), db1(), deploy(pod(readsSecret("db")), kAuto, "true", nativeState, stateOf(dbKey, p1))},
			change: func(w *world) {
				d := w.deployment("web")
				reads("app-config")(&d.Spec.Template)
				w.put(d)
				changeCM(w)
			},
			want: []string{env(stateOf(cmKey, h2, dbKey, p1), "web/"+cmVar, h2)},
		},
		"a state that was copied from another workload is none": {
			objects: []runtime.Object{cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOn("Deployment/other/web", cmKey, h2))},
			want:    []string{stateOnly(stateOf(cmKey, h1))},
		},
		"a state of the first release counts": {
			objects: []runtime.Object{cm2(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, `{"configmap/app-config":"`+h1[:stateDigits]+`"}`)},
			want:    []string{rolled},
		},
		"a CronJob in deletion is left alone": {
			objects: []runtime.Object{cm1(), cronJob(func(cj *batchv1.CronJob) {
				cj.DeletionTimestamp, cj.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
			}, kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1))},
			change: changeCM,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newLaggingWorld(t, tc.lags, nil, tc.objects...)
				w.pass(time.Second)
				if tc.change != nil {
					tc.change(w)
				}
				w.pass(time.Hour)
				if diff := cmp.Diff(tc.want, w.writes()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestWhatSomebodyWritesBackIsNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
		before := w.deployment("web")
		changeCM(w)
		w.pass(time.Minute)
		// All that a tool or an undo brings back.
		for range 15 {
			w.put(before.DeepCopy())
			w.pass(time.Minute)
		}
		want := []string{env(stateOf(cmKey, h2), "web/"+cmVar, h2), stateOnly(stateOf(cmKey, h2)), stateOnly(stateOf(cmKey, h2))}
		if diff := cmp.Diff(want, w.writes()); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
		// Its pods have read the second version, though the template has no mark of it.
		w.put(cm1())
		w.pass(time.Minute)
		mark := fmt.Sprintf(`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":%q,"containerRefs":["web"],"observedAt":`, h1)
		if got := w.deployment("web").Spec.Template; got.Spec.Containers[0].Env == nil {
			t.Errorf("the way back is not marked, want %s", mark)
		}
		// After a restart, what stands on the workload counts.
		w.stop()
		w.put(before.DeepCopy())
		w.put(cm2())
		n := len(w.writes())
		w.start()
		w.pass(time.Minute)
		if diff := cmp.Diff([]string{env(stateOf(cmKey, h2), "web/"+cmVar, h2)}, w.writes()[n:]); diff != "" {
			t.Errorf("writes after a restart differ (-want +got):\n%s", diff)
		}
	})
}
