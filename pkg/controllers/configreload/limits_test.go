// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func quietPeriod(d time.Duration) func(*Config) { return func(c *Config) { c.QuietPeriod = d } }

// requests counts the controller's requests to the API server, except for the informers' lists and
// watches at the start.
func (w *fixture) requests() map[string]int {
	count := map[string]int{}
	for _, a := range w.client.Actions() {
		count[a.GetVerb()+" "+a.GetResource().Resource]++
	}
	w.live.mu.Lock()
	defer w.live.mu.Unlock()
	if w.live.count > 0 {
		count["live version"] = w.live.count
	}
	return count
}

func TestChangeIsOneRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The cache of workloads lags behind the controller's write, and the workload is reconciled
		// again meanwhile.
		w := newLaggingFixture(t, map[string]time.Duration{"deployments": 500 * time.Millisecond}, quietPeriod(0),
			cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
		w.pass(time.Second)
		w.client.ClearActions()
		changeCM(w)
		w.pass(100 * time.Millisecond)
		w.put(annotated(cm2(), kMatch, "true"))
		w.pass(2 * time.Second)
		if diff := cmp.Diff(map[string]int{"patch deployments": 1}, w.requests()); diff != "" {
			t.Errorf("requests differ (-want +got):\n%s", diff)
		}
	})
}

func TestEventOfManySourcesIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, deploy(pod(), kCM, "app-.*"))
		change := func(version string) {
			for i := range 50 {
				w.put(cm(fmt.Sprintf("app-%03d", i), "v", version))
			}
			w.pass(time.Minute)
		}
		change("1")
		w.failPatches(1)
		change("2")
		events := w.events()
		if len(events) != 2 {
			t.Errorf("events %v, want a failure and a reload", events)
		}
		for _, e := range events {
			if len(e) > 1100 {
				t.Errorf("an Event of %d bytes: %s", len(e), e)
			}
		}
	})
}

func TestBurstIsOnePatchPerWorkload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		var objects []runtime.Object
		source := func(i int, v string) *corev1.ConfigMap { return cm(fmt.Sprintf("config-%d", i), "v", v) }
		for i := range n {
			d := deploy(pod(reads(source(i, "1").Name)), kAuto, "true")
			d.Name = fmt.Sprintf("web-%d", i)
			objects = append(objects, source(i, "1"), d)
		}
		w := newFixture(t, quietPeriod(0), objects...)
		w.pass(time.Second)
		w.client.ClearActions()
		for i := range n {
			w.put(source(i, "2"))
		}
		synctest.Wait()
		if diff := cmp.Diff(map[string]int{"patch deployments": n}, w.requests()); diff != "" {
			t.Errorf("requests at once differ (-want +got):\n%s", diff)
		}
		if got := w.count("reloads_total", map[string]string{"result": resultSuccess}); got != n {
			t.Errorf("%v reloads counted, want %d", got, n)
		}
		if got := w.count("source_changes_total", map[string]string{"event": eventUpdate}); got != n {
			t.Errorf("%v changes counted, want %d", got, n)
		}
		if got := w.count("change_to_patch_seconds", nil); got != n {
			t.Errorf("%v durations observed, want %d", got, n)
		}
	})
}

func TestChangeDuringThePatchIsActedOnAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, quietPeriod(0), cm1(),
			deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
		slow := true
		w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
			if slow {
				slow = false
				<-time.After(100 * time.Millisecond)
			}
			return false, nil, nil
		})
		changeCM(w)
		w.pass(50 * time.Millisecond)
		w.put(cm1())
		w.pass(60 * time.Millisecond)
		want := []string{env(stateOf(cmKey, h2), "web/"+cmVar, h2), env(stateOf(cmKey, h1), "web/"+cmVar, h1)}
		if diff := cmp.Diff(want, w.writes()); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
	})
}

// A workload that names sources by a pattern is reconciled whenever one of them changes.
func TestUnwatchedSourceRollsNothing(t *testing.T) {
	for name, annotations := range map[string][]string{
		"beside a pattern":        {kAuto, "true", kCM, "zzz-.*"},
		"beside a native pattern": {nativeReload, "auto,configmap/zzz-*"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				noise := func(i int) *corev1.ConfigMap { return cm("noise", "v", fmt.Sprint(i)) }
				d := deploy(pod(reads("app-config")), append(annotations, nativeState, stateOf(cmKey, h1))...)
				w := newFixture(t, nil, cm1(), noise(0), d)
				changeCM(w)
				for i := range 3 {
					w.put(noise(i + 1))
					w.pass(400 * time.Millisecond)
				}
				if n := len(w.writes()); n != 1 {
					t.Errorf("%d writes after the quiet period, want 1", n)
				}
				now := w.deployment("web")
				// A rollout by somebody else.
				now.Spec.Template = pod(reads("app-config"), reads("noise"))
				w.put(now)
				w.pass(time.Minute)
				if got := w.writes(); len(got) != 2 || strings.Contains(got[1], "template") {
					t.Errorf("writes after the workload began to read it: %v", got[1:])
				}
			})
		})
	}
}

