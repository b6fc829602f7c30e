// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"pgregory.net/rapid"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

func testQueue[K comparable](t interface{ Cleanup(func()) }) *queue[K] {
	q := newQueue[K]()
	q.metrics = loopmetrics.New(metrics.NewKubeRegistry()).Queue(loopmetrics.Loop{})
	q.open()
	t.Cleanup(q.close)
	return q
}

// counts returns how many keys are due and delayed.
func counts[K comparable](q *queue[K]) (both [2]int) {
	both[0], both[1] = q.counts()
	return both
}

// expectEmpty fails if anything is left in the queue, but for the last rounds of some tenants.
func expectEmpty[K comparable](t interface{ Errorf(string, ...any) }, q *queue[K]) {
	for _, r := range q.rounds {
		if left := len(q.items) + r.keys.Len(); left != 0 || counts(q) != [2]int{} || len(r.lastRound) > 100 {
			t.Errorf("left in an empty queue: %v, %v due and delayed, %d tenants", q.items, counts(q), len(r.lastRound))
		}
	}
}

func TestQueueForgetsTenants(t *testing.T) {
	q := testQueue[string](t)
	for i := range 10_000 {
		q.add("a", "own", laneReplay, fmt.Sprint(i))
		if i%2 == 0 {
			q.add("a", "own", laneChanges, "") // so that a is taken from there
		}
		q.done(q.take(), 0, 0, 0)
	}
	expectEmpty(t, q)
}

func TestClosedQueueStoresNothing(t *testing.T) {
	q := testQueue[string](t)
	q.add("a", "", laneReplay, "")
	q.add("b", "", laneReplay, "")
	taken := q.take()
	q.close()
	q.add("c", "", laneChanges, "")
	q.unpark()
	q.endDelays() // the timer may have ended just before
	q.done(taken, 1, 0, 1)
	if it := q.take(); it != nil || len(q.items)+counts(q)[0] > 0 || !q.waitForRoom(t.Context()) {
		t.Errorf("a closed queue gives %v and has %v", it, q.items)
	}
}

// tenantKey is a key with a tenant of its own.
type tenantKey struct{ tenant, name string }

func (k tenantKey) Tenant() string { return k.tenant }

func TestLoopKnowsTheTenantOfAKey(t *testing.T) {
	f := newFixture(t)
	l, err := NewLoop(f.opts, func(context.Context, any) (time.Duration, error) { return 0, nil })
	assert.NoError(t, err)
	for key, want := range map[any]string{
		cache.NewObjectName("shop", "a"):            "shop",
		tenantKey{"shop", "a"}:                      "shop",
		struct{ cache.ObjectName }{keyOf("shop/a")}: "shop",
		"a":               "",
		(*tenantKey)(nil): "", // its method panics
	} {
		assert.Equal(t, fmt.Sprintf("tenant of %v", key), want, l.tenantOf(key))
	}
	panics, _ := testutil.GetCounterValuesFromGatherer(f.registry, "quartermaster_controller_panics_total", nil, "controller")
	assert.Equal(t, "panics counted", map[string]float64{"test": 1}, panics)
}

// model is what a queue does, written without regard to cost: for each lane the due keys in the order in
// which they are taken.
type model struct {
	lanes  [2]modelLane
	inARow int
	now    int // in hours
	keys   map[string]*modelKey
	parked string // the key that comes back when the replica leads
}

type modelLane struct {
	due     []dueKey
	present int            // the round of the last key that was taken
	last    map[string]int // round of each tenant
}

type dueKey struct {
	key   string
	round int
}

type modelKey struct {
	tenant     string
	turn, back string // in which it is due, "" before it is due; in which it comes back
	lane       lane   // from which it was taken last
	busy       bool   // it is being reconciled, and not taken before that has ended
	failures   int
	asked      int // when it comes back since that was asked for; 0 if it does not
	backoff    int // when its back-off ends; 0 without one
}

func (k *modelKey) backAt() int { return int(min(uint(k.asked-1), uint(k.backoff-1)) + 1) } // 0 if it is not delayed

func (m *model) add(key string, ln lane, turn string) {
	l, k := &m.lanes[ln], m.keys[key]
	round := max(l.present, l.last[turn]) + 1
	i := slices.IndexFunc(l.due, func(d dueKey) bool { return d.key == key })
	if later := i >= 0 && l.due[i].round <= round; !later {
		if i >= 0 {
			l.due = slices.Delete(l.due, i, i+1)
		}
		l.last[turn] = round
		l.due = append(l.due, dueKey{key, round})
		slices.SortStableFunc(l.due, func(a, b dueKey) int { return a.round - b.round })
		if k.turn != k.tenant {
			k.turn = turn
		}
	}
	if turn == k.tenant {
		k.turn = turn
	}
}

// free returns the keys of a lane that may be taken.
func (m *model) free(ln lane) []dueKey {
	return slices.DeleteFunc(slices.Clone(m.lanes[ln].due), func(d dueKey) bool { return m.keys[d.key].busy })
}

