// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"errors"
	"testing"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
)

// TestMemoryForgetsAReplacedObject has a workload that is deleted and created anew before anything is decided
// on it.
func TestMemoryForgetsAReplacedObject(t *testing.T) {
	m, k := newMemory(), objectKey{kinds()[0], cache.NewObjectName("shop", "a")}
	m.update(k, "1", func(e *entry) { e.History = policy.History{Contests: 3, RaisedAt: time.Unix(1, 0)} })
	if e := m.get(k, "1"); e.Contests != 3 || m.countContested() != 1 {
		t.Errorf("%+v", e)
	}
	if e := m.get(k, "2"); e != (entry{uid: "2"}) {
		t.Errorf("a successor has %+v", e)
	}
	m.update(k, "2", func(e *entry) { e.failures++ })
	if e := m.get(k, "2"); e != (entry{uid: "2", failures: 1}) {
		t.Errorf("a successor has %+v", e)
	}
	m.update(k, "2", func(e *entry) { e.failures = 0 })
	if len(m.entries) != 0 {
		t.Errorf("%d entries are left", len(m.entries))
	}
}

type notLeading struct{ error }

func (notLeading) NotLeading() bool { return true }

func TestLostLeadershipIsNoFailure(t *testing.T) {
	c := &controller{} // nothing of it is used: no Event, no metric
	w := &workloadState{objectKey: objectKey{kinds()[0], cache.NewObjectName("shop", "a")}}
	if after, err := c.handleFailure(t.Context(), w, nil, "patch", notLeading{errors.New("no")}); after != 0 || err == nil {
		t.Errorf("%v, %v", after, err)
	}
}
