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

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func quietPeriod(d time.Duration) func(*config) { return func(c *config) { c.QuietPeriod = d } }

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
		f.refuse(1, "patch", "deployments", errTryAgain)
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
		f.pass(time.Second).requested(map[string]int{"patch deployments": n})
		f.count(n, "reloads_total", "result", "success")
		f.count(n, "source_changes_total", "event", "update")
		f.count(n, "lag_seconds")
	})
}

func TestReconcileCosts(t *testing.T) {
	runCases(t, map[string]reconcileCase{
		"a change is one request, though the cache is late and the workload is reconciled again meanwhile": given(nil, func(f *fixture) {
			f.Lag(500*time.Millisecond, "deployments")
			f.forget()
			f.put(100*time.Millisecond, cm2())
			f.put(2*time.Second, annotated(cm2(), kMatch, "true")).requested(map[string]int{"patch deployments": 1})
		}, rolled).with(quietPeriod(0)),
		"a change during the patch is acted on at once": given(nil, func(f *fixture) {
			f.once("patch", "deployments", func() { <-time.After(100 * time.Millisecond) })
			f.put(50*time.Millisecond, cm2())
			f.put(60*time.Millisecond, cm1()).written(2)
		}, []string{roll, env(known1, "web/"+cmVar, h1)}, reloaded, reloaded).with(quietPeriod(0)),
		// Such a workload is reconciled whenever a source of its namespace changes.
		"a source that a workload with a pattern does not watch rolls nothing, also as it comes to be read": {
			objects: objs{cm1(), cm("noise", "v", "0"), deploy(web, kAuto, "true", kCM, "zzz-.*", nativeState, known1)},
			change: func(f *fixture) {
				changeCM(f)
				for i := range 3 {
					f.put(400*time.Millisecond, cm("noise", "v", fmt.Sprint(i+1)))
				}
				f.written(1)
				now := f.web()
				now.Spec.Template = pod(reads("app-config"), reads("noise")) // a rollout by somebody else
				f.Put(now)
			},
			want: []string{roll, stateOnly(stateOf(cmKey, h2, "configmap/noise", hashOf("v", "3")))},
		},
	})
}

// The cache is compared with the API server if the workload may have been written after the source.
func TestReloadIsOfTheLastVersion(t *testing.T) {
	known, withMark := auto(web, known1), auto(marked(h1), known1)
	unmarked := []string{env(absent, "web/"+cmVar, "")}
	type row struct {
		configure func(*config)
		objects   []runtime.Object // which the cache has
		late      func(f *fixture) // which it does not have yet
		then      []runtime.Object
		failures  int // of the comparison
		want      []string
		asked     int
	}
	bubbles(t, map[string]row{
		"a source that is newer than the workload is not asked for": {then: objs{known, cm2()}, want: rolled},
		"a source that is older is asked for again if asking fails": {then: objs{cm2(), known}, failures: 3, want: rolled, asked: 4},
		"a source that is gone rolls nothing":                       {objects: objs{cm2()}, late: func(f *fixture) { f.Delete(cm2()) }, then: objs{known}, asked: 10},
		"a source that is gone is asked for under on-delete":        {configure: onDelete, then: objs{withMark}, want: unmarked, asked: 1},
		"a source that only the cache does not have rolls nothing":  {configure: onDelete, late: changeCM, then: objs{withMark}, asked: 10},
		"a source that the selector leaves out counts as deleted": {
			configure: func(c *config) { onDelete(c); c.SourceSelector = []string{"env=prod"} }, then: objs{cm2(), withMark}, want: unmarked, asked: 1,
		},
	}, func(t bubble, tc row) {
		f := newFixture(t.T, func(c *config) {
			c.QuietPeriod = 0
			if tc.configure != nil {
				tc.configure(c)
			}
		}, tc.objects...)
		f.forget()
		f.refuse(tc.failures, "list", "configmaps", errTryAgain)
		if tc.late != nil {
			f.Lag(time.Minute, "configmaps")
			tc.late(f)
			f.Put(tc.then...)
		} else {
			f.Restart(func() { f.Put(tc.then...) })
		}
		f.pass(9500 * time.Millisecond).expect(tc.want...)
		same(t, "lists of ConfigMaps", tc.asked, f.asked()["list configmaps"])
	})
}

