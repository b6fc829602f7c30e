// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"pgregory.net/rapid"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestReconcileDecidesAgainOnAConflict(t *testing.T) {
	var (
		denial       = apierrors.NewNotFound(schema.GroupResource{Group: "policy.example", Resource: "teams"}, "shop")
		wasRefused   = failedEvent + errConflict.Error()
		pausedBefore = deploy(pod(), kPause, "5m", kPausedAt, second(-240))
	)
	denial.ErrStatus.Message = `admission webhook "teams.example" denied the request: ` + denial.ErrStatus.Message
	pausedBefore.Spec.Paused = true
	successor, green := deploy(web, kAuto, "true"), hashOf("color", "green")
	successor.UID = "successor"
	rolls, noEvents := []string{reloadedEvent}, []string{}
	// meanwhile returns a row in which somebody writes between the decision and the patch, which is no failure.
	meanwhile := func(write func(f *fixture), events []string, want ...string) reconcileCase {
		return reconcileCase{want: want, events: events, change: func(f *fixture) {
			f.beforeFirst("patch", "deployments", func() { write(f) })
			f.put(time.Hour, cm2()).expectNoErrors()
		}}
	}
	// refused returns a change that is refused n times.
	refused := func(n int, err error, change func(f *fixture)) func(f *fixture) {
		return func(f *fixture) {
			f.refuseNext(n, "patch", "deployments", err)
			change(f)
			f.advance(time.Minute)
		}
	}
	runCases(t, map[string]reconcileCase{
		"the change is still to be made": meanwhile((*fixture).touchWeb, rolls, rollPatch, rollPatch),
		"a second manager has made the change already": meanwhile(func(f *fixture) {
			f.Put(autoWeb(marked(hash2), recordedOn(f.web().ResourceVersion, state2)))
		}, noEvents, rollPatch),
		"somebody wrote what it would have written, and the template stays as it is": meanwhile(func(f *fixture) { f.Put(autoWeb(marked(hash2), state2)) },
			rolls, rollPatch, envWithoutState("web/"+cmVar, hash2)),
		"the workload is gone":   meanwhile(func(f *fixture) { f.Delete(f.web()) }, noEvents, rollPatch),
		"the workload opted out": meanwhile(func(f *fixture) { f.Put(deploy(web, nativeState, state1)) }, noEvents, rollPatch, statePatch("")),
		// If the state is removed while a reload is being written, it is known from the version that the reload was
		// decided on, even if the watch is late.
		"the state is removed": meanwhile(func(f *fixture) { f.Lag(time.Second, "deployments"); f.Put(deploy(web, kAuto, "true")) }, rolls, rollPatch, rollPatch),
		// When the response to a write arrives, there is another object of that name, of which more is known.
		"a late response is not the successor's": newCase(nil, func(f *fixture) {
			f.Latency(30 * time.Second)
			f.put(10*time.Second, cm2())
			f.Delete(f.web())
			f.put(10*time.Second, successor)
			f.Put(cm("app-config", "color", "green"))
			f.advance(time.Hour)
		}, []string{rollPatch, envPatch(stateOf(cmKey, green), "web/"+cmVar, green)}, reloadedEvent, reloadedEvent),
		"a conflict without end is tried again": newCase(nil, func(f *fixture) {
			refused(3*4, errConflict, changeCM)(f)
			f.expectNoErrors()
			f.expectMetric(3, "reloads_total", "kind", "Deployment", "result", "error")
		}, slices.Repeat(rollPatches, 13), reloadedEvent, wasRefused, wasRefused, wasRefused),
		// A webhook may deny a write with any status, including 404, which also means that the workload is gone.
		"a 404 that stays does not lose a reload, and is reported": {change: refused(4, denial, changeCM), want: slices.Repeat(rollPatches, 5), events: []string{reloadedEvent, failedEvent + denial.ErrStatus.Message}},
		"a 404 of a webhook does not lose the recording of a state": {
			objects: objectList{cm1(), deploy(web)}, change: refused(4, denial, func(f *fixture) { f.Put(deploy(web, kAuto, "true")) }),
			want: slices.Repeat([]string{statePatch(state1)}, 5), events: []string{notRecordedEvent + denial.ErrStatus.Message},
		},
		"a 404 of a webhook does not lose the end of a pause": {objects: objectList{pausedBefore}, change: refused(4, denial, func(*fixture) {}), want: slices.Repeat([]string{resumePatch()}, 5)},
	})
}

