// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func TestLeadershipEndsAtOnce(t *testing.T) {
	tests := map[string]struct {
		lose func(*simStore, *storeClient)
		want protocol.Reason
	}{
		"when another holds the Lease": {func(s *simStore, _ *storeClient) {
			s.edit("thief", func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "thief", 15*time.Second, time.Now()) })
		}, protocol.ReasonHolderChanged},
		"when the holder is edited away": {func(s *simStore, _ *storeClient) {
			s.edit("admin", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("") })
		}, protocol.ReasonHolderChanged},
		"when the Lease is deleted": {func(s *simStore, _ *storeClient) { s.delete("admin") }, protocol.ReasonLeaseDeleted},
		"when the Lease is replaced": {func(s *simStore, _ *storeClient) {
			s.mu.Lock()
			s.lease, s.watches = nil, nil // the deletion is not seen
			s.mu.Unlock()
			_, _ = s.create("admin", func() *coordinationv1.Lease {
				l := protocol.NewLease(leaseName, "r", 15*time.Second, time.Now())
				l.Spec.LeaseTransitions = ptr.To[int32](7)
				return l
			}())
		}, protocol.ReasonLeaseReplaced},
		"when a renewal is answered 401, as after its Pod was deleted by force": {func(_ *simStore, c *storeClient) {
			c.set(func(c *storeClient) { c.fail["update"] = apierrors.NewUnauthorized("no") })
		}, protocol.ReasonUnauthorized},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				fenced := false
				var r *testReplica
				r = startReplicaWith(t, store, "r", testConfig(), func(ctx context.Context) error {
					<-ctx.Done()
					fenced = !r.lock.IsLeading()
					var lost *LostError
					if !errors.As(context.Cause(ctx), &lost) || lost.Reason != tc.want {
						t.Errorf("lead's context ended by %v", context.Cause(ctx))
					}
					return errLead
				})
				<-r.led
				pass(time.Minute + 1)
				start := time.Now()
				tc.lose(store, r.client)
				err := <-r.done
				var lost *LostError
				if !errors.As(err, &lost) || lost.Reason != tc.want || !errors.Is(err, errLead) {
					t.Errorf("Run returned %v, want %s", err, tc.want)
				}
				next := tc.want == protocol.ReasonLeaseReplaced || tc.want == protocol.ReasonUnauthorized // with the next renewal
				if took := time.Since(start); !next && took > 10*time.Millisecond || took > 3*time.Second {
					t.Errorf("it took %s", took)
				}
				if !fenced {
					t.Error("the fence was open when lead's context ended")
				}
				if store.holder() == "" && tc.want == protocol.ReasonLeaseReplaced {
					t.Error("it has released what was not its own")
				}
				store.background.Wait()
			})
		})
	}
}

// TestLeadThatHangsDoesNotKeepRun checks that Run waits no longer than the Lease would have covered.
func TestLeadThatHangsDoesNotKeepRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		unwedge := make(chan struct{})
		r := startReplicaWith(t, store, "r", shortConfig(), func(context.Context) error {
			<-unwedge
			return nil
		})
		<-r.led
		pass(time.Minute)
		start := time.Now()
		store.delete("admin")
		if err := <-r.done; err == nil {
			t.Error("no error")
		}
		if took := time.Since(start); took > 3*time.Second || took < 2*time.Second {
			t.Errorf("Run returned after %s", took)
		}
		close(unwedge)
		store.background.Wait()
	})
}

// TestTermIsNotExtendedByTheWatch runs a leader whose renewals are executed but get no response.
// It sees them in the watch and must end its term nevertheless.
func TestTermIsNotExtendedByTheWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		pass(3 * time.Second)
		r.client.set(func(c *storeClient) { c.hang["update"] = true })
		pass(8*time.Second + 900*time.Millisecond)
		if !r.lock.IsLeading() {
			t.Error("it has given up early")
		}
		pass(200 * time.Millisecond)
		if r.lock.IsLeading() {
			t.Error("it leads without an answer")
		}
		var lost *LostError
		if err := <-r.done; !errors.As(err, &lost) || lost.Reason != protocol.ReasonRenewDeadline {
			t.Errorf("Run returned %v", err)
		}
		store.background.Wait()
	})
}

func TestTermOutlivesOneHungRenewal(t *testing.T) {
	for name, cfg := range map[string]Config{"15s": testConfig(), "3s": shortConfig()} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				r := startReplica(t, store, "r", cfg)
				<-r.led
				before := r.client.count("update")
				r.client.set(func(c *storeClient) { c.hang["update"] = true })
				for r.client.count("update") == before {
					pass(time.Millisecond)
				}
				r.client.set(func(c *storeClient) { c.hang["update"] = false })
				pass(time.Minute)
				if !r.lock.IsLeading() {
					t.Error("the term has ended")
				}
				r.stop(nil)
				if err := <-r.done; err != nil {
					t.Error(err)
				}
				store.background.Wait()
			})
		})
	}
}

