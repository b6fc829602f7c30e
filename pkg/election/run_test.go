// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

var errLead = errors.New("lead failed")

func TestHandoverTakesMilliseconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		first := startReplica(t, store, "first", testConfig())
		<-first.led
		second := startReplica(t, store, "second", testConfig())
		pass(10 * time.Minute)
		start := time.Now()
		first.stop(nil)
		<-second.led
		// The time for a release, an event and an acquisition in the simulated network.
		if took := time.Since(start); took > 20*time.Millisecond {
			t.Errorf("took %s", took)
		}
		if err := <-first.done; err != nil {
			t.Error(err)
		}
		second.end()
		store.background.Wait()
		want := []string{"Normal LeaderElection %s %s", "Normal LeaderElection %s %s"}
		assert.Equal(t, "Events", want, first.events.seen)
	})
}

// TestFailoverIsAtTheExpiry kills a leader.
func TestFailoverIsAtTheExpiry(t *testing.T) {
	for name, cfg := range map[string]Config{"15s": testConfig(), "3s": shortConfig()} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				first := startReplica(t, store, "first", cfg)
				<-first.led
				second := startReplica(t, store, "second", cfg)
				pass(time.Hour + 123*time.Millisecond)
				first.client.link.set(func(l *simLink) { l.dead = true })
				first.client.set(func(c *storeClient) { c.fail["update"] = errors.New("network is down") })
				lease, err := store.get()
				assert.NoError(t, err)
				<-second.led
				took := time.Since(lease.Spec.RenewTime.Time)
				if took < cfg.LeaseDuration.Duration || took > cfg.LeaseDuration.Duration+20*time.Millisecond {
					t.Errorf("took over %s after the last renewal", took)
				}
				var lost *LostError
				if err := <-first.done; !errors.As(err, &lost) || lost.Reason != protocol.ReasonRenewDeadline {
					t.Errorf("the first returned %v", err)
				}
				second.end()
				store.background.Wait()
			})
		})
	}
}

// TestReplicasLeadOneAtATime lets five standbys see the same release.
func TestReplicasLeadOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		var all []*testReplica
		for i := range 5 {
			all = append(all, startReplica(t, store, fmt.Sprintf("r%d", i), testConfig()))
		}
		for range all {
			pass(time.Minute)
			leaders := 0
			for _, r := range all {
				if r.lock.IsLeading() {
					leaders++
					r.stop(nil)
				}
			}
			if leaders != 1 {
				t.Errorf("%d leaders", leaders)
			}
		}
		for _, r := range all {
			if err := <-r.done; err != nil {
				t.Error(err)
			}
		}
		store.background.Wait()
		lease, err := store.get()
		if err != nil || transitionsOf(lease) != 5 || protocol.HolderOf(lease) != "" {
			t.Errorf("the Lease is left as %s, %v", describe(lease), err)
		}
	})
}

// TestHandoversInARowLoseNoTime checks a rolling update after a crash: once the crash is over, no standby
// waits because of it.
func TestHandoversInARowLoseNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		var all []*testReplica
		for i := range 8 {
			all = append(all, startReplica(t, store, fmt.Sprintf("r%d", i), testConfig()))
		}
		lead := func() *testReplica {
			for start := time.Now(); time.Since(start) < time.Minute; pass(time.Millisecond) {
				for _, r := range all {
					if r.lock.IsLeading() {
						return r
					}
				}
			}
			t.Fatal("nobody leads")
			return nil
		}
		crashed := lead()
		crashed.client.set(func(c *storeClient) { c.fail["update"] = errors.New("network is down") })
		if err := <-crashed.done; err == nil {
			t.Error("no error")
		}
		for range 6 {
			leader := lead()
			pass(300 * time.Millisecond)
			start := time.Now()
			leader.end()
			lead()
			if took := time.Since(start); took > 20*time.Millisecond {
				t.Errorf("took %s", took)
			}
		}
		lead().end()
		store.background.Wait()
	})
}

func TestDrainRenewsAndThenReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		cfg := shortConfig()
		drained := make(chan struct{})
		stopping := errors.New("SIGTERM")
		var cause error
		r := startReplicaWith(t, store, "r", cfg, func(ctx context.Context) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			pass(4 * time.Second) // longer than the lease duration
			close(drained)
			return errLead
		})
		<-r.led
		store.mu.Lock()
		store.onChange = func(_ string, _, after *coordinationv1.Lease) {
			select {
			case <-drained:
			default:
				if protocol.HolderOf(after) != "r" {
					t.Error("released before lead has returned")
				}
			}
		}
		store.mu.Unlock()
		r.stop(stopping)
		pass(3900 * time.Millisecond)
		if !r.lock.IsLeading() {
			t.Error("it cannot write while it drains")
		}
		if err := <-r.done; !errors.Is(err, errLead) {
			t.Errorf("Run returned %v, want what lead did", err)
		}
		if !errors.Is(cause, stopping) {
			t.Errorf("lead's context ended by %v", cause)
		}
		if store.holder() != "" {
			t.Error("not released")
		}
		store.background.Wait()
	})
}

func TestDrainThatTakesTooLongDoesNotRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		unwedge := make(chan struct{})
		r := startReplicaWith(t, store, "r", shortConfig(), func(context.Context) error {
			<-unwedge
			return nil
		})
		<-r.led
		start := time.Now()
		r.stop(nil)
		err := <-r.done
		var lost *LostError
		if !errors.As(err, &lost) || lost.Reason != protocol.ReasonDrainTimeout {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("Run returned after %s", took)
		}
		if store.holder() != "r" || r.lock.IsLeading() {
			t.Errorf("the Lease is held by %q, fence open %t", store.holder(), r.lock.IsLeading())
		}
		close(unwedge)
		store.background.Wait()
	})
}

func TestLeadWithWorkLeftDoesNotRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplicaWith(t, store, "r", shortConfig(), func(ctx context.Context) error {
			<-ctx.Done()
			return fmt.Errorf("controller x: %w: %w", ErrUnfinished, errLead)
		})
		<-r.led
		start := time.Now()
		r.stop(nil)
		err := <-r.done
		var lost *LostError
		if !errors.As(err, &lost) || lost.Reason != protocol.ReasonDrainTimeout || !errors.Is(err, errLead) {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("Run returned after %s", took)
		}
		if store.holder() != "r" || r.lock.IsLeading() {
			t.Errorf("the Lease is held by %q, fence open %t", store.holder(), r.lock.IsLeading())
		}
		store.background.Wait()
	})
}

func TestLeadThatReturnsReleasesTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", shortConfig())
		<-r.led
		r.leave <- errLead
		if err := <-r.done; !errors.Is(err, errLead) || store.holder() != "" {
			t.Errorf("Run returned %v, the Lease is held by %q", err, store.holder())
		}
		store.background.Wait()
	})
}

func TestStandbyStops(t *testing.T) {
	t.Run("at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := freeStore()
			leader := startReplica(t, store, "leader", testConfig())
			<-leader.led
			standby := startReplica(t, store, "standby", testConfig())
			pass(time.Minute)
			standby.stop(nil)
			if err := <-standby.done; err != nil || len(standby.events.seen) > 0 {
				t.Errorf("Run returned %v, events %v", err, standby.events.seen)
			}
			leader.end()
			store.background.Wait()
		})
	})
	t.Run("and gives back what it gets while it stops", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := freeStore()
			r := startReplica(t, store, "r", testConfig())
			for r.client.count("update") == 0 {
				pass(100 * time.Microsecond)
			}
			r.stop(nil)
			if err := <-r.done; err != nil {
				t.Error(err)
			}
			lease, _ := store.get()
			if len(r.led) > 0 || protocol.HolderOf(lease) != "" || transitionsOf(lease) != 1 {
				t.Errorf("it led %t, the Lease is %s", len(r.led) > 0, describe(lease))
			}
			store.background.Wait()
		})
	})
}

