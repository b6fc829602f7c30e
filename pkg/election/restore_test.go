// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// restore takes the store back to an earlier version of the Lease. A restarted API server ends the
// watches; one that was not restarted has watches that show nothing.
func restore(s *simStore, lease *coordinationv1.Lease, rv int64, restarted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease, s.rv, s.past = lease, rv, nil
	for _, w := range s.watches {
		if restarted {
			w.Stop()
		} else {
			w.stall()
		}
	}
}

// TestStoreIsRestored checks that the leader ends at its next renewal, and a standby when a
// lease duration has passed: the next life of either begins with nothing.
func TestStoreIsRestored(t *testing.T) {
	const lease = 15 * time.Second
	tests := map[string]struct {
		snapshot  func(*coordinationv1.Lease)
		restarted bool
		within    time.Duration
	}{
		"held by a replica that has gone": {func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "gone", lease, time.Now()) },
			true, lease + 4*time.Second},
		"released":           {func(l *coordinationv1.Lease) { *l = *protocol.ReleasedLease(l, time.Now()) }, true, lease + 4*time.Second},
		"held by the leader": {func(*coordinationv1.Lease) {}, true, lease + 4*time.Second},
		"held by a replica that has gone, and watches that stay silent": {
			func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "gone", lease, time.Now()) }, false, 2*lease + 4*time.Second},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				leader := startReplica(t, store, "leader", testConfig())
				<-leader.led
				standby := startReplica(t, store, "standby", testConfig())
				pass(time.Second)
				snapshot := assert.Must(store.get()).DeepCopy()
				tc.snapshot(snapshot)
				pass(time.Minute)
				start, before := time.Now(), standby.client.total()
				restore(store, snapshot, 110, tc.restarted)
				var lost *LostError
				if err := <-leader.done; !errors.As(err, &lost) || lost.Reason != protocol.ReasonStoreRestored || time.Since(start) > 3*time.Second {
					t.Errorf("the leader returned %v after %s", err, time.Since(start))
				}
				err := <-standby.done
				if took := time.Since(start); !errors.Is(err, ErrRestored) || took < lease || took > tc.within {
					t.Errorf("the standby returned %v after %s, want %s to %s", err, took, lease, tc.within)
				}
				if n := standby.client.total() - before; n > 50 {
					t.Errorf("the standby made %d requests", n)
				}
				store.background.Wait()
			})
		})
	}
}

// TestEditOfTheDurationDelaysNoFailover lets the leader undo the edit, and then crash.
func TestEditOfTheDurationDelaysNoFailover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		leader := startReplica(t, store, "leader", testConfig())
		<-leader.led
		standby := startReplica(t, store, "standby", testConfig())
		pass(time.Minute)
		store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To[int32](86400) })
		pass(5 * time.Second)
		leader.client.set(func(c *storeClient) { c.fail["update"] = errors.New("network is down") })
		start := time.Now()
		<-standby.led
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("it led after %s", took)
		}
		if err := <-leader.done; err == nil {
			t.Error("the leader has not noticed")
		}
		standby.end()
		store.background.Wait()
	})
}

func TestTransitionsAtTheirMaximum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.LeaseTransitions = ptr.To[int32](math.MaxInt32) })
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		if lease, _ := store.get(); transitionsOf(lease) != 0 {
			t.Errorf("the Lease is %s", describe(lease))
		}
		r.end()
		store.background.Wait()
	})
}