func TestSourcesOfAWorkloadAreLimited(t *testing.T) {
	source := func(i int, v string) *corev1.ConfigMap { return cm(fmt.Sprintf("app-%03d", i), "v", v) }
	var objects []runtime.Object
	var references []podOption
	for i := range policy.MaxSources + 2 {
		objects = append(objects, source(i, "1"))
		references = append(references, reads(source(i, "").Name))
	}
	bubbles(t, map[string]*appsv1.Deployment{
		"sources chosen by a pattern":                      deploy(pod(), nativeReload, "configmap/app-*"),
		"sources chosen by references":                     deploy(pod(references...), nativeReload, "auto"),
		"sources chosen by a pattern and references alike": deploy(pod(references...), nativeReload, "auto,configmap/app-*"),
	}, func(t bubble, workload *appsv1.Deployment) {
		f := newFixture(t.T, nil, append(slices.Clone(objects), workload)...)
		f.pass(time.Minute)
		state, err := policy.ParseState(f.web().Annotations[nativeState], policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")})
		if err != nil || len(state) != policy.MaxSources {
			t.Errorf("%d sources are recorded, %v", len(state), err)
		}
		f.told(invalid + "sources: the workload refers to more than 300, or its patterns name more; only the first by name are watched")
		f.Put(source(policy.MaxSources, "2"), source(policy.MaxSources+2, "1")) // left alone
		f.pass(time.Minute)
		f.put(time.Minute, source(policy.MaxSources-1, "2")).told("Normal Reloaded Reloaded for ConfigMap shop/app-299")
	})
}

// Each list fills what a list may take, and there are many sources with long names.
func TestPatternsTooSlowAreRefused(t *testing.T) {
	var objects []runtime.Object
	for i := range 500 {
		objects = append(objects, cm(strings.Repeat("a", 240)+fmt.Sprintf("-b%03d", i)))
	}
	type row struct {
		key, value string
		refused    bool
	}
	bubbles(t, map[string]row{
		"expressions that fill a list":      {kCM, strings.Repeat(".*a,", 80), true},
		"native wildcards that fill a list": {nativeReload, strings.Repeat("configmap/"+strings.Repeat("*a", 120)+",", 40), true},
		"a few plain names":                 {kCM, "a,b,c", false},
		"one native pattern":                {nativeReload, "configmap/app-*", false},
	}, func(t bubble, tc row) {
		var want []string
		if tc.refused {
			want = []string{invalid + tc.key + ": its patterns take too long to match against all names in the namespace, so nothing rolls the workload"}
		}
		newFixture(t.T, nil, append(slices.Clone(objects), deploy(pod(), tc.key, tc.value))...).told(want...)
	})
}

// 300 workloads of one namespace are due, and each patch takes 100 ms.
func TestNamespaceWithManyChangesDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		noisy, changed := cm1(), cm2()
		noisy.Namespace, changed.Namespace = "noisy", "noisy"
		for i := range 300 {
			d := deploy(web, kAuto, "true")
			d.Namespace, d.Name = "noisy", fmt.Sprintf("web-%03d", i)
			objects = append(objects, d)
		}
		f := newFixture(t, nil, append(objects, noisy, cm1(), deploy(web, kAuto, "true"))...)
		rolled := map[string]time.Time{}
		f.before("patch", "deployments", func(r controllertest.Request) error {
			<-time.After(100 * time.Millisecond)
			rolled[r.Namespace] = time.Now()
			return nil
		})
		f.put(100*time.Millisecond, changed)
		begun := time.Now()
		f.put(time.Minute, cm2())
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
		f := newFixture(t, quietPeriod(0), cm1(), was, deploy(web, kAuto, "true"))
		reconciles := func(change runtime.Object) uint64 {
			f.pass(time.Minute)
			before := f.status().Reconciles
			f.put(time.Minute, change)
			return f.status().Reconciles - before
		}
		same(t, "reconciles for a ConfigMap that nobody uses", 0, reconciles(is))
		if n := reconciles(cm2()); n == 0 {
			t.Error("no reconcile for the ConfigMap of the Deployment")
		}
	})
}
