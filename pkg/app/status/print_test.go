// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strings"
	"testing"
	"time"
)

func TestReplicaThatCannotReachTheLeader(t *testing.T) {
	for state, want := range map[string]bool{"Answers": false, "Unreachable": true} {
		r := report{Replicas: []replica{{Name: "pod-1", answer: answer{Endpoint: "https://a", Reached: true, Phase: "Standby", LeaderProcess: state}}}}
		var out strings.Builder
		if err := r.write(&out, "", time.Now()); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(out.String(), "https://a, but it cannot reach the leader's"); got != want {
			t.Errorf("%s:\n%s", state, out.String())
		}
	}
}

func TestHolderThatDoesNotLeadSaysWhy(t *testing.T) {
	r := report{Leader: leader{Holder: "pod-1_abc", Pod: "pod-1", Leads: true},
		Replicas: []replica{{Name: "pod-1", answer: answer{Endpoint: "https://a", Reached: true, Phase: "Starting", Problem: "the webhook is away"}}}}
	r.trustLeader()
	var out strings.Builder
	if err := r.write(&out, "", time.Now()); err != nil || r.Leader.Leads {
		t.Errorf("%v, leads: %t", err, r.Leader.Leads)
	}
	for _, want := range []string{"<none>: pod-1_abc holds the Lease and does not lead yet", "https://a, but the webhook is away"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}