// TestIdleElectorsSendFewRequests counts the requests of an election in which nothing happens.
func TestIdleElectorsSendFewRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		leader := startReplica(t, store, "leader", testConfig())
		<-leader.led
		standby := startReplica(t, store, "standby", testConfig())
		pass(time.Hour)
		const minutes = 60
		if n := standby.client.count("get") + standby.client.count("update") + standby.client.count("create"); n > minutes {
			t.Errorf("a standby has made %d requests in an hour", n)
		}
		if n := leader.client.count("get") + leader.client.count("update"); n > 30*minutes+3 {
			t.Errorf("a leader has made %d requests in an hour", n)
		}
		for _, r := range []*testReplica{leader, standby} {
			if n := r.client.count("watch"); n > minutes/5+1 {
				t.Errorf("%d watches in an hour", n)
			}
		}
		standby.end()
		leader.end()
		store.background.Wait()
	})
}

func TestStandbyPollsWithoutAWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		leader := startReplica(t, store, "leader", testConfig())
		<-leader.led
		standby := startReplica(t, store, "standby", testConfig())
		standby.client.set(func(c *storeClient) {
			c.fail["watch"] = apierrors.NewForbidden(leaseResource, "lease", errors.New("no"))
		})
		leader.client.set(func(c *storeClient) { c.fail["watch"] = standby.client.fail["watch"] })
		pass(time.Hour)
		for _, r := range []*testReplica{leader, standby} {
			if n := r.client.count("watch"); n > 120 {
				t.Errorf("%d attempts at a watch in an hour", n)
			}
		}
		start := time.Now()
		leader.stop(nil)
		<-standby.led
		if took := time.Since(start); took > 3*time.Second+20*time.Millisecond {
			t.Errorf("it leads after %s", took)
		}
		standby.end()
		store.background.Wait()
	})
}

func TestLeaseThatDoesNotExist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newSimStore()
		start := time.Now()
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		// Somebody may lead on a Lease that has just been deleted.
		if took := time.Since(start); took < 15*time.Second || took > 15*time.Second+20*time.Millisecond {
			t.Errorf("it leads after %s", took)
		}
		r.end()
		store.background.Wait()
	})
}

func TestElectionIsOff(t *testing.T) {
	store := newSimStore()
	cfg := testConfig()
	cfg.LeaderElect = false
	r := startReplica(t, store, "r", cfg)
	<-r.led
	resp, err := r.lock.Fence(roundTripper(func(*http.Request) (*http.Response, error) {
		return &http.Response{Body: http.NoBody}, nil
	})).RoundTrip(assert.Must(http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", nil)))
	assert.NoError(t, err)
	_ = resp.Body.Close()
	r.leave <- errLead
	if err := <-r.done; !errors.Is(err, errLead) {
		t.Errorf("Run returned %v", err)
	}
	if len(r.client.requests) > 0 {
		t.Errorf("requests: %v", r.client.requests)
	}
}

func TestElectionIsOffAndDrainEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newSimStore()
		cfg := shortConfig()
		cfg.LeaderElect = false
		unwedge := make(chan struct{})
		r := startReplicaWith(t, store, "r", cfg, func(context.Context) error {
			<-unwedge
			return nil
		})
		<-r.led
		start := time.Now()
		r.stop(nil)
		if err := <-r.done; !errors.Is(err, ErrUnfinished) {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(start); took != cfg.DrainTimeout {
			t.Errorf("Run returned after %s", took)
		}
		if r.lock.IsLeading() {
			t.Error("the fence is still open")
		}
		close(unwedge)
	})
}

func TestLockServesOneRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		if err := r.lock.Run(t.Context(), nil); err == nil {
			t.Error("it was run twice")
		}
		r.end()
		store.background.Wait()
	})
}

func TestNewLockValidates(t *testing.T) {
	cfg := testConfig()
	cfg.RenewDeadline = cfg.LeaseDuration
	if _, err := NewLock(cfg, Candidate{Identity: "r"}); err == nil {
		t.Error("no error")
	}
}
