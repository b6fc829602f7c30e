// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"runtime/pprof"
	"slices"
	"strings"
	"sync/atomic"
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
		var labels atomic.Value
		h := newHarness(t, reconciling{
			LoopOptions: LoopOptions{Loop: "main"},
			Reconcile: func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
				controller, _ := pprof.Label(ctx, "controller")
				loop, _ := pprof.Label(ctx, "loop")
				labels.Store(controller + " " + loop)
				return 0, nil
			},
		}, "a")
		h.run(t)
		if got := labels.Load(); got != "test main" {
			t.Errorf("the labels controller and loop are %q, want test main", got)
		}
	})
}

func TestStatusHasTheLongestRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, reconciling{
			LoopOptions: LoopOptions{Workers: 2},
			Reconcile: func(_ context.Context, k cache.ObjectName) (time.Duration, error) {
				if k.Name == "slow" {
					pass(time.Hour)
				}
				return 0, nil
			},
		}, "slow")
		h.build(t, WatchSelf(h.informer))
		before := h.loop.Status()
		if diff := cmp.Diff(Status{Name: "test", Phase: PhaseStopped, Workers: 2, InFlight: []InFlight{}}, before); diff != "" {
			t.Errorf("status before Run differs (-want +got):\n%s", diff)
		}
		h.start(t)
		pass(time.Minute)
		status := h.loop.Status()
		if diff := cmp.Diff([]InFlight{{Key: "shop/slow", Since: h.begun}}, status.InFlight); diff != "" {
			t.Errorf("in flight differs (-want +got):\n%s", diff)
		}
		if key, d := status.LongestRunning(time.Now()); key != "shop/slow" || d != time.Minute {
			t.Errorf("longest running = %q for %v, want shop/slow for 1m", key, d)
		}
		const longest = "quartermaster_controller_longest_running_reconcile_seconds"
		want := "# HELP " + longest + " [ALPHA] Age of the oldest reconcile in flight, by controller and loop; 0 if none is.\n" +
			"# TYPE " + longest + " gauge\n" + longest + `{cluster="",controller="test",loop=""} 60` + "\n"
		if err := testutil.GatherAndCompare(h.registry, strings.NewReader(want), longest); err != nil {
			t.Error(err)
		}
		pass(2 * time.Hour)
	})
}

func nothing(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil }

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

func counter(t *testing.T, gatherer metrics.Gatherer, result string) float64 {
	t.Helper()
	return counters(t, gatherer, "test")[result]
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
