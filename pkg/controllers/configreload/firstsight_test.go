// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

func TestFirstSight(t *testing.T) {
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true") }
	rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	labelled := func(cm *corev1.ConfigMap) *corev1.ConfigMap {
		cm.Labels = map[string]string{"env": "prod"}
		return cm
	}
	namespace := func(labels map[string]string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: labels}}
	}
	for name, tc := range map[string]struct {
		lags    map[string]time.Duration
		config  func(*config)
		objects []runtime.Object
		change  func(f *fixture)
		want    []string
	}{
		"a change after the creation rolls, although the workload reaches the cache after it": {
			lags:    map[string]time.Duration{"deployments": 100 * time.Millisecond},
			objects: objs{cm1()},
			change:  func(f *fixture) { f.Put(web()); changeCM(f) },
			want:    []string{rolled},
		},
		"a change after the creation rolls, although the source reaches the cache late, from its creation on": {
			lags:   map[string]time.Duration{"configmaps": 100 * time.Millisecond},
			change: func(f *fixture) { f.Put(cm1()); f.Put(web()); changeCM(f) },
			want:   []string{stateOnly(stateOf(cmKey, "")), rolled},
		},
		"a change before the creation does not, although the source reaches the cache after the workload": {
			lags:    map[string]time.Duration{"configmaps": 100 * time.Millisecond},
			objects: objs{cm1()},
			change:  func(f *fixture) { changeCM(f); f.Put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h1)), stateOnly(stateOf(cmKey, h2))},
		},
		"a change before the creation rolls nothing": {
			objects: objs{cm1()},
			change:  func(f *fixture) { changeCM(f); f.pass(10 * time.Millisecond); f.Put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"a change before the workload asks to be rolled rolls nothing": {
			objects: objs{cm1(), deploy(pod(reads("app-config")))},
			change:  func(f *fixture) { changeCM(f); f.pass(10 * time.Millisecond); f.Put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"a change before the workload refers to the source rolls nothing": {
			objects: objs{cm1(), db1(), auto(pod(readsSecret("db")), stateOf(dbKey, p1))},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(10 * time.Millisecond)
				d := f.deployment("web")
				reads("app-config")(&d.Spec.Template)
				f.Put(d)
			},
			want: []string{stateOnly(stateOf(cmKey, h2, dbKey, p1))},
		},
		"a change right after the source was added to the template rolls": {
			lags:    map[string]time.Duration{"deployments": 100 * time.Millisecond},
			objects: objs{cm1(), db1(), auto(pod(readsSecret("db")), stateOf(dbKey, p1))},
			change: func(f *fixture) {
				d := f.deployment("web")
				reads("app-config")(&d.Spec.Template)
				f.Put(d)
				changeCM(f)
			},
			want: []string{env(stateOf(cmKey, h2, dbKey, p1), "web/"+cmVar, h2)},
		},
		"next to the original, which is first, the template stays as it is though the cache does not know yet": {
			lags:    map[string]time.Duration{"deployments": 10 * time.Second},
			objects: objs{cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1))},
			change: func(f *fixture) {
				f.pass(20 * time.Second)
				changeCM(f)
				f.Put(auto(pod(reads("app-config"), variableSet(cmVar, h2)), stateOf(cmKey, h1)))
			},
			want: []string{rolled, rolled}, // the first is refused
		},
		"a source that was there before the workload, and begins to count after it, rolls with on-create": {
			config: func(c *config) { onCreate(c); c.SourceSelector = []string{"env=prod"} },
			change: func(f *fixture) {
				f.Put(cm2())
				f.pass(time.Second)
				f.Put(web())
				f.pass(time.Minute)
				f.Put(labelled(cm2()))
			},
			want: []string{stateOnly(stateOf(cmKey, "")), rolled},
		},
		"a source that has changed while it did not count rolls with on-create": {
			config: func(c *config) { c.SourceSelector = []string{"env=prod"} },
			change: func(f *fixture) {
				f.Put(labelled(cm1()))
				f.pass(time.Second)
				f.Put(web())
				f.pass(time.Minute)
				f.Put(cm2())
				f.pass(time.Minute)
				f.Put(labelled(cm2()))
			},
			want: []string{stateOnly(stateOf(cmKey, h1)), rolled},
		},
		"a change before the end of ignore rolls nothing": {
			objects: objs{cm1(), web()},
			change: func(f *fixture) {
				f.Put(annotated(cm1(), kIgnore, "true"))
				f.pass(time.Minute)
				f.Put(annotated(cm2(), kIgnore, "true"))
				f.pass(time.Minute)
				f.Put(cm2())
			},
			want: []string{stateOnly(stateOf(cmKey, h1)), stateOnly(""), stateOnly(stateOf(cmKey, h2))},
		},
		"a change before the source matches rolls nothing": {
			objects: objs{cm1(), deploy(pod(reads("app-config")), kSearch, "true")},
			change:  func(f *fixture) { changeCM(f); f.pass(time.Minute); f.Put(annotated(cm2(), kMatch, "true")) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"a change right after the source matches rolls": {
			objects: objs{cm1(), deploy(pod(reads("app-config")), kSearch, "true")},
			change: func(f *fixture) {
				f.Put(annotated(cm1(), kMatch, "true"))
				f.pass(10 * time.Millisecond)
				f.Put(annotated(cm2(), kMatch, "true"))
			},
			want: []string{rolled},
		},
		"a change before the namespace is selected rolls nothing": {
			config:  func(c *config) { c.NamespaceSelector = []string{"env=prod"} },
			objects: objs{namespace(nil), cm1(), web()},
			change:  func(f *fixture) { changeCM(f); f.pass(time.Minute); f.Put(namespace(map[string]string{"env": "prod"})) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"a state that was copied from another workload is none": {
			objects: objs{cm1(), auto(pod(reads("app-config")), stateOn("Deployment/other/web", cmKey, h2))},
			want:    []string{stateOnly(stateOf(cmKey, h1))},
		},
		"a state of the first release counts": {
			objects: objs{cm2(), auto(pod(reads("app-config")), `{"configmap/app-config":"`+h1[:stateDigits]+`"}`)},
			want:    []string{rolled},
		},
		"a CronJob in deletion is left alone": {
			objects: objs{cm1(), cronJob(func(cj *batchv1.CronJob) {
				cj.DeletionTimestamp, cj.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
			}, kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1))},
			change: changeCM,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, tc.config, tc.objects...)
				for resource, lag := range tc.lags {
					f.Lag(lag, resource)
				}
				f.pass(time.Second)
				if tc.change != nil {
					tc.change(f)
				}
				f.pass(time.Hour)
				f.expect(tc.want...)
			})
		})
	}
}

func TestStateWrittenBackIsNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		before := f.deployment("web")
		changeCM(f)
		f.pass(time.Minute)
		// All that a tool or an undo brings back.
		for range 15 {
			f.Put(before.DeepCopy())
			f.pass(time.Minute)
		}
		rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
		want := []string{rolled, stateOnly(stateOf(cmKey, h2)), stateOnly(stateOf(cmKey, h2))}
		f.expect(want...)
		// Its pods have read the second version, though the template has no mark of it.
		f.Put(cm1())
		f.pass(time.Minute)
		want = append(want, envAlone("web/"+cmVar, h1)) // its state is there
		f.expect(want...)
		// After a restart, what stands on the workload counts.
		f.Restart(func() { f.Put(before.DeepCopy(), cm2()) })
		f.pass(time.Minute)
		f.expect(append(want, rolled)...)
	})
}

// Most workloads have not been rolled since the manager was last restarted or upgraded.
func TestStateOfAnEarlierRunStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		before := f.deployment("web")
		changeCM(f)
		f.pass(time.Minute)
		f.Restart()
		f.pass(time.Minute)
		f.Put(before)
		f.pass(time.Hour)
		f.expect(env(stateOf(cmKey, h2), "web/"+cmVar, h2), stateOnly(stateOf(cmKey, h2)))
	})
}

// It is in Git, and the workload asks for nothing any more.
func TestStateThatComesBackIsRemovedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inGit := deploy(pod(reads("app-config")), nativeState, stateOf(cmKey, h1))
		f := newFixture(t, nil, cm1(), inGit.DeepCopy())
		for range 15 {
			f.pass(time.Minute)
			f.Put(inGit.DeepCopy())
		}
		f.pass(time.Hour)
		want := slices.Repeat([]string{stateOnly("")}, 4) // after 0, 1, 11 and 21 minutes
		f.expect(want...)
		// The workload asks again, and nobody else has written its state meanwhile.
		f.Put(annotated(f.deployment("web"), kAuto, "true"))
		f.pass(time.Second)
		f.expect(append(want, stateOnly(stateOf(cmKey, h1)))...)
	})
}

func TestStateThatCannotBeRecordedIsReported(t *testing.T) {
	for name, refusal := range map[string]error{
		"403": apierrors.NewForbidden(appsv1.Resource("deployments"), "web", errors.New("no")),
		"404": apierrors.NewNotFound(appsv1.Resource("deployments"), "web"),
		"409": apierrors.NewConflict(appsv1.Resource("deployments"), "web", errors.New("no")),
		"422": apierrors.NewInvalid(appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind(), "web", nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1())
				f.refuse("patch", "deployments", slices.Repeat([]error{refusal}, 99)...)
				f.Put(deploy(pod(reads("app-config")), kAuto, "true"))
				f.pass(5 * time.Second) // at once, and after 1 s and 3 s
				f.count(3, "state_writes_total", "result", "error")
				events := f.events()
				if len(events) != 3 || !strings.HasPrefix(events[0], "Warning ReloadStateFail ") {
					t.Errorf("events %q, want a warning for each", events)
				}
			})
		})
	}
}
