// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"math"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/debug"
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

func (c *storeClient) total() int {
	return c.count("get") + c.count("create") + c.count("update") + c.count("watch")
}

// TestStoreIsRestoredToAnEarlierVersion checks that the leader ends at its next renewal, and a standby when a
// lease duration has passed: the next life of either begins with nothing.
func TestStoreIsRestoredToAnEarlierVersion(t *testing.T) {
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
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				leader := startReplica(t, store, "leader", testConfig())
				<-leader.led
				standby := startReplica(t, store, "standby", testConfig())
				pass(time.Second)
				snapshot := must(store.get()).DeepCopy()
				test.snapshot(snapshot)
				pass(time.Minute)
				start, before := time.Now(), standby.client.total()
				restore(store, snapshot, 110, test.restarted)
				var lost *LostError
				if err := <-leader.done; !errors.As(err, &lost) || lost.Reason != protocol.ReasonStoreRestored || time.Since(start) > 3*time.Second {
					t.Errorf("the leader returned %v after %s", err, time.Since(start))
				}
				err := <-standby.done
				if took := time.Since(start); !errors.Is(err, ErrRestored) || took < lease || took > test.within {
					t.Errorf("the standby returned %v after %s, want %s to %s", err, took, lease, test.within)
				}
				if n := standby.client.total() - before; n > 50 {
					t.Errorf("the standby made %d requests", n)
				}
				store.background.Wait()
			})
		})
	}
}

// TestRefusalsThatLast runs a standby that is refused for an hour after its leader has gone.
func TestRefusalsThatLast(t *testing.T) {
	status := func(err *apierrors.StatusError) error { return err }
	tooMany := status(apierrors.NewTooManyRequests("too many", 1))
	forbidden := status(apierrors.NewForbidden(leaseResource, "lease", errors.New("no")))
	tests := map[string]struct {
		verbs   []string
		err     error
		deleted bool
		problem string
	}{
		"429 to writes":     {[]string{"update"}, tooMany, false, ""},
		"429 to everything": {[]string{"get", "update", "watch"}, tooMany, false, ""},
		"403 to writes":     {[]string{"update"}, forbidden, false, "refuses to update Lease ns/lease"},
		"403 to everything": {[]string{"get", "update", "watch"}, forbidden, false, "refuses to get Lease ns/lease"},
		"403 to a create":   {[]string{"create"}, forbidden, true, "refuses to create Lease ns/lease"},
		"422 to writes":     {[]string{"update"}, status(apierrors.NewInvalid(coordinationv1.SchemeGroupVersion.WithKind("Lease").GroupKind(), "lease", nil)), false, "refuses to update Lease ns/lease"},
		"no namespace":      {[]string{"create"}, status(apierrors.NewNotFound(corev1.Resource("namespaces"), "ns")), true, `namespaces "ns" not found`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				store.edit("gone", func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "gone", 15*time.Second, time.Now()) })
				if test.deleted {
					store.delete("admin")
				}
				registry, logged := metrics.NewKubeRegistry(), 0
				client := newStoreClient(store, "r")
				lock := must(NewLock(testConfig(), Candidate{Identity: "r", Client: client, Clock: newBubbleClock(), Metrics: must(debug.NewMetrics(registry, "x"))}))
				logger := funcr.New(func(_, args string) {
					if strings.Contains(args, "refuses what leader election needs") {
						logged++
					}
				}, funcr.Options{})
				ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
				done := make(chan error, 1)
				refuse := func() {
					client.set(func(c *storeClient) {
						for _, verb := range test.verbs {
							c.fail[verb] = test.err
						}
					})
				}
				if test.verbs[0] != "get" {
					refuse()
				}
				go func() {
					done <- lock.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil })
				}()
				pass(10 * time.Second)
				refuse()
				for minute := range 60 {
					before := client.total()
					pass(time.Minute)
					if n := client.total() - before; n > 6 && minute > 0 || n > 10 {
						t.Errorf("%d requests in minute %d", n, minute)
					}
				}
				if err := lock.Problem(); (err == nil) != (test.problem == "") || err != nil && !strings.Contains(err.Error(), test.problem) {
					t.Errorf("the problem is %v, want %q", err, test.problem)
				}
				if logged == 0 || logged > 100*len(test.verbs) {
					t.Errorf("logged %d times in an hour", logged)
				}
				client.set(func(c *storeClient) { clear(c.fail) })
				pass(4 * time.Minute)
				if !lock.IsLeading() || lock.Problem() != nil {
					t.Errorf("when it is repaired, it leads %t, problem %v", lock.IsLeading(), lock.Problem())
				}
				stop()
				if err := <-done; err != nil {
					t.Error(err)
				}
				store.background.Wait()
			})
		})
	}
}

// TestLeaseThatSomebodyElseCreates deletes and applies the manifests again, the role after the Lease.
func TestLeaseThatSomebodyElseCreates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		store.delete("admin")
		client := newStoreClient(store, "r")
		client.set(func(c *storeClient) {
			c.fail["create"] = apierrors.NewForbidden(leaseResource, "lease", errors.New("no"))
		})
		lock := must(NewLock(testConfig(), Candidate{Identity: "r", Client: client, Clock: newBubbleClock()}))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- lock.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil }) }()
		pass(10 * time.Second)
		if lock.Problem() == nil {
			t.Error("no problem while the Lease does not exist and may not be created")
		}
		_, _ = store.create("admin", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"}})
		pass(40 * time.Second)
		if !lock.IsLeading() || lock.Problem() != nil {
			t.Errorf("when the Lease exists, it leads %t, problem %v", lock.IsLeading(), lock.Problem())
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		store.background.Wait()
	})
}

func TestTwoHungAcquisitions(t *testing.T) {
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

// TestOneEditOfTheDurationDoesNotBlockFailOver lets the leader undo the edit, and then crash.
func TestOneEditOfTheDurationDoesNotBlockFailOver(t *testing.T) {
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

// TestWriteWithoutAnAnswer lets a write of lead fail before lead is asked to stop.
func TestWriteWithoutAnAnswer(t *testing.T) {
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
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				cfg := testConfig()
				cfg.DrainTimeout = test.drain
				r := startReplica(t, store, "r", cfg)
				<-r.led
				transport := r.lock.Fence(roundTripper(func(*http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: test.code, Body: http.NoBody}, test.err
				}))
				resp, err := transport.RoundTrip(must(http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", nil)))
				if err == nil {
					_ = resp.Body.Close()
				}
				start := time.Now()
				r.stop(nil)
				err = <-r.done
				var lost *LostError
				errors.As(err, &lost)
				if (lost == nil) != (test.end == "") || lost != nil && lost.Reason != test.end || (store.holder() == "") != (test.end == "") {
					t.Errorf("Run returned %v, the Lease is held by %q", err, store.holder())
				}
				if took := time.Since(start); took < test.want || took > test.want+20*time.Millisecond {
					t.Errorf("Run returned after %s, want %s", took, test.want)
				}
				store.background.Wait()
			})
		})
	}
}

// TestLossIsShownAtOnce looks while lead still drains.
func TestLossIsShownAtOnce(t *testing.T) {
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

func TestContextOfLeadEndsWithLead(t *testing.T) {
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
