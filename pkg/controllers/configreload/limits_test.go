// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func quietPeriod(d time.Duration) func(*config) { return func(c *config) { c.QuietPeriod = d } }

// requested compares the counts of the requests since the last call of forget.
func (f *fixture) requested(want map[string]int) {
	f.t.Helper()
	if diff := cmp.Diff(want, f.asked()); diff != "" {
		f.t.Errorf("requests differ (-want +got):\n%s", diff)
	}
}

func TestChangeIsOneRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The cache of workloads lags behind the controller's write, and the workload is reconciled
		// again meanwhile.
		f := newFixture(t, quietPeriod(0), cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		f.Lag(500*time.Millisecond, "deployments")
		f.forget()
		changeCM(f)
		f.pass(100 * time.Millisecond)
		f.Put(annotated(cm2(), kMatch, "true"))
		f.pass(2 * time.Second)
		f.requested(map[string]int{"patch deployments": 1})
	})
}

func TestEventOfManySourcesIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, deploy(pod(), kCM, "app-.*"))
		change := func(version string) {
			for i := range 50 {
				f.Put(cm(fmt.Sprintf("app-%03d", i), "v", version))
			}
			f.pass(time.Minute)
		}
		change("1")
		f.refuse("patch", "deployments", errTryAgain)
		change("2")
		events := f.events()
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
		f := newFixture(t, quietPeriod(0), objects...)
		f.forget()
		for i := range n {
			f.Put(source(i, "2"))
		}
		f.pass(time.Second)
		f.requested(map[string]int{"patch deployments": n})
		f.count(n, "reloads_total", "result", "success")
		f.count(n, "source_changes_total", "event", "update")
		f.count(n, "lag_seconds")
	})
}

func TestChangeDuringThePatchIsActedOnAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, quietPeriod(0), cm1(),
			auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		f.once("patch", "deployments", func() { <-time.After(100 * time.Millisecond) })
		changeCM(f)
		f.pass(50 * time.Millisecond)
		f.Put(cm1())
		f.pass(60 * time.Millisecond)
		f.expect(env(stateOf(cmKey, h2), "web/"+cmVar, h2), env(stateOf(cmKey, h1), "web/"+cmVar, h1))
	})
}

// A workload that names sources by a pattern is reconciled whenever one of them changes.
func TestUnwatchedSourceRollsNothing(t *testing.T) {
	for name, annotations := range map[string][]string{
		"beside a pattern":        {kAuto, "true", kCM, "zzz-.*"},
		"beside a native pattern": {nativeReload, "auto,configmap/zzz-*"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				noise := func(i int) *corev1.ConfigMap { return cm("noise", "v", fmt.Sprint(i)) }
				d := deploy(pod(reads("app-config")), append(annotations, nativeState, stateOf(cmKey, h1))...)
				f := newFixture(t, nil, cm1(), noise(0), d)
				changeCM(f)
				for i := range 3 {
					f.Put(noise(i + 1))
					f.pass(400 * time.Millisecond)
				}
				f.written(1)
				now := f.deployment("web")
				// A rollout by somebody else.
				now.Spec.Template = pod(reads("app-config"), reads("noise"))
				f.Put(now)
				f.pass(time.Minute)
				if got := f.writes(); len(got) != 2 || strings.Contains(got[1], "template") {
					t.Errorf("writes after the workload began to read it: %v", got[1:])
				}
			})
		})
	}
}