// TestTakeoverRollsEachChangeOnce has changes while nobody leads, or that the predecessor rolls at its end.
func TestTakeoverRollsEachChangeOnce(t *testing.T) {
	const little, long = 200 * time.Millisecond, 2 * time.Second
	workload, asksForAuto := autoWeb(web, state1), func() runtime.Object { return deploy(web, kAuto, "true") }
	record := func(f *fixture, hash string) {
		f.Put(autoWeb(marked(hash), recordedOn(f.web().ResourceVersion, stateOf(cmKey, hash))))
	}
	rollBefore := func(f *fixture) { changeCM(f); record(f, hash2) }
	withoutWorkload := func(f *fixture) { f.Delete(workload) }
	type row struct {
		sources, workloads time.Duration    // lags
		before             func(f *fixture) // what both caches have
		change             func(f *fixture)
		want               []string
		rolls              bool // else all of want is refused
	}
	bubbles(t, map[string]row{
		"a change of a source rolls":                                               {change: changeCM, want: rollPatches, rolls: true},
		"a change that was taken back rolls nothing":                               {change: func(f *fixture) { changeCM(f); f.Put(cm1()) }},
		"a change after the creation of a workload that nobody has recorded rolls": {workloads: little, before: withoutWorkload, change: func(f *fixture) { f.Put(asksForAuto()); changeCM(f) }, want: rollPatches, rolls: true},
		"a change before the creation of a workload that nobody has recorded is only recorded": {
			workloads: little, before: withoutWorkload, change: func(f *fixture) { changeCM(f); f.Put(asksForAuto()) }, want: []string{statePatch(state2)}, rolls: true,
		},
		"the workload arrives first":         {sources: long, workloads: little, change: rollBefore},
		"the source arrives first":           {sources: little, workloads: long, change: rollBefore, want: rollPatches},
		"workload and source arrive at once": {sources: long, workloads: long, change: rollBefore},
		"only the workload is late":          {workloads: long, change: rollBefore, want: rollPatches},
		"only the source is late":            {sources: long, change: rollBefore},
		"two rollouts are on their way":      {sources: long, workloads: little, change: func(f *fixture) { rollBefore(f); f.Put(cm1()); record(f, hash1) }},
		"the source is back where it was, and the predecessor did not roll for that any more": {
			sources: little, workloads: long, change: func(f *fixture) { rollBefore(f); f.Put(cm1()) },
			want: []string{envPatch(state1, "web/"+cmVar, hash1)}, rolls: true,
		},
		"a workload was created after another change, and only the source is late": {
			sources: long, before: func(f *fixture) { withoutWorkload(f); changeCM(f); f.Put(asksForAuto()) },
			change: func(f *fixture) { f.Put(cm("app-config", "color", "green")); record(f, hashOf("color", "green")) },
		},
		"the deletion of the source is late": {sources: long, change: func(f *fixture) { f.Delete(cm1()); record(f, "") }},
	}, func(t bubble, tc row) {
		f := startFixture(t.T, controllertest.Setup{Standby: true}, onDelete, objectList{cm1(), workload})
		if tc.before != nil {
			tc.before(f)
			f.advance(time.Minute)
			f.forgetRequests()
		}
		f.Lag(tc.sources, "configmaps")
		f.Lag(tc.workloads, "deployments")
		version := ""
		f.Restart(func() { tc.change(f); version = f.web().ResourceVersion })
		f.advance(2 * time.Minute).expectWrites(tc.want...)
		assert.Equal(t, "rolls", tc.rolls, f.web().ResourceVersion != version)
	})
}

// raceStep is one event; n is drawn from 0 to 2999.
type raceStep struct {
	name string
	n    int
}

var raceSteps = map[string]func(f *fixture, n int){
	"the source changes": func(f *fixture, n int) { f.Put(cm("app-config", "v", fmt.Sprint(n%4))) },
	"the source goes": func(f *fixture, _ int) {
		if c := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "app-config"); c != nil {
			f.Delete(c)
		}
	},
	"somebody touches the workload": func(f *fixture, n int) {
		synctest.Wait() // reading and writing is one step
		f.Put(annotated(f.web(), "example.org/touched", fmt.Sprint(n)))
	},
	"time passes":                 func(f *fixture, n int) { f.advance(time.Duration(n) * time.Millisecond) },
	"another manager takes over":  func(f *fixture, _ int) { f.Restart() },
	"no manager runs for a while": func(f *fixture, _ int) { f.Restart(func() { f.advance(time.Second) }) },
}

