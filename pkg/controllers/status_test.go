// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
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
		if diff := cmp.Diff(Status{Name: "test", Phase: PhaseStopped, Workers: 2, InFlight: []InFlight{}}, f.loop.Status()); diff != "" {
			t.Errorf("status before Run differs (-want +got):\n%s", diff)
		}
		f.run()
		pass(time.Minute)
		status := f.loop.Status()
		if diff := cmp.Diff([]InFlight{{Key: "shop/slow", Since: f.begun}}, status.InFlight); diff != "" {
			t.Errorf("in flight differs (-want +got):\n%s", diff)
		}
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
	if diff := cmp.Diff(want, series()); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
	if got := l.Status().Name; got != "x-y/far" {
		t.Errorf("its name is %s", got)
	}
	l.Close()
	if got := series(); got != nil {
		t.Errorf("left: %v", got)
	}
	if got := counters(t, registry, "x"); len(got) != len(results) {
		t.Errorf("the loop of our own cluster has %v", got)
	}
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
