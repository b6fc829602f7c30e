// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// startClientGo runs a replica with client-go's elector, which releases the Lease.
func startClientGo(t *testing.T, store *simStore, name string) *testReplica {
	t.Helper()
	r := &testReplica{t: t, client: newStoreClient(store, name), led: make(chan context.Context, 1), done: make(chan error, 1)}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "lease"},
			Client:     simLeases{client: r.client},
			LockConfig: resourcelock.ResourceLockConfig{Identity: name},
		},
		LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { r.led <- ctx },
			OnStoppedLeading: func() {},
		},
	})
	assert.NoError(t, err)
	ctx, stop := context.WithCancelCause(klog.NewContext(t.Context(), logr.Discard()))
	r.stop = stop
	go func() {
		elector.Run(ctx)
		r.done <- nil
	}()
	return r
}

// TestElectorAndClientGoHandOver hands one Lease back and forth between both electors, by release and by
// expiry.
func TestElectorAndClientGoHandOver(t *testing.T) {
	start := map[string]func(*testing.T, *simStore, string) *testReplica{
		"ours": func(t *testing.T, s *simStore, name string) *testReplica {
			t.Helper()
			return startReplica(t, s, name, testConfig())
		},
		"client-go": startClientGo,
	}
	tests := map[string]struct {
		from, to string
		kill     bool
		min, max time.Duration // from the end of the first to the start of the second
	}{
		"ours releases to client-go": {"ours", "client-go", false, 0, 4500 * time.Millisecond},
		"client-go releases to ours": {"client-go", "ours", false, 0, 20 * time.Millisecond},
		// client-go polls after 2 to 4.4 s: once to see the last renewal, and once after the Lease has expired.
		"ours expires to client-go": {"ours", "client-go", true, 12 * time.Second, 24 * time.Second},
		"client-go expires to ours": {"client-go", "ours", true, 12 * time.Second, 15*time.Second + 20*time.Millisecond},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				first := start[tc.from](t, store, "first")
				<-first.led
				pass(time.Minute)
				second := start[tc.to](t, store, "second")
				pass(time.Minute + 700*time.Millisecond)
				if len(second.led) > 0 {
					t.Fatal("both lead")
				}
				if tc.kill {
					first.client.set(func(c *storeClient) { c.fail["update"], c.fail["get"] = context.Canceled, context.Canceled })
				} else {
					first.stop(nil)
				}
				end := time.Now()
				<-second.led
				if took := time.Since(end); took < tc.min || took > tc.max {
					t.Errorf("took %s, want %s to %s", took, tc.min, tc.max)
				}
				lease, err := store.get()
				if err != nil || protocol.HolderOf(lease) != "second" || transitionsOf(lease) != 2 {
					t.Errorf("the Lease is %s, %v", describe(lease), err)
				}
				first.stop(nil)
				second.stop(nil)
				for _, r := range []*testReplica{first, second} {
					if err := <-r.done; err != nil && !tc.kill {
						t.Error(err)
					}
				}
				store.background.Wait()
			})
		})
	}
}
