// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
)

func TestReconcilesHaveProfilingLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		f.opts.Loop = "main"
		f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			controller, _ := pprof.Label(ctx, "controller")
			loop, _ := pprof.Label(ctx, "loop")
			f.say("%s %s", controller, loop)
			return 0, nil
		}
		f.run()
		f.expect("test main")
	})
}

func TestStatusHasTheLongestRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "slow")
		f.opts.Workers = 2
		f.reconcile = func(context.Context, cache.ObjectName) (time.Duration, error) { pass(time.Hour); return 0, nil }
		f.build(WatchSelf(f.configMaps))
		same(t, "status before Run", Status{Name: "test", Phase: PhaseStopped, Workers: 2, InFlight: []InFlight{}}, f.loop.Status())
		f.run()
		pass(time.Minute)
		status := f.loop.Status()
		same(t, "in flight", []InFlight{{Key: "shop/slow", Since: f.begun}}, status.InFlight)
		if key, d := status.LongestRunning(time.Now()); key != "shop/slow" || d != time.Minute {
			t.Errorf("longest running = %q for %v, want shop/slow for 1m", key, d)
		}
		const longest = "quartermaster_controller_longest_running_reconcile_seconds"
		want := "# HELP " + longest + " [ALPHA] Age of the oldest reconcile in flight, by controller and loop; 0 if none is.\n" +
			"# TYPE " + longest + " gauge\n" + longest + `{cluster="",controller="test",loop=""} 60` + "\n"
		if err := testutil.GatherAndCompare(f.registry, strings.NewReader(want), longest); err != nil {
			t.Error(err)
		}
	})
}

func TestMetricsOfAClusterEndWithItsLoop(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	m := NewMetrics(registry)
	series := func() (names []string) {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, metric := range family.GetMetric() {
				if testutil.LabelsMatch(metric, map[string]string{"cluster": "far"}) {
					names = append(names, family.GetName())
				}
			}
		}
		return slices.Compact(names)
	}
	l, err := NewLoop(LoopOptions{Name: "x", Loop: "y", Cluster: "far", Metrics: m}, nothing)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewLoop(LoopOptions{Name: "x", Metrics: m}, nothing); err != nil {
		t.Fatal(err)
	}
	want := []string{"quartermaster_controller_longest_running_reconcile_seconds", "quartermaster_controller_reconcile_duration_seconds", "quartermaster_controller_reconciles_total"}
	same(t, "series", want, series())
	same(t, "name", "x/y/far", l.Status().Name)
	l.Close()
	if got := series(); got != nil {
		t.Errorf("left: %v", got)
	}
	if got := counters(t, registry, "x"); len(got) != len(results) {
		t.Errorf("the loop of our own cluster has %v", got)
	}
}

func TestClosedLoopHasNoHandler(t *testing.T) {
	f := newFixture(t, "a")
	f.build(WatchSelf(f.configMaps), WaitFor[cache.ObjectName](f.configMaps))
	f.loop.Close()
	same(t, "handlers", 0, len(f.configMaps.handlers))
}