// TestAcquisitionWithoutAnAnswer checks that a replica treats its own record like another's: it waits for a
// lease duration.
func TestAcquisitionWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		start := time.Now()
		r := startReplica(t, store, "r", testConfig())
		r.client.set(func(c *storeClient) { c.hang["update"] = true })
		pass(time.Second)
		r.client.set(func(c *storeClient) { c.hang["update"] = false })
		<-r.led
		if took := time.Since(start); took < 15*time.Second || took > 17*time.Second {
			t.Errorf("it leads after %s", took)
		}
		if lease, _ := store.get(); transitionsOf(lease) != 2 {
			t.Errorf("the Lease is %s", describe(lease))
		}
		r.end()
		store.background.Wait()
	})
}

func TestReleaseWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		r.client.set(func(c *storeClient) { c.hang["update"] = true })
		r.stop(nil)
		if err := <-r.done; err != nil {
			t.Errorf("Run returned %v", err)
		}
		if store.holder() != "" {
			t.Error("not released")
		}
		store.background.Wait()
	})
}

func TestFailedReleaseIsALostError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", testConfig())
		<-r.led
		r.client.set(func(c *storeClient) { c.fail["update"] = errors.New("network is down") })
		r.stop(nil)
		var lost *LostError
		if err := <-r.done; !errors.As(err, &lost) || lost.Reason != protocol.ReasonReleaseFailed {
			t.Errorf("Run returned %v", err)
		}
		store.background.Wait()
	})
}

func TestAcquisitionsThatHangTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		start := time.Now()
		r := startReplica(t, store, "r", testConfig())
		// It neither gets an answer nor sees what it has written.
		r.client.set(func(c *storeClient) { c.hang["update"] = true })
		for r.client.count("update") < 1 {
			pass(time.Microsecond)
		}
		blind := func(hangs bool, loss linkLoss) {
			r.client.set(func(c *storeClient) { c.hang["update"], c.hang["get"], c.hang["watch"] = hangs, hangs, hangs })
			r.client.link.set(func(l *simLink) { l.lost = loss })
		}
		blind(true, loseAll)
		for r.client.count("update") < 2 {
			pass(100 * time.Millisecond)
		}
		pass(time.Second)
		blind(false, loseNothing)
		<-r.led
		if took := time.Since(start); took > 24*time.Second {
			t.Errorf("it leads after %s", took)
		}
		if lease, _ := store.get(); transitionsOf(lease) != 2 {
			t.Errorf("the Lease is %s", describe(lease))
		}
		r.end()
		store.background.Wait()
	})
}

// TestWriteWithoutAnAnswerHoldsUpTheRelease lets a write of lead fail before lead is asked to stop.
func TestWriteWithoutAnAnswerHoldsUpTheRelease(t *testing.T) {
	reset := errors.New("connection reset by peer")
	tests := map[string]struct {
		code  int // of the answer, or
		err   error
		drain time.Duration
		want  time.Duration
		end   protocol.Reason // "": released
	}{
		"holds up the release":                         {0, reset, 5 * time.Minute, time.Minute, ""},
		"costs the release if the drain is shorter":    {0, reset, 30 * time.Second, 0, protocol.ReasonDrainTimeout},
		"does so after a 504":                          {http.StatusGatewayTimeout, nil, 5 * time.Minute, time.Minute, ""},
		"does not if there was no connection":          {0, &net.OpError{Op: "dial", Err: reset}, 5 * time.Minute, 0, ""},
		"does not if it was answered, even by refusal": {http.StatusConflict, nil, 5 * time.Minute, 0, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				cfg := testConfig()
				cfg.DrainTimeout = tc.drain
				r := startReplica(t, store, "r", cfg)
				<-r.led
				transport := r.lock.Fence(roundTripper(func(*http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: tc.code, Body: http.NoBody}, tc.err
				}))
				resp, err := transport.RoundTrip(assert.Must(http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", nil)))
				if err == nil {
					_ = resp.Body.Close()
				}
				start := time.Now()
				r.stop(nil)
				err = <-r.done
				var lost *LostError
				errors.As(err, &lost)
				if (lost == nil) != (tc.end == "") || lost != nil && lost.Reason != tc.end || (store.holder() == "") != (tc.end == "") {
					t.Errorf("Run returned %v, the Lease is held by %q", err, store.holder())
				}
				if took := time.Since(start); took < tc.want || took > tc.want+20*time.Millisecond {
					t.Errorf("Run returned after %s, want %s", took, tc.want)
				}
				store.background.Wait()
			})
		})
	}
}

// TestDisplayShowsALossAtOnce looks while lead still drains.
func TestDisplayShowsALossAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplicaWith(t, store, "r", testConfig(), func(ctx context.Context) error {
			<-ctx.Done()
			pass(5 * time.Second)
			return nil
		})
		<-r.led
		store.delete("admin")
		pass(time.Second)
		if s := shown(r.lock); s.Phase != "Lost" || s.Holder != "" {
			t.Errorf("it shows %+v", s)
		}
		if err := <-r.done; err == nil {
			t.Error("no error")
		}
		store.background.Wait()
	})
}

func TestLeadContextEndsWithLead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		r := startReplica(t, store, "r", testConfig())
		ctx := <-r.led
		r.client.set(func(c *storeClient) { c.hang["update"] = true }) // the release gets no answer
		r.leave <- nil
		synctest.Wait()
		if ctx.Err() == nil {
			t.Error("it goes on")
		}
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		store.background.Wait()
	})
}
