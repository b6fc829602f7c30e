// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
)

const pace = 100 * time.Millisecond

// newPaced returns a loop with one worker, each of whose reconciles takes a pace, says the key and then calls
// reconcile, if it is set.
func newPaced(t *testing.T, reconcile func(context.Context, *fixture, cache.ObjectName) time.Duration, names ...string) *fixture {
	t.Helper()
	f := newFixture(t, names...)
	f.reconcile = func(ctx context.Context, key cache.ObjectName) (after time.Duration, err error) {
		pass(pace)
		f.say("%s", key)
		if reconcile != nil {
			after = reconcile(ctx, f, key)
		}
		return after, nil
	}
	f.run()
	return f
}

// expectNext fails if a key is not among the next n reconciles to end.
func (f *fixture) expectNext(n int, key string) {
	f.Helper()
	f.said()
	pass(time.Duration(n)*pace + pace/2) // the one under way may have begun any time ago
	synctest.Wait()
	if got := f.said(); !slices.Contains(got, key) {
		f.Errorf("reconciled %v, without %v; %d keys are queued", got, key, f.loop.Status().QueueDepth)
	}
}

// objects returns n names in a namespace.
func objects(namespace string, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("%s/%d", namespace, i))
	}
	return names
}

// wide enqueues 300 keys, each in a namespace of its own, on behalf of the tenant of busy/source.
func wide(ctx context.Context, f *fixture, key cache.ObjectName) time.Duration {
	for i := range 300 {
		if key.Name == "source" {
			f.loop.EnqueueFor(ctx, key.Namespace, keyOf(fmt.Sprintf("target-%d/a", i)))
		}
	}
	return 0
}

func TestFairnessOfChangesAgainstDueKeys(t *testing.T) {
	enqueue := func(f *fixture) {
		for _, name := range objects("busy", 300) {
			f.loop.Enqueue(keyOf(name))
		}
	}
	for name, tc := range map[string]struct {
		begin     func(f *fixture)
		reconcile func(context.Context, *fixture, cache.ObjectName) time.Duration
	}{
		"300 keys at once":        {enqueue, nil},
		"300 changes":             {func(f *fixture) { f.put("2", objects("busy", 300)...) }, nil},
		"300 targets of a source": {func(f *fixture) { f.loop.Enqueue(keyOf("busy/source")) }, wide},
		"300 keys that come again": {enqueue, func(_ context.Context, _ *fixture, key cache.ObjectName) (after time.Duration) {
			if key.Namespace == "busy" {
				after = time.Second
			}
			return after
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newPaced(t, tc.reconcile)
				tc.begin(f)
				for i := range 5 {
					pass(pace)
					f.put(fmt.Sprint(i), "mine/a")
					f.expectNext(3, "mine/a") // after the one under way and one of the other tenant
				}
			})
		})
	}
}

func TestFairnessOfRequeuesAgainstTheReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newPaced(t, func(_ context.Context, _ *fixture, key cache.ObjectName) (after time.Duration) {
			if key.Name == "199" { // the one that was written last is the first
				after = 5*pace + pace/4
			}
			return after
		}, objects("shop", 200)...)
		for range 5 {
			f.expectNext(8, "shop/199") // one, its delay of 5, and two before it
		}
	})
}

// TestFairnessOfReplayAgainstFanOut has an object of another tenant that makes many keys due while
// a leader begins.
func TestFairnessOfReplayAgainstFanOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// mine/a comes last, since it was written first.
		f := newPaced(t, wide, "mine/a", "other-0/a", "other-1/a", "other-2/a", "other-3/a", "busy/source")
		f.expectNext(11, "mine/a") // the source, then the five others, each after one target at most
		f.put("1", "busy/new")
		f.expectNext(2, "busy/new")
	})
}

// TestReplayWaitsForTheQueue has more objects than the queue takes at once, in two namespaces, and an object
// that changes meanwhile.
func TestReplayWaitsForTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const busy = 3 * replayAhead
		f := newPaced(t, nil, append([]string{"mine/a"}, objects("busy", busy)...)...)
		f.expectNext(3, "mine/a")
		if s := f.loop.Status(); s.QueueDepth > replayAhead || s.Phase != PhaseSyncing {
			t.Errorf("%+v", s)
		}
		f.put("2", "mine/a")
		f.expectNext(3, "mine/a")
		pass((busy + 10) * pace)
		synctest.Wait()
		if s := f.loop.Status(); s.Reconciles != busy+2 || s.QueueDepth != 0 || s.Phase != PhaseRunning {
			t.Errorf("%+v", s)
		}
	})
}