// raceCase is an order of events, with the outcomes of the patches.
type raceCase struct {
	quiet    time.Duration
	steps    []raceStep
	outcomes []string
	lags     map[string]time.Duration
}

var raceCases = rapid.Custom(func(t *rapid.T) raceCase {
	step := rapid.Custom(func(t *rapid.T) raceStep {
		return raceStep{rapid.SampledFrom(slices.Sorted(maps.Keys(raceSteps))).Draw(t, "name"), rapid.IntRange(0, 2999).Draw(t, "n")}
	})
	outcome := rapid.SampledFrom([]string{"success", "success", "success", "conflict", "429", "time-out", "applied, answer lost", "applied late, answer lost"})
	lag := rapid.SampledFrom([]time.Duration{0, 0, 10 * time.Millisecond, 700 * time.Millisecond})
	return raceCase{
		quiet:    rapid.SampledFrom([]time.Duration{0, time.Second}).Draw(t, "quiet period"),
		steps:    rapid.SliceOfN(step, 1, 25).Draw(t, "steps"),
		outcomes: rapid.SliceOfN(outcome, 0, 20).Draw(t, "outcomes of patches"),
		lags:     map[string]time.Duration{"configmaps": lag.Draw(t, "lag of sources"), "deployments": lag.Draw(t, "lag of workloads")},
	}
})

// In any order of events and with any outcome of requests, no change is lost and none rolls twice.
func TestChangesRollExactlyOnce(t *testing.T) {
	for seed := range 10 {
		for _, problem := range runRace(t, raceCases.Example(seed)) {
			t.Errorf("seed %d: %s", seed, problem)
		}
	}
}

func TestLongChangesRollExactlyOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		for _, problem := range runRace(t, raceCases.Draw(rt, "case")) {
			rt.Error(problem)
		}
	})
}

// runRace returns the problems found at the end.
func runRace(t *testing.T, c raceCase) (problems []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(cfg *config) {
			cfg.QuietPeriod = c.quiet
			strategyAnnotations(cfg) // every patch rolls; a variable would hide a second patch
			cfg.ExcludeSources, cfg.ExcludeKinds = []string{"secrets"}, []string{"statefulsets", "daemonsets", "cronjobs", "jobs"}
		}, cm("app-config", "v", "0"), autoWeb(web, stateOf(cmKey, hashOf("v", "0"))))
		for resource, lag := range c.lags {
			f.Lag(lag, resource)
		}
		var outcomes []answer
		for _, outcome := range c.outcomes {
			outcomes = append(outcomes, faults[outcome])
		}
		f.answerNext("patch", "deployments", outcomes...)
		rolled := f.recordMarks()
		for _, s := range c.steps {
			raceSteps[s.name](f, s.n)
		}
		f.Put(cm("app-config", "v", "final"))
		f.advance(2 * time.Hour) // including back-off
		for i := 1; i < len(*rolled); i++ {
			if (*rolled)[i] == (*rolled)[i-1] {
				problems = append(problems, fmt.Sprintf("rolled twice to the same data: %v", *rolled))
			}
		}
		want := hashOf("v", "final")
		if n := len(*rolled); n == 0 || (*rolled)[n-1] != want {
			problems = append(problems, fmt.Sprintf("the last change is lost: %v", *rolled))
		}
		if got, _ := withoutVersion(f.web().Annotations[nativeState]); got != stateOf(cmKey, want) {
			problems = append(problems, "state at the end is "+got)
		}
	})
	return problems
}

// faults are what may happen to a patch, before or after it took effect.
var faults = map[string]answer{
	"success":              refusal(nil),
	"conflict":             refusal(errConflict),
	"429":                  refusal(apierrors.NewTooManyRequests("made up", 2)),
	"time-out":             refusal(errTimeout),
	"applied, answer lost": (*fixture).applyRequest,
	"applied late, answer lost": func(f *fixture, r controllertest.Request) error {
		time.AfterFunc(1500*time.Millisecond, func() { _ = f.applyRequest(r) })
		return errTimeout
	},
}

