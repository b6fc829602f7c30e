// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strings"
	"testing"
	"time"
)

func TestAReplicaThatCannotReachTheLeaderSaysSo(t *testing.T) {
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
