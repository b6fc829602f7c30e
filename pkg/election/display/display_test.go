// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package display

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

var leaseName = types.NamespacedName{Namespace: "ns", Name: "lease"}

type setClock struct{ now time.Duration }

func (c *setClock) Now() time.Duration { return c.now }

// TestDisplayLeadsWhenControllersRun checks the metric is_leader and the phase.
func TestDisplayLeadsWhenControllersRun(t *testing.T) {
	clock := &setClock{}
	d := New(leaseName, "r", 10*time.Second, clock, nil, assert.Must(NewMetrics(metrics.NewKubeRegistry())))
	leading := func() bool { return assert.Must(testutil.GetGaugeMetricValue(d.metrics.gauge(d.metrics.leading))) == 1 }
	held := protocol.View{Holding: true, ProofUntil: time.Second}
	d.Update(held, false)
	if leading() || d.Status(0).Phase != "Starting" {
		t.Errorf("it leads before lead has started, phase %s", d.Status(0).Phase)
	}
	d.SetUnproved(errors.New("of 3 API servers, the addresses of 2 are known"))
	d.Started(logr.Discard(), held)
	held.Leading = true
	d.Update(held, false)
	if s := d.Status(0); !leading() || s.Phase != "Leading" || s.Start.After != StartWaited || !strings.Contains(s.Start.Why, "2 are known") {
		t.Errorf("it shows %+v", s)
	}
	d.SetTrouble(errors.New("no answer"))
	clock.now = 9 * time.Second
	d.SetTrouble(errors.New("webhook"))
	if err := d.Problem(); err != nil {
		t.Errorf("before the deadline the problem is %v", err)
	}
	clock.now = 10 * time.Second
	if err := d.Problem(); err == nil || !strings.Contains(err.Error(), "webhook") {
		t.Errorf("the problem is %v", err)
	}
	d.Update(held, true)
	if leading() {
		t.Error("it leads after the term")
	}
}

func TestHealthFollowsRenewals(t *testing.T) {
	clock := &setClock{}
	held := protocol.View{Holding: true, Expires: 15 * time.Second}
	for name, tc := range map[string]struct {
		view protocol.View
		end  protocol.Reason // of Run; "": it runs
		now  time.Duration
		want bool
	}{
		"a standby is healthy":                                                {protocol.View{}, "", time.Hour, true},
		"a leader within its Lease is healthy":                                {held, "", 14 * time.Second, true},
		"a leader a little after its Lease is healthy":                        {held, "", 35 * time.Second, true},
		"a leader long after its Lease is unhealthy":                          {held, "", 36 * time.Second, false},
		"a leader that has released is healthy":                               {held, protocol.ReasonReleased, 36 * time.Second, true},
		"a leader that has given the Lease up is healthy":                     {held, protocol.ReasonCannotLead, 36 * time.Second, true},
		"a leader that has lost its term is unhealthy, for it should be gone": {held, protocol.ReasonRenewDeadline, 36 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := New(leaseName, "r", 0, clock, nil, nil)
			d.Update(tc.view, tc.end != "")
			if tc.end != "" {
				d.Ended(tc.end, true)
			}
			clock.now = tc.now
			if err := d.Healthy(20 * time.Second); (err == nil) != tc.want {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestMetricsOfTwoLocksAreDistinct(t *testing.T) {
	m := assert.Must(NewMetrics(metrics.NewKubeRegistry()))
	one := m.forLease(leaseName)
	other := leaseName
	other.Namespace = "other"
	two := m.forLease(other)
	one.set(one.leading, true)
	if assert.Must(testutil.GetGaugeMetricValue(two.gauge(two.leading))) != 0 {
		t.Error("they share a series")
	}
}
