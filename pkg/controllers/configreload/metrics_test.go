// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
)

func TestMetricNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil)
		families, err := w.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]int{}
		for _, f := range families {
			if name, ok := strings.CutPrefix(f.GetName(), metricPrefix); ok {
				got[name] = len(f.GetMetric())
			}
		}
		want := map[string]int{ // series at the start
			"reloads_total": 5 * 4, "source_changes_total": 3 * 3, "coalesced_changes_total": 1, "pending_workloads": 1,
			"paused_deployments": 1, "state_writes_total": 2, "change_to_patch_seconds": 1,
			"invalid_annotations_total": 1, "lost_jobs_total": 1,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("metrics differ (-want +got):\n%s", diff)
		}
	})
}