// counters returns the reconciles of one controller by result.
func counters(t *testing.T, gatherer metrics.Gatherer, controller string) map[string]float64 {
	t.Helper()
	values, err := testutil.GetCounterValuesFromGatherer(gatherer, "quartermaster_controller_reconciles_total",
		map[string]string{"controller": controller}, "result")
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func TestDrainEndsReconcilesInTime(t *testing.T) {
	const hosts, own = "the host's time is up", "the reconcile did not end within the 5s that test has to drain"
	for name, tc := range map[string]struct {
		deaf     bool          // whether the reconcile, which takes an hour, ignores the end of its context
		own      time.Duration // LoopOptions.DrainTimeout
		cutAfter time.Duration // from the end of Run's context until the host cuts it off; 0: never
		ends     time.Duration // from the end of Run's context until Run returns
		cause    string        // of the cut, if there is one
	}{
		"a reconcile is waited for as long as the host does not cut it off": {ends: time.Hour},
		"the host cuts a reconcile off, and says why":                       {cutAfter: 10 * time.Second, ends: 10 * time.Second, cause: hosts},
		"a controller's own time cuts it off as well":                       {own: 5 * time.Second, cutAfter: 10 * time.Second, ends: 5 * time.Second, cause: own},
		"the controller's own time does not extend the host's":              {own: time.Minute, cutAfter: 10 * time.Second, ends: 10 * time.Second, cause: hosts},
		"Run does not return before a reconcile that ignores that":          {deaf: true, cutAfter: 10 * time.Second, ends: time.Hour},
	} {
		inBubble(t, name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "c")
			f.opts.DrainTimeout = tc.own
			work, cutOff := context.WithCancelCause(t.Context())
			defer cutOff(nil)
			f.work = work
			f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
				f.say("began")
				if tc.deaf {
					ctx = context.WithoutCancel(ctx)
				}
				select {
				case <-time.After(time.Hour):
					return 0, nil
				case <-ctx.Done():
					return 0, context.Cause(ctx)
				}
			}
			f.run()
			if got := f.loop.Status(); got.Phase != PhaseRunning || got.QueueDepth != 2 {
				t.Errorf("status while running = %+v, want Running with 2 keys queued", got)
			}
			f.stop()
			synctest.Wait()
			same(t, "phase after the context ended", PhaseDraining, f.loop.Status().Phase)
			if tc.cutAfter > 0 {
				defer time.AfterFunc(tc.cutAfter, func() { cutOff(errors.New(hosts)) }).Stop()
			}
			f.end()
			if took := time.Since(f.begun); took != tc.ends {
				t.Errorf("Run returned %v after its context ended, want %v", took, tc.ends)
			}
			f.expect("began") // the queued keys must not be taken while draining
			got := f.loop.Status()
			if got.Phase != PhaseStopped || len(got.InFlight) > 0 {
				t.Errorf("status after Run = %+v, want %s with nothing in flight", got, PhaseStopped)
			}
			var want *LastError
			if tc.cause != "" {
				want = &LastError{Key: "shop/c", Text: tc.cause, Time: time.Now()}
			}
			same(t, "last error", want, got.LastError)
		})
	}
}

func TestReconcileLearnsOfTheDrain(t *testing.T) {
	if Draining(t.Context()) != nil {
		t.Error("a context that is not of a reconcile drains")
	}
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			select {
			case <-Draining(ctx):
				return 0, ctx.Err() // which has not ended
			case <-time.After(time.Hour):
				return 0, errors.New("nobody told it")
			}
		}
		f.run()
		pass(time.Minute)
		f.end()
		if time.Since(f.begun) != time.Minute || f.loop.Status().LastError != nil {
			t.Errorf("Run returned after %v, the last error is %+v", time.Since(f.begun), f.loop.Status().LastError)
		}
	})
}

// TestDrainDoesNotWaitForAClusterThatHangs has a loop with 5 s to drain, whose reconcile takes an hour.
func TestDrainDoesNotWaitForAClusterThatHangs(t *testing.T) {
	for name, tc := range map[string]struct {
		cluster       string
		running, ends time.Duration // until Run's context ends, and from then until Run returns
	}{
		"the rest of the time is left to a cluster that is slow": {"far", 2 * time.Second, 3 * time.Second},
		"a cluster that has hung for longer has no time left":    {"far", time.Minute, 0},
		"the cluster of the manager itself has the whole time":   {"", time.Minute, 5 * time.Second},
	} {
		inBubble(t, name, func(t *testing.T) {
			f := newFixture(t)
			f.opts.Cluster, f.opts.DrainTimeout = tc.cluster, 5*time.Second
			f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
				<-ctx.Done()
				return 0, nil
			}
			f.build()
			f.run()
			f.loop.Enqueue(keyOf("a"))
			<-time.After(tc.running)
			ended := time.Now()
			f.end()
			if took := time.Since(ended); took != tc.ends {
				t.Errorf("Run returned %v after its context ended, want %v", took, tc.ends)
			}
		})
	}
}
