// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestLongFenceHoldsOnABusyAPIServer starts the API server again and again while somebody whom the fence
// does not concern writes, and a Pod that does not lead tries to. The first must never be refused,
// the second always. Parameters of a kind that the API server does not read by itself would fail
// this: the more Leases there are, the longer it refuses everybody.
func TestLongFenceHoldsOnABusyAPIServer(t *testing.T) {
	const leases, starts = 30000, 5
	ctx := fleet.Within(t.Context(), t, 8*fleet.Patience)
	waitForFence(ctx, t)
	nameLeader(ctx, t, "somebody_x")
	t.Cleanup(func() { nameLeader(context.Background(), t, "") })
	w := shared.NewWorkloads(ctx, t, 1)
	standby := newClient(t, shared.NewReplica(ctx, t).Config())
	createLeases(ctx, t, w.Namespace, leases)
	defer loadProcessors()()
	for range starts {
		assert.NoError(t, shared.StopAPIServer(ctx))
		others := startWrites(ctx, func(ctx context.Context) error { return w.Change(ctx, 0) })
		fenced := startWrites(ctx, func(ctx context.Context) error { return annotate(ctx, standby, w.Namespace) })
		begin := time.Now()
		assert.NoError(t, shared.StartAPIServer(ctx))
		ready := time.Since(begin)
		fleet.Eventually(ctx, t, func() error { // and for a while after it is ready
			if time.Since(begin) < ready+3*time.Second || others.admitted.Load() < 100 || fenced.refused.Load() < 10 {
				return fmt.Errorf("%d writes of others, %d of the standby refused", others.admitted.Load(), fenced.refused.Load())
			}
			return nil
		})
		others.stop()
		fenced.stop()
		t.Logf("ready after %s; others: %d writes, the first %s before it, %d refused; standby: %d refused, %d admitted",
			ready.Round(time.Millisecond), others.admitted.Load(), (ready - others.first.Sub(begin)).Round(time.Millisecond),
			others.refused.Load(), fenced.refused.Load(), fenced.admitted.Load())
		if err := others.refusal; err != nil {
			t.Errorf("%d writes of others were refused: %v", others.refused.Load(), err)
		}
		if n := fenced.admitted.Load(); n > 0 {
			t.Errorf("%d writes of a Pod that does not lead were admitted", n)
		}
	}
}

// writeCounts is what becomes of the writes of one client.
type writeCounts struct {
	admitted, refused atomic.Int64
	stop              func()

	mu      sync.Mutex
	first   time.Time // the first that was admitted
	refusal error     // the last one
}

// startWrites writes, four requests at a time, until stop is called, which must precede reading
// first and refusal.
func startWrites(ctx context.Context, write func(context.Context) error) *writeCounts {
	w := &writeCounts{}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				w.countWrite(ctx, write(ctx))
			}
		})
	}
	w.stop = func() {
		cancel()
		wg.Wait()
	}
	return w
}

func (w *writeCounts) countWrite(ctx context.Context, err error) {
	switch {
	case err == nil:
		if w.admitted.Add(1) == 1 {
			w.mu.Lock()
			w.first = time.Now()
			w.mu.Unlock()
		}
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsInternalError(err):
		w.refused.Add(1)
		w.mu.Lock()
		w.refusal = err
		w.mu.Unlock()
	default: // it does not listen yet
		fleet.Wait(ctx, time.Millisecond)
	}
}

func annotate(ctx context.Context, client kubernetes.Interface, namespace string) error {
	_, err := client.AppsV1().Deployments(namespace).Patch(ctx, fleet.DeploymentName(0), types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"by":"a standby"}}}`), metav1.PatchOptions{})
	return err
}

// createLeases creates Leases until the end of the test.
func createLeases(ctx context.Context, t *testing.T, namespace string, n int) {
	t.Helper()
	client := newClient(t, shared.AdminConfig())
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n) && ctx.Err() == nil; i = next.Add(1) {
				lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("lease-%d", i)}}
				if _, err := client.CoordinationV1().Leases(namespace).Create(ctx, lease, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 4*fleet.Patience)
		defer cancel()
		// A busy API server answers with a time-out before it has deleted all.
		if err := fleet.Poll(ctx, func() error {
			return client.CoordinationV1().Leases(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}); err != nil {
			t.Error(err)
		}
	})
}

// loadProcessors leaves the API server a third of the processors until the returned function is
// called.
func loadProcessors() (stop func()) {
	const share = 2
	var stopped atomic.Bool
	var wg sync.WaitGroup
	before := runtime.GOMAXPROCS(share * runtime.NumCPU())
	for range share*runtime.NumCPU() - 1 {
		wg.Go(func() {
			for !stopped.Load() {
			}
		})
	}
	return func() {
		stopped.Store(true)
		wg.Wait()
		runtime.GOMAXPROCS(before)
	}
}
