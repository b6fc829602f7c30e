// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestGraceHoldsAfterARestore has an object that is created with an expires long past while a leader
// watches, and one that its successor finds.
func TestGraceHoldsAfterARestore(t *testing.T) {
	const grace = 5 * time.Second
	f := newFixture(t)
	flags := args(append([]string{"--ttl-grace-period=" + grace.String()}, fleet.ShortTimings...)...)
	m := shared.RunLeader(f.ctx, t, flags...)
	past := map[string]string{"quartermaster.dev/expires": "2020-01-01"}
	earliest := map[string]time.Time{"restored": time.Now().Add(grace)}
	f.createConfigMap("restored", past)
	f.waitForEvent(f.namespace, "restored", "WillDeleteExpiredTTL")
	f.createConfigMap("kept", past)
	f.waitForEvent(f.namespace, "kept", "WillDeleteExpiredTTL")
	f.annotate("configmap/kept", "quartermaster.dev/expires-")
	f.waitUntilGone("restored")
	m.Kill()
	shared.FreeLease(t, m)
	f.createConfigMap("found", past)
	earliest["found"] = time.Now().Add(grace)
	shared.RunLeader(f.ctx, t, flags...)
	f.waitForEvent(f.namespace, "found", "WillDeleteExpiredTTL")
	f.waitUntilGone("found")
	for _, d := range f.deletions() {
		if at := earliest[d.ObjectRef.Name]; d.ObjectRef.Namespace == f.namespace && d.RequestReceivedTimestamp.Time.Before(at) {
			t.Errorf("%s was deleted %v too early", d.ObjectRef.Name, at.Sub(d.RequestReceivedTimestamp.Time))
		}
	}
	f.expectDeleted("configmaps/found", "configmaps/restored")
}

// TestLongHugeValuesAreReportedBriefly has annotations as long as the API server accepts. It logs the CPU
// time that the leader took for one, and for beginning with twenty.
func TestLongHugeValuesAreReportedBriefly(t *testing.T) {
	f, other := newFixture(t), newFixture(t)
	m := shared.RunLeader(f.ctx, t, args()...)
	other.settle()
	value := strings.Repeat("1h", 127<<10)
	begin := cpuTime(t, m)
	f.createConfigMap("huge", map[string]string{"quartermaster.dev/expires": value})
	f.waitForEvent(f.namespace, "huge", "InvalidTTL")
	t.Logf("CPU time for one, with the poll for its Event: %v", cpuTime(t, m)-begin)
	other.settle()
	for i := range 19 {
		f.createConfigMap(fmt.Sprint("huge-", i), map[string]string{ttlControllerTTL: value})
	}
	events, err := shared.Admin.CoreV1().Events(f.namespace).List(f.ctx, metav1.ListOptions{FieldSelector: "reason=InvalidTTL"})
	assert.NoError(t, err)
	for i := range events.Items {
		if text := events.Items[i].Message; len(text) > 200 || !strings.Contains(text, "is longer than 100 bytes") {
			t.Errorf("an Event of %d bytes: %.300s", len(text), text)
		}
	}
	if log := m.Tail(1000); strings.Contains(log, strings.Repeat("1h", 60)) {
		t.Error("the log has a value")
	}
	m.Kill()
	shared.FreeLease(t, m)
	m = shared.RunLeader(f.ctx, t, args()...)
	other.settle()
	t.Logf("CPU time of a start with twenty: %v", cpuTime(t, m))
	f.expectDeleted()
}

// cpuTime returns the CPU time that a manager has taken.
func cpuTime(t *testing.T, m *cluster.Manager) time.Duration {
	t.Helper()
	_, body, err := fleet.Get(m.InsecureURL+"/metrics", "")
	assert.NoError(t, err)
	seconds, err := strconv.ParseFloat(regexp.MustCompile(`(?m)^process_cpu_seconds_total (\S+)`).FindStringSubmatch(body)[1], 64)
	assert.NoError(t, err)
	return time.Duration(seconds * float64(time.Second))
}