// recordMarks collects the hash in the mark each time the pod template changes in the API server.
func (f *fixture) recordMarks() *[]string {
	var values []string
	client, err := kubernetes.NewForConfig(f.RESTConfig())
	assert.NoError(f.t, err)
	last := f.web()
	watch, err := client.AppsV1().Deployments("shop").Watch(f.t.Context(), metav1.ListOptions{ResourceVersion: last.ResourceVersion})
	assert.NoError(f.t, err)
	go func() {
		for event := range watch.ResultChan() {
			d, ok := event.Object.(*appsv1.Deployment)
			if !ok {
				return // the API server ends
			}
			if equality.Semantic.DeepEqual(last.Spec.Template, d.Spec.Template) {
				continue
			}
			last = d
			var m struct{ Hash string }
			if err := json.Unmarshal([]byte(d.Spec.Template.Annotations[compatMark]), &m); err != nil {
				f.t.Errorf("mark %q: %v", d.Spec.Template.Annotations[compatMark], err)
			}
			values = append(values, m.Hash)
		}
	}()
	f.t.Cleanup(watch.Stop)
	return &values
}

func quietPeriod(d time.Duration) func(*config) { return func(c *config) { c.QuietPeriod = d } }

func TestEventOfManySourcesIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, deploy(pod(), kCM, "app-.*"))
		change := func(version string) {
			for i := range 50 {
				f.Put(cm(fmt.Sprintf("app-%03d", i), "v", version))
			}
			f.advance(time.Minute)
		}
		change("1")
		f.refuseNext(1, "patch", "deployments", errTryAgain)
		change("2")
		events := f.events()
		assert.Equal(t, "Events, a failure and a reload", 2, len(events))
		for _, e := range events {
			if len(e) > 1100 {
				t.Errorf("an Event of %d bytes: %s", len(e), e)
			}
		}
	})
}

func TestReconcileWritesOncePerChange(t *testing.T) {
	runCases(t, map[string]reconcileCase{
		"a change is one request, though the cache is late and the workload is reconciled again meanwhile": newCase(nil, func(f *fixture) {
			f.Lag(500*time.Millisecond, "deployments")
			f.forgetRequests()
			f.put(100*time.Millisecond, cm2())
			f.put(2*time.Second, annotated(cm2(), kMatch, "true")).expectRequests(map[string]int{"patch deployments": 1})
			f.expectMetric(1, "reloads_total", "result", "success")
			f.expectMetric(1, "source_changes_total", "event", "update")
			f.expectMetric(1, "lag_seconds")
		}, rollPatches).withConfig(quietPeriod(0)),
		"a change during the patch is acted on at once": newCase(nil, func(f *fixture) {
			f.beforeFirst("patch", "deployments", func() { <-time.After(100 * time.Millisecond) })
			f.put(50*time.Millisecond, cm2())
			f.put(60*time.Millisecond, cm1()).expectWriteCount(2)
		}, []string{rollPatch, envPatch(state1, "web/"+cmVar, hash1)}, reloadedEvent, reloadedEvent).withConfig(quietPeriod(0)),
		// Such a workload is reconciled whenever a source of its namespace changes.
		"a source that a workload with a pattern does not watch rolls nothing, also as it comes to be read": {
			objects: objectList{cm1(), cm("noise", "v", "0"), deploy(web, kAuto, "true", kCM, "zzz-.*", nativeState, state1)},
			change: func(f *fixture) {
				changeCM(f)
				for i := range 3 {
					f.put(400*time.Millisecond, cm("noise", "v", fmt.Sprint(i+1)))
				}
				f.expectWriteCount(1)
				now := f.web()
				now.Spec.Template = pod(reads("app-config"), reads("noise")) // a rollout by somebody else
				f.Put(now)
			},
			want: []string{rollPatch, statePatch(stateOf(cmKey, hash2, "configmap/noise", hashOf("v", "3")))},
		},
	})
}