// The cache is compared with the API server if the workload may have been written after the source.
func TestReloadIsOfTheLastVersion(t *testing.T) {
	rolled := []string{env(stateOf(cmKey, h2), "web/"+cmVar, h2)}
	known := auto(pod(reads("app-config")), stateOf(cmKey, h1))
	marked := auto(pod(reads("app-config"), variableSet(cmVar, h1)), stateOf(cmKey, h1))
	unmarked := []string{env(stateOf(cmKey, ""), "web/"+cmVar, "")}
	for name, tc := range map[string]struct {
		configure func(*config)
		objects   []runtime.Object // which the cache has
		late      func(f *fixture) // which it does not have yet
		then      []runtime.Object
		failures  int // of the comparison
		want      []string
		asked     int
	}{
		"a source that is newer than the workload is not asked for": {then: objs{known, cm2()}, want: rolled},
		"a source that is older is asked for, once":                 {then: objs{cm2(), known}, want: rolled, asked: 1},
		"a source that is older is asked for again if asking fails": {then: objs{cm2(), known}, failures: 3, want: rolled, asked: 4},
		"a source that is gone rolls nothing": {objects: objs{cm2()},
			late: func(f *fixture) { f.Delete(cm2()) }, then: objs{known}, asked: 10},
		"a source that is gone is asked for under on-delete": {configure: onDelete, then: objs{marked}, want: unmarked, asked: 1},
		"a source that only the cache does not have rolls nothing": {configure: onDelete,
			late: func(f *fixture) { f.Put(cm2()) }, then: objs{marked}, asked: 10},
		"a source that the selector leaves out counts as deleted": {
			configure: func(c *config) { onDelete(c); c.SourceSelector = []string{"env=prod"} },
			then:      objs{cm2(), marked}, want: unmarked, asked: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *config) {
					c.QuietPeriod = 0
					if tc.configure != nil {
						tc.configure(c)
					}
				}, tc.objects...)
				f.forget()
				f.refuse("list", "configmaps", slices.Repeat([]error{errTryAgain}, tc.failures)...)
				if tc.late != nil {
					f.Lag(time.Minute, "configmaps")
					tc.late(f)
					f.Put(tc.then...)
				} else {
					f.Restart(func() { f.Put(tc.then...) })
				}
				f.pass(9500 * time.Millisecond)
				f.expect(tc.want...)
				if got := f.asked()["list configmaps"]; got != tc.asked {
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
		"sources chosen by a pattern":                      deploy(pod(), nativeReload, "configmap/app-*"),
		"sources chosen by references":                     deploy(pod(references...), nativeReload, "auto"),
		"sources chosen by a pattern and references alike": deploy(pod(references...), nativeReload, "auto,configmap/app-*"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, append(slices.Clone(objects), workload)...)
				f.pass(time.Minute)
				state, err := policy.ParseState(f.deployment("web").Annotations[nativeState], policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")})
				if err != nil || len(state) != policy.MaxSources {
					t.Errorf("%d sources are recorded, %v", len(state), err)
				}
				f.told("Warning InvalidReloadAnnotation sources: the workload refers to more than 300, or its patterns name more; only the first by name are watched")
				f.Put(source(policy.MaxSources, "2"), source(policy.MaxSources+2, "1")) // left alone
				f.pass(time.Minute)
				f.Put(source(policy.MaxSources-1, "2"))
				f.pass(time.Minute)
				f.told("Normal Reloaded Reloaded for ConfigMap shop/app-299")
			})
		})
	}
}

// Each list fills what a list may take, and there are many sources with long names.
func TestPatternsTooSlowAreRefused(t *testing.T) {
	var objects []runtime.Object
	for i := range 500 {
		objects = append(objects, cm(strings.Repeat("a", 240)+fmt.Sprintf("-b%03d", i)))
	}
	for name, tc := range map[string]struct {
		key, value string
		refused    bool
	}{
		"expressions that fill a list":      {kCM, strings.Repeat(".*a,", 80), true},
		"native wildcards that fill a list": {nativeReload, strings.Repeat("configmap/"+strings.Repeat("*a", 120)+",", 40), true},
		"a few plain names":                 {kCM, "a,b,c", false},
		"one native pattern":                {nativeReload, "configmap/app-*", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var want []string
				if tc.refused {
					want = []string{"Warning InvalidReloadAnnotation " + tc.key +
						": its patterns take too long to match against all names in the namespace, so nothing rolls the workload"}
				}
				f := newFixture(t, nil, append(slices.Clone(objects), deploy(pod(), tc.key, tc.value))...)
				f.told(want...)
			})
		})
	}
}

// 300 workloads of one namespace are due, and each patch takes 100 ms.
func TestNamespaceWithManyChangesDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		noisy, changed := cm1(), cm2()
		noisy.Namespace, changed.Namespace = "noisy", "noisy"
		for i := range 300 {
			d := deploy(pod(reads("app-config")), kAuto, "true")
			d.Namespace, d.Name = "noisy", fmt.Sprintf("web-%03d", i)
			objects = append(objects, d)
		}
		f := newFixture(t, nil, append(objects, noisy, cm1(), deploy(pod(reads("app-config")), kAuto, "true"))...)
		rolled := map[string]time.Time{}
		f.before("patch", "deployments", func(r controllertest.Request) error {
			<-time.After(100 * time.Millisecond)
			rolled[r.Namespace] = time.Now()
			return nil
		})
		f.Put(changed)
		f.pass(100 * time.Millisecond)
		begun := time.Now()
		changeCM(f)
		f.pass(time.Minute)
		if took, most := rolled["shop"].Sub(begun), f.cfg.QuietPeriod+time.Second; took > most {
			t.Errorf("the other namespace's workload was rolled after %v, want %v at most", took, most)
		}
		if took := rolled["noisy"].Sub(begun); took < 7*time.Second {
			t.Errorf("all was done after %v, so nothing waited", took)
		}
	})
}

func TestUnusedSourceWakesNoWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		was, is := cm1(), cm2()
		was.Name, is.Name = "unused", "unused"
		f := newFixture(t, quietPeriod(0), cm1(), was, deploy(pod(reads("app-config")), kAuto, "true"))
		reconciles := func(change runtime.Object) uint64 {
			f.pass(time.Minute)
			before := f.status().Reconciles
			f.Put(change)
			f.pass(time.Minute)
			return f.status().Reconciles - before
		}
		if n := reconciles(is); n != 0 {
			t.Errorf("%d reconciles for a ConfigMap that nobody uses", n)
		}
		if n := reconciles(cm2()); n == 0 {
			t.Error("no reconcile for the ConfigMap of the Deployment")
		}
	})
}