// After a hand-over, the cache of sources may be older, by any time, than what the former leader
// acted on.
func TestOldSourceCacheRollsNothing(t *testing.T) {
	green := hashOf("color", "green")
	acted := deploy(pod(reads("app-config"), variableSet(cmVar, h2)), kAuto, "true", nativeState, stateOf(cmKey, h2))
	for name, tc := range map[string]struct {
		lag     time.Duration
		between time.Duration // then the source changes once more
		want    []string
	}{
		"for a moment": {lag: settle / 2},
		"for long":     {lag: time.Minute},
		"for long, and then there is another change": {lag: time.Minute, between: 10 * time.Second,
			want: []string{env(stateOf(cmKey, green), "web/"+cmVar, green)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// The fake's watch begins with the existing objects; here it begins late.
				w := newLaggingFixture(t, map[string]time.Duration{"configmaps": tc.lag}, quietPeriod(0))
				w.stop()
				w.put(cm2(), acted)
				w.client.PrependReactor("list", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) {
					old := cm1()
					old.ResourceVersion = "1"
					return true, &corev1.ConfigMapList{Items: []corev1.ConfigMap{*old}}, nil
				})
				w.start()
				if tc.between > 0 {
					w.pass(tc.between)
					w.put(cm("app-config", "color", "green"))
				}
				w.pass(time.Hour)
				if diff := cmp.Diff(tc.want, w.writes(), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// The cache is compared with the API server if the workload may have been written after the source.
func TestReloadIsOfTheLastVersion(t *testing.T) {
	rolled := []string{env(stateOf(cmKey, h2), "web/"+cmVar, h2)}
	known := deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1))
	marked := deploy(pod(reads("app-config"), variableSet(cmVar, h1)), kAuto, "true", nativeState, stateOf(cmKey, h1))
	unmarked := []string{env(stateOf(cmKey, ""), "web/"+cmVar, "")}
	for name, tc := range map[string]struct {
		configure func(*Config)
		objects   []runtime.Object // in the order in which they were written
		failures  int              // of the comparison
		removed   bool             // and the cache does not know yet
		behind    bool             // the cache does not have app-config
		want      []string
		asked     int
	}{
		"a source that is newer than the workload is not asked for": {objects: []runtime.Object{known, cm2()}, want: rolled},
		"a source that is older is asked for, once":                 {objects: []runtime.Object{cm2(), known}, want: rolled, asked: 1},
		"a source that is older is asked for again if asking fails": {objects: []runtime.Object{cm2(), known}, failures: 3, want: rolled, asked: 4},
		"a source that is gone rolls nothing":                       {objects: []runtime.Object{cm2(), known}, removed: true, asked: 10},
		"a source that is gone is asked for under on-delete":        {configure: onDelete, objects: []runtime.Object{marked}, want: unmarked, asked: 1},
		"a source that only the cache does not have rolls nothing":  {configure: onDelete, objects: []runtime.Object{marked}, behind: true, asked: 10},
		"a source that the selector leaves out counts as deleted": {
			configure: func(c *Config) { onDelete(c); c.SourceSelector = []string{"env=prod"} },
			objects:   []runtime.Object{cm2(), marked}, want: unmarked, asked: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, func(c *Config) {
					c.QuietPeriod = 0
					if tc.configure != nil {
						tc.configure(c)
					}
				})
				w.live.failures, w.live.gone = tc.failures, tc.removed
				if tc.behind {
					w.live.newer = "7"
				}
				w.stop()
				w.put(tc.objects...)
				w.start()
				w.pass(10*time.Second - settle/2)
				if diff := cmp.Diff(tc.want, w.writes(), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
				if got := w.requests()["live version"]; got != tc.asked {
					t.Errorf("asked %d times, want %d", got, tc.asked)
				}
			})
		})
	}
}

func TestSourcesOfAWorkloadAreLimited(t *testing.T) {
	source := func(i int, v string) *corev1.ConfigMap { return cm(fmt.Sprintf("app-%03d", i), "v", v) }
	var objects []runtime.Object
	var references []podOption
	for i := range policy.MaxSources + 2 {
		objects = append(objects, source(i, "1"))
		references = append(references, reads(source(i, "").Name))
	}
	for name, workload := range map[string]*appsv1.Deployment{
		"by a pattern":   deploy(pod(), nativeReload, "configmap/app-*"),
		"by references":  deploy(pod(references...), nativeReload, "auto"),
		"by both, alike": deploy(pod(references...), nativeReload, "auto,configmap/app-*"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, append(slices.Clone(objects), workload)...)
				w.pass(time.Minute)
				state, err := policy.ParseState(w.deployment("web").Annotations[nativeState], policy.Key{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")})
				if err != nil || len(state) != policy.MaxSources {
					t.Errorf("%d sources are recorded, %v", len(state), err)
				}
				want := []string{"Warning InvalidReloadAnnotation sources: the workload refers to more than 300, or its patterns name more; only the first by name are watched"}
				if diff := cmp.Diff(want, w.events()); diff != "" {
					t.Errorf("Events (-want +got):\n%s", diff)
				}
				w.client.ClearActions()
				w.put(source(policy.MaxSources, "2"), source(policy.MaxSources+2, "1")) // left alone
				w.pass(time.Minute)
				w.put(source(policy.MaxSources-1, "2"))
				w.pass(time.Minute)
				if diff := cmp.Diff([]string{"Normal Reloaded Reloaded for ConfigMap shop/app-299"}, w.events()); diff != "" {
					t.Errorf("Events (-want +got):\n%s", diff)
				}
			})
		})
	}
}