// The cache is compared with the API server if the workload may have been written after the source.
func TestReloadUsesTheNewestVersionOfASource(t *testing.T) {
	workload, withMark := autoWeb(web, state1), autoWeb(marked(hash1), state1)
	unmarked := []string{envPatch(stateAbsent, "web/"+cmVar, "")}
	type row struct {
		configure func(*config)
		objects   []runtime.Object // which the cache has
		late      func(f *fixture) // which it does not have yet
		then      []runtime.Object
		failures  int // of the comparison
		want      []string
		lists     int // requests for the version of a source
	}
	bubbles(t, map[string]row{
		"a source that is newer than the workload is not asked for": {then: objectList{workload, cm2()}, want: rollPatches},
		"a source that is older is asked for again if asking fails": {then: objectList{cm2(), workload}, failures: 3, want: rollPatches, lists: 4},
		"a source that is gone rolls nothing":                       {objects: objectList{cm2()}, late: func(f *fixture) { f.Delete(cm2()) }, then: objectList{workload}, lists: 10},
		"a source that is gone is asked for under on-delete":        {configure: onDelete, then: objectList{withMark}, want: unmarked, lists: 1},
		"a source that only the cache does not have rolls nothing":  {configure: onDelete, late: changeCM, then: objectList{withMark}, lists: 10},
		"a source that the selector leaves out counts as deleted":   {configure: func(c *config) { onDelete(c); c.SourceSelector = []string{"env=prod"} }, then: objectList{cm2(), withMark}, want: unmarked, lists: 1},
		"a Secret of a Helm release counts as deleted": {
			configure: onDelete, then: objectList{helmSecret("1"), autoWeb(pod(readsSecret("db"), variableSet(dbVar, dbHash1)), stateOf(dbKey, dbHash1))},
			want: []string{envPatch(stateOf(dbKey, ""), "web/"+dbVar, "")},
		},
	}, func(t bubble, tc row) {
		f := newFixture(t.T, func(c *config) {
			c.QuietPeriod = 0
			if tc.configure != nil {
				tc.configure(c)
			}
		}, tc.objects...)
		f.forgetRequests()
		f.refuseNext(tc.failures, "list", "configmaps", errTryAgain)
		if tc.late != nil {
			f.Lag(time.Minute, "configmaps")
			tc.late(f)
			f.Put(tc.then...)
		} else {
			f.Restart(func() { f.Put(tc.then...) })
		}
		f.advance(9500 * time.Millisecond).expectWrites(tc.want...)
		assert.Equal(t, "lists of ConfigMaps", tc.lists, f.countRequests()["list configmaps"])
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
		f.advance(time.Minute)
		state, err := policy.ParseState(f.web().Annotations[nativeState], policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")})
		if err != nil || len(state) != policy.MaxSources {
			t.Errorf("%d sources are recorded, %v", len(state), err)
		}
		f.expectEvents(invalidEvent + "sources: the workload refers to more than 300, or its patterns name more; only the first by name are watched")
		f.Put(source(policy.MaxSources, "2"), source(policy.MaxSources+2, "1")) // left alone
		f.advance(time.Minute)
		f.put(time.Minute, source(policy.MaxSources-1, "2")).expectEvents("Normal Reloaded Reloaded for ConfigMap shop/app-299")
	})
}

// Each list fills what a list may take, and there are many sources with long names.
func TestPatternsTooSlowAreRefused(t *testing.T) {
	var objects []runtime.Object
	for i := range 500 {
		objects = append(objects, cm(strings.Repeat("a", 240)+fmt.Sprintf("-b%03d", i)))
	}
	bubbles(t, map[string][2]string{ // key and value
		"expressions that fill a list":      {kCM, strings.Repeat(".*a,", 80)},
		"native wildcards that fill a list": {nativeReload, strings.Repeat("configmap/"+strings.Repeat("*a", 120)+",", 40)},
	}, func(t bubble, annotation [2]string) {
		newFixture(t.T, nil, append(slices.Clone(objects), deploy(pod(), annotation[0], annotation[1]))...).
			expectEvents(invalidEvent + annotation[0] + ": its patterns take too long to match against all names in the namespace, so nothing rolls the workload")
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
		f.beforeRequest("patch", "deployments", func(r controllertest.Request) error {
			<-time.After(100 * time.Millisecond)
			rolled[r.Namespace] = time.Now()
			return nil
		})
		f.put(100*time.Millisecond, changed)
		start := time.Now()
		f.put(time.Minute, cm2())
		if elapsed, limit := rolled["shop"].Sub(start), f.cfg.QuietPeriod+time.Second; elapsed > limit {
			t.Errorf("the other namespace's workload was rolled after %v, want %v at most", elapsed, limit)
		}
		if elapsed := rolled["noisy"].Sub(start); elapsed < 7*time.Second {
			t.Errorf("all was done after %v, so nothing waited", elapsed)
		}
	})
}

func TestUnusedSourceWakesNoWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		oldSource, newSource := cm1(), cm2()
		oldSource.Name, newSource.Name = "unused", "unused"
		f := newFixture(t, quietPeriod(0), cm1(), oldSource, deploy(web, kAuto, "true"))
		reconciles := func(change runtime.Object) uint64 {
			f.advance(time.Minute)
			before := f.status().Reconciles
			f.put(time.Minute, change)
			return f.status().Reconciles - before
		}
		assert.Equal(t, "reconciles for a ConfigMap that nobody uses", 0, reconciles(newSource))
		assert.Equal(t, "a reconcile for the ConfigMap of the Deployment", true, reconciles(cm2()) > 0)
	})
}
