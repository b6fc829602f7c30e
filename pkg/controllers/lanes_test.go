// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"pgregory.net/rapid"
)

func testQueue[K comparable](t interface{ Cleanup(func()) }) *queue[K] {
	logger := klog.Background()
	q := newQueue[K](LoopOptions{Clock: clock.RealClock{}}, &logger)
	t.Cleanup(q.ShutDown)
	return q
}

// expectEmpty fails if anything is left in the lanes.
func expectEmpty[K comparable](t interface{ Errorf(string, ...any) }, l *lanes[K]) {
	left := len(l.places) + len(l.onlyShown) + l.Len()
	for i := range l.turns {
		left += len(l.turns[i])
	}
	if left != 0 || l.order[laneChanges].first != nil || l.order[laneShown].first != nil {
		t.Errorf("left in empty lanes: %d keys, places %v, turns %v", l.Len(), l.places, l.turns)
	}
}

func TestLanesStoreNothingAfterShutdown(t *testing.T) {
	q := testQueue[string](t)
	q.ShutDown()
	q.keys.add("a", laneChanges, "shop")
	q.Add("b")
	expectEmpty(t, q.keys.lanes)
}

// tenantKey is a key with a tenant of its own.
type tenantKey struct{ tenant, name string }

func (k tenantKey) Tenant() string { return k.tenant }

func TestLanesKnowTheTenantOfAKey(t *testing.T) {
	for name, tc := range map[string]struct{ got, want string }{
		"is the namespace of an object's name":       {tenantOf(cache.NewObjectName("shop", "a")), "shop"},
		"is what the key's method says":              {tenantOf(tenantKey{"shop", "a"}), "shop"},
		"is the same for all keys of any other type": {tenantOf("a"), ""},
		"is the same if the method panics":           {tenantOf((*tenantKey)(nil)), ""},
	} {
		if tc.got != tc.want {
			t.Errorf("the tenant of a key %s: got %q, want %q", name, tc.got, tc.want)
		}
	}
}

// model is what lanes do, written without regard to cost: for each lane the tenants in the order of
// their turns, each with its keys.
type model struct {
	lanes  [2][]*modelTurn
	inARow int
	later  map[string][]added // of keys that were added during their reconcile
	busy   map[string]bool
}

type modelTurn struct {
	tenant string
	keys   []string
}

type added struct {
	key    string
	in     lane
	tenant string
}

func (m *model) add(a added) {
	if m.busy[a.key] {
		m.later[a.key] = append(m.later[a.key], a)
		return
	}
	i := slices.IndexFunc(m.lanes[a.in], func(t *modelTurn) bool { return t.tenant == a.tenant })
	if i < 0 {
		i = len(m.lanes[a.in])
		m.lanes[a.in] = append(m.lanes[a.in], &modelTurn{tenant: a.tenant})
	}
	if t := m.lanes[a.in][i]; !slices.Contains(t.keys, a.key) {
		t.keys = append(t.keys, a.key)
	}
}

// queued returns the keys that may be taken.
func (m *model) queued() map[string]bool {
	keys := map[string]bool{}
	for _, turns := range m.lanes {
		for _, t := range turns {
			for _, key := range t.keys {
				keys[key] = true
			}
		}
	}
	return keys
}

// take returns the next key, and laneShown if that is the only lane in which it stands.
func (m *model) take() (key string, in lane) {
	from := laneChanges
	if len(m.lanes[laneChanges]) == 0 || m.inARow >= 4 && len(m.lanes[laneShown]) > 0 {
		from = laneShown
	}
	if m.inARow++; from == laneShown {
		m.inARow = 0
	}
	t := m.lanes[from][0]
	m.lanes[from] = append(m.lanes[from][1:], t)
	key, in = t.keys[0], laneShown
	for _, t := range m.lanes[laneChanges] {
		if slices.Contains(t.keys, key) {
			in = laneChanges
		}
	}
	for i := range m.lanes {
		for _, t := range m.lanes[i] {
			t.keys = slices.DeleteFunc(t.keys, func(k string) bool { return k == key })
		}
		m.lanes[i] = slices.DeleteFunc(m.lanes[i], func(t *modelTurn) bool { return len(t.keys) == 0 })
	}
	m.busy[key] = true
	return key, in
}

// done adds what was added meanwhile; the last is first, as in lanes.
func (m *model) done(key string) {
	delete(m.busy, key)
	var seen []added
	for _, a := range m.later[key] {
		if !slices.Contains(seen, a) {
			seen = append(seen, a)
		}
	}
	slices.Reverse(seen)
	for _, a := range seen {
		m.add(a)
	}
	delete(m.later, key)
}

func TestLanesDoWhatTheirModelDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := testQueue[string](t)
		m := &model{later: map[string][]added{}, busy: map[string]bool{}}
		some := func(what string, n int) string { return what + fmt.Sprint(rapid.IntRange(0, n-1).Draw(t, what)) }
		take := func(t *rapid.T) {
			if q.Len() == 0 {
				t.Skip("empty")
			}
			got, _ := q.Get()
			if m.busy[got] {
				t.Fatalf("%s was taken twice at once", got)
			}
			from := q.keys.lanes.laneTakenFrom(got)
			if want, lane := m.take(); got != want || from != lane {
				t.Fatalf("took %s from lane %d, want %s from %d", got, from, want, lane)
			}
		}
		done := func(t *rapid.T) {
			if len(m.busy) == 0 {
				t.Skip("none is busy")
			}
			var busy []string
			for key := range m.busy {
				busy = append(busy, key)
			}
			slices.Sort(busy)
			key := rapid.SampledFrom(busy).Draw(t, "done")
			q.Done(key)
			m.done(key)
		}
		t.Repeat(map[string]func(*rapid.T){
			"add for a tenant": func(t *rapid.T) {
				a := added{some("key", 8), lane(rapid.IntRange(0, 1).Draw(t, "lane")), some("tenant", 4)}
				q.keys.add(a.key, a.in, a.tenant)
				m.add(a)
			},
			"add as a delay does": func(*rapid.T) {
				key := some("key", 8)
				q.AddAfter(key, 0)
				m.add(added{key, laneChanges, ""})
			},
			"take": take, "take again": take, "done": done,
			"": func(t *rapid.T) {
				if got, want := q.Len(), len(m.queued()); got != want {
					t.Fatalf("%d keys are queued, want %d", got, want)
				}
			},
		})
		for len(m.busy) > 0 || q.Len() > 0 {
			if q.Len() > 0 {
				take(t)
			} else {
				done(t)
			}
		}
		expectEmpty(t, q.keys.lanes)
	})
}

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
		inBubble(t, name, func(t *testing.T) {
			f := newPaced(t, tc.reconcile)
			tc.begin(f)
			for i := range 5 {
				pass(pace)
				f.put(fmt.Sprint(i), "mine/a")
				f.expectNext(3, "mine/a") // after the one under way and one of the other tenant
			}
		})
	}
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

func TestRoomWakesEachReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue[int](t)
		for i := range replayAhead {
			q.keys.add(i, laneShown, "")
		}
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { q.keys.lanes.waitForRoom(t.Context()) })
		}
		synctest.Wait()
		key, _ := q.Get()
		q.Done(key)
		waiting.Wait()
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
