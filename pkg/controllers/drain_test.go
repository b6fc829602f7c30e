// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
)

func TestDrainEndsReconcilesInTime(t *testing.T) {
	cases := map[string]struct {
		takes    time.Duration // how long the reconcile in flight takes
		hears    bool          // whether it ends when its context ends
		own      time.Duration // LoopOptions.DrainTimeout
		cutAfter time.Duration // from the end of Run's context until the host cuts it off; 0: never
		wantEnds time.Duration // from the end of Run's context until Run returns
		wantCut  bool
	}{
		"a reconcile in flight finishes before Run returns": {
			takes: 5 * time.Second, hears: true, wantEnds: 5 * time.Second,
		},
		"a reconcile is waited for as long as the host does not cut it off": {
			takes: time.Hour, hears: true, wantEnds: time.Hour,
		},
		"the host cuts a reconcile off, and says why": {
			takes: time.Hour, hears: true, cutAfter: 10 * time.Second, wantEnds: 10 * time.Second, wantCut: true,
		},
		"a controller's own time cuts it off as well": {
			takes: time.Hour, hears: true, own: 5 * time.Second, cutAfter: 10 * time.Second, wantEnds: 5 * time.Second, wantCut: true,
		},
		"the controller's own time does not extend the host's": {
			takes: time.Hour, hears: true, own: time.Minute, cutAfter: 10 * time.Second, wantEnds: 10 * time.Second, wantCut: true,
		},
		"Run does not return before a reconcile that ignores that": {
			takes: time.Hour, cutAfter: 10 * time.Second, wantEnds: time.Hour,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var began, finished, cut atomic.Int32
				h := newHarness(t, reconciling{
					LoopOptions: LoopOptions{Workers: 1, DrainTimeout: tc.own},
					Reconcile: func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
						began.Add(1)
						done := ctx.Done()
						if !tc.hears {
							done = nil
						}
						select {
						case <-time.After(tc.takes):
							finished.Add(1)
							return 0, nil
						case <-done:
							cut.Add(1)
							return 0, context.Cause(ctx)
						}
					},
				}, "a", "b", "c")
				work, cutOff := context.WithCancelCause(context.Background())
				defer cutOff(nil)
				h.work = work
				h.run(t)
				if got := h.loop.Status(); got.Phase != PhaseRunning || got.QueueDepth != 2 {
					t.Errorf("status while running = %+v, want Running with 2 keys queued", got)
				}

				ended := time.Now()
				h.stop()
				synctest.Wait()
				if got := h.loop.Status().Phase; got != PhaseDraining {
					t.Errorf("phase after the context ended = %s, want %s", got, PhaseDraining)
				}
				if tc.cutAfter > 0 {
					defer time.AfterFunc(tc.cutAfter, func() { cutOff(errors.New("the host's time is up")) }).Stop()
				}
				if err := <-h.stopped; err != nil {
					t.Errorf("Run returned %v", err)
				}
				if took := time.Since(ended); took != tc.wantEnds {
					t.Errorf("Run returned %v after its context ended, want %v", took, tc.wantEnds)
				}
				if began.Load() != 1 {
					t.Errorf("%d reconciles began, want 1: the queued keys must not be taken while draining", began.Load())
				}
				if got := cut.Load() == 1; got != tc.wantCut {
					t.Errorf("reconcile cut off = %v, want %v", got, tc.wantCut)
				}
				if got := h.loop.Status(); got.Phase != PhaseStopped || len(got.InFlight) > 0 {
					t.Errorf("status after Run = %+v, want %s with nothing in flight", got, PhaseStopped)
				}
				cause := "the host's time is up"
				if tc.wantEnds == tc.own {
					cause = "the reconcile did not end within the 5s that test has to drain"
				}
				if e := h.loop.Status().LastError; tc.wantCut && (e == nil || e.Text != cause) {
					t.Errorf("last error = %+v, want the cause of the cut", e)
				}
			})
		})
	}
}

func TestReconcileLearnsOfTheDrain(t *testing.T) {
	if Draining(t.Context()) != nil {
		t.Error("a context that is not of a reconcile drains")
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, reconciling{Reconcile: func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			select {
			case <-Draining(ctx):
				return 0, ctx.Err() // which has not ended
			case <-time.After(time.Hour):
				return 0, errors.New("nobody told it")
			}
		}}, "a")
		h.run(t)
		pass(time.Minute)
		h.stop()
		if err := <-h.stopped; err != nil || time.Since(h.begun) != time.Minute || h.loop.Status().LastError != nil {
			t.Errorf("Run returned %v after %v, the last error is %+v", err, time.Since(h.begun), h.loop.Status().LastError)
		}
	})
}
