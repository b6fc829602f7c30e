// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/component-base/metrics"
)

func TestMetricNames(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	newDomainMetrics(registry, newMemory(nil), map[string]*kind{"Deployment": nil, "Job": nil})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, f := range families {
		got[strings.TrimPrefix(f.GetName(), metricPrefix)] = len(f.GetMetric())
	}
	want := map[string]int{ // series at the start
		"reloads_total": 2 * 4, "source_changes_total": 3 * 3, "coalesced_changes_total": 1, "pending_workloads": 1,
		"paused_deployments": 1, "state_writes_total": 2, "change_to_patch_seconds": 1,
		"invalid_annotations_total": 1, "lost_jobs_total": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics differ (-want +got):\n%s", diff)
	}
}