// len returns the number of keys that may be taken.
func (m *model) len() int {
	keys := map[string]bool{}
	for _, d := range append(m.free(laneChanges), m.free(laneReplay)...) {
		keys[d.key] = true
	}
	return len(keys)
}

// take returns the next key, and laneReplay if that is the only lane in which it is due.
func (m *model) take() (key string, ln lane) {
	changes, shown := m.free(laneChanges), m.free(laneReplay)
	from, first := laneChanges, append(changes, dueKey{})[0]
	if len(changes) == 0 || m.inARow >= 4 && len(shown) > 0 {
		from, first = laneReplay, shown[0]
	}
	if m.inARow++; from == laneReplay {
		m.inARow = 0
	}
	m.lanes[from].present = max(m.lanes[from].present, first.round)
	isFirst := func(d dueKey) bool { return d.key == first.key }
	if ln = laneReplay; slices.ContainsFunc(changes, isFirst) {
		ln = laneChanges
	}
	for i := range m.lanes {
		m.lanes[i].due = slices.DeleteFunc(m.lanes[i].due, isFirst)
	}
	k := m.keys[first.key]
	if k.turn == k.tenant || k.backAt() == 0 {
		k.back = k.turn
	}
	k.busy, k.turn, k.lane = true, "", ln
	if m.parked == first.key {
		m.parked = ""
	}
	return first.key, ln
}

// pass lets an hour pass. With the queue, only the delays become shorter by an hour.
func (m *model) pass(q *queue[string]) {
	m.now++
	var delayed []*queueItem[string]
	q.delayed.Ascend(func(it *queueItem[string]) bool {
		for _, at := range []*time.Time{&it.askedAt, &it.backoffAt, &it.returnAt} {
			if !at.IsZero() {
				*at = at.Add(-time.Hour)
			}
		}
		delayed = append(delayed, it)
		return true
	})
	q.endDelays()
	for _, it := range delayed { // in their order
		if k := m.keys[it.key]; k.backAt() == m.now {
			for _, at := range []*int{&k.asked, &k.backoff} {
				if *at == m.now {
					*at = 0
				}
			}
			m.add(it.key, laneChanges, k.back)
		}
	}
}

func TestQueueDoesWhatItsModelDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := testQueue[string](t)
		m := &model{lanes: [2]modelLane{{last: map[string]int{}}, {last: map[string]int{}}}, keys: map[string]*modelKey{}}
		for i := range 8 {
			m.keys[fmt.Sprint(i)] = &modelKey{tenant: fmt.Sprint(i % 4)}
		}
		taken, leading := map[string]*queueItem[string]{}, make(chan struct{})
		some := func(what string, n int) int { return rapid.IntRange(0, n-1).Draw(t, what) }
		take := func(t *rapid.T) {
			if counts(q)[0] == 0 {
				t.Skip("empty")
			}
			it := q.take()
			if m.keys[it.key].busy {
				t.Fatalf("%s was taken twice at once", it.key)
			}
			taken[it.key] = it
			want, ln := m.take()
			if k := m.keys[want]; it.key != want || it.lane != ln || it.failures != k.failures || it.returnTenant != k.back {
				t.Fatalf("took %+v, want %s from %d, which is %+v", it, want, ln, k)
			}
		}
		done := func(t *rapid.T) {
			if len(taken) == 0 {
				t.Skip("none is taken")
			}
			key := rapid.SampledFrom(slices.Sorted(maps.Keys(taken))).Draw(t, "done")
			k, after, failures := m.keys[key], some("after", 4), 0
			if k.busy = false; after > 0 {
				failures = some("failures", 3)
			}
			if failures < k.failures || k.backoff == 0 {
				k.failures = failures
			}
			at := &k.backoff
			if failures == 0 {
				k.backoff, at = 0, &k.asked
			}
			if after > 0 {
				*at = min(cmp.Or(*at, m.now+after), m.now+after)
			}
			if m.parked == "" && some("park", 2) > 0 && q.park(taken[key], leading) {
				m.parked = key
			}
			q.done(taken[key], time.Duration(after)*time.Hour, 0, failures)
			delete(taken, key)
		}
		lead := func(*rapid.T) {
			if q.unpark(); m.parked != "" {
				m.add(m.parked, m.keys[m.parked].lane, m.keys[m.parked].back)
			}
			leading, m.parked = closed(), ""
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(*rapid.T) {
				key, ln, turn := fmt.Sprint(some("key", 8)), lane(some("lane", 2)), fmt.Sprint(some("turn", 4))
				q.add(key, m.keys[key].tenant, ln, turn)
				m.add(key, ln, turn)
			},
			"take": take, "done": done, "pass": func(*rapid.T) { m.pass(q) }, "lead": lead,
			"": func(t *rapid.T) {
				want := [2]int{m.len()}
				for _, k := range m.keys {
					want[1] += min(k.backAt(), 1)
				}
				if got := counts(q); got != want {
					t.Fatalf("%v keys are due and delayed, want %v", got, want)
				}
			},
		})
		for lead(t); len(q.items) > 0; m.pass(q) {
			for counts(q)[0] > 0 {
				take(t)
			}
			for _, it := range taken {
				q.done(it, 0, 0, 0)
				m.keys[it.key].busy, m.keys[it.key].failures, m.keys[it.key].backoff = false, 0, 0
			}
			clear(taken)
		}
		expectEmpty(t, q)
	})
}

func TestDelayedKeysComeBackInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue[int](t)
		for _, seconds := range []int{2, 1, 3} {
			q.add(seconds, "", laneChanges, "")
			q.done(q.take(), time.Duration(seconds)*time.Second, 0, 1)
		}
		for due := range 4 {
			synctest.Wait()
			assert.Equal(t, "keys that are due and delayed", [2]int{due, 3 - due}, counts(q))
			pass(time.Second)
		}
		q = testQueue[int](t)
		for _, notBefore := range []time.Duration{0, time.Hour, 0} { // two events come during the back-off
			q.add(0, "", laneChanges, "")
			q.done(q.take(), time.Minute, notBefore, 1)
		}
		begun := time.Now()
		it := q.take()
		asked := time.Since(begun)
		assert.Equal(t, "keys that are due and delayed", [2]int{}, counts(q))
		q.done(it, time.Minute, time.Hour, 1)
		q.add(0, "", laneChanges, "") // and another one, which ends the back-off
		q.done(q.take(), time.Minute, 0, 0)
		q.done(q.take(), 0, 0, 0)
		assert.Equal(t, "time for which the API server asked, and after a success", []time.Duration{time.Hour, time.Hour + time.Minute}, []time.Duration{asked, time.Since(begun)})
		for n := range 2*endAtOnce + 1 {
			q.add(n, "", laneReplay, "")
			q.putBack(q.take(), time.Second)
		}
		pass(time.Minute)
		assert.Equal(t, "keys that are due and delayed", [2]int{2*endAtOnce + 1}, counts(q))
		q.add(0, "", laneChanges, "")
		for range 2 { // the second time, it comes back
			it := q.take()
			assert.Equal(t, "key before those that were put back into the second lane", 0, it.key)
			q.done(it, time.Second, 0, 0)
			pass(time.Minute)
		}
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

// wide enqueues 600 keys, each in a namespace of its own, on behalf of the tenant of busy/source.
func wide(ctx context.Context, f *fixture, key cache.ObjectName) time.Duration {
	for i := range replayAhead + 100 {
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
		"600 targets of a source": {func(f *fixture) { f.loop.Enqueue(keyOf("busy/source")) }, wide},
		"300 keys that come again": {enqueue, func(_ context.Context, _ *fixture, key cache.ObjectName) (after time.Duration) {
			if key.Namespace == "busy" {
				after = time.Second
			}
			return after
		}},
		"300 keys of ours that another's source has made due, and that come again": {func(f *fixture) {
			f.loop.Enqueue(keyOf("busy/source"))
			pass(time.Minute)
		}, func(ctx context.Context, f *fixture, key cache.ObjectName) time.Duration {
			if key.Name == "source" {
				for _, name := range objects("mine", 300) {
					f.loop.EnqueueFor(ctx, "busy", keyOf(name))
				}
			}
			return time.Until(f.begun.Add(time.Minute)) // all at once
		}},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
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

// TestFairnessOfReplayAgainstFanOut has an object of another tenant that makes many keys due at the start.
func TestFairnessOfReplayAgainstFanOut(t *testing.T) {
	// The source, then the other tenants. The replay of 600 waits for the queue, but not for the targets.
	for others, within := range map[int]int{4: 11, 600: 620} {
		subtest.InBubble(t, fmt.Sprint(others), func(t *testing.T) {
			names := []string{"mine/a"} // it comes last, since it was written first
			for i := range others {
				names = append(names, fmt.Sprintf("other-%d/a", i))
			}
			f := newPaced(t, wide, append(names, "busy/source")...)
			f.expectNext(within, "mine/a")
			f.put("1", "busy/new")
			f.expectNext(2, "busy/new")
		})
	}
}

func TestRoomInTheQueueWakesEveryReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue[int](t)
		for i := range replayAhead {
			q.addReplayed(i, "")
		}
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { q.waitForRoom(t.Context()) })
		}
		synctest.Wait()
		q.take()
		waiting.Wait()
	})
}

// TestReplayWaitsForTheQueue has more objects than the queue takes at once, one of which changes meanwhile.
func TestReplayWaitsForTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const busy = 3 * replayAhead
		f := newPaced(t, nil, append([]string{"mine/a"}, objects("busy", busy)...)...)
		f.expectNext(3, "mine/a")
		if s := f.loop.Status(); s.QueueDepth > replayAhead || s.ToReplay < busy-replayAhead-5 {
			t.Errorf("%+v", s)
		}
		f.put("2", "mine/a")
		f.expectNext(3, "mine/a")
		pass((busy + 10) * pace)
		synctest.Wait()
		s := f.loop.Status()
		assert.Equal(t, "reconciles, keys queued, objects to replay, and phase", []any{uint64(busy + 2), 0, 0, PhaseRunning}, []any{s.Reconciles, s.QueueDepth, s.ToReplay, s.Phase})
	})
}
