// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"
)

func testQueue[K comparable](t interface{ Cleanup(func()) }) *queue[K] {
	logger := klog.Background()
	q := newQueue[K](LoopOptions{}, &logger)
	t.Cleanup(q.ShutDown)
	return q
}

// expectEmpty fails if anything is left in the lanes, but for the last rounds of some tenants.
func expectEmpty[K comparable](t interface{ Errorf(string, ...any) }, l *lanes[K]) {
	left := len(l.noted) + l.Len() + len(l.taken) + len(l.turns)
	for _, r := range l.rounds {
		if left += r.due.Len(); left != 0 || len(r.last) > 100 {
			t.Errorf("left in empty lanes: noted %v, %d queued, %d tenants", l.noted, l.Len(), len(r.last))
		}
	}
}

func TestLanesForgetTenants(t *testing.T) {
	q := testQueue[string](t)
	for i := range 10_000 {
		q.ready.add("a", laneShown, fmt.Sprint(i), false)
		if i%2 == 0 {
			q.Add("a") // so that a is taken from there
		}
		key, _ := q.Get()
		q.ready.lanes.takenItem(key)
		q.Done(key)
	}
	expectEmpty(t, q.ready.lanes)
}

func TestLanesStoreNothingAfterShutdown(t *testing.T) {
	q := testQueue[string](t)
	q.ShutDown()
	q.ready.add("a", laneChanges, "shop", false)
	q.Add("b")
	expectEmpty(t, q.ready.lanes)
}

// tenantKey is a key with a tenant of its own.
type tenantKey struct{ tenant, name string }

func (k tenantKey) Tenant() string { return k.tenant }

func TestLanesKnowTheTenantOfAKey(t *testing.T) {
	f := newFixture(t)
	f.logger = funcr.New(func(_, line string) { f.say("%s", strings.Split(line, ` "stack"=`)[0]) }, funcr.Options{})
	q := newQueue[any](f.opts, &f.logger)
	defer q.ShutDown()
	for key, want := range map[any]string{
		cache.NewObjectName("shop", "a"): "shop",
		tenantKey{"shop", "a"}:           "shop",
		"a":                              "",
		(*tenantKey)(nil):                "", // its method panics
	} {
		same(t, fmt.Sprintf("tenant of %v", key), want, q.ready.lanes.tenantOf(key))
	}
	f.expect(`"msg"="Tenant of a key panicked" "error"="panic: value method github.com/quartermaster-dev/quartermaster/pkg/controllers.tenantKey.Tenant called using nil *tenantKey pointer" "key"="<nil>"`)
	panics, _ := testutil.GetCounterValuesFromGatherer(f.registry, "quartermaster_controller_panics_total", nil, "controller")
	same(t, "panics counted", map[string]float64{"test": 1}, panics)
}

// model is what lanes do, written without regard to cost: for each lane the keys in the order in which they
// are taken.
type model struct {
	lanes  [2]modelLane
	inARow int
	last   map[string]added  // of each key: the tenant and own, since it was taken
	busy   map[string]added  // keys that are being reconciled, and are not taken before that has ended
	turns  map[string]string // in which keys come back, unless in their own
}

type modelLane struct {
	keys    []added
	present int            // the round of the last key that was taken
	last    map[string]int // round of each tenant
}

type added struct {
	key    string
	in     lane
	tenant string
	own    bool // whether the key's own tenant has added it
	round  int
}

func (m *model) add(a added) {
	l := &m.lanes[a.in]
	last := m.last[a.key]
	m.last[a.key] = added{tenant: last.tenant, own: last.own || a.own}
	a.round = max(l.present, l.last[a.tenant]) + 1
	if i := slices.IndexFunc(l.keys, func(k added) bool { return k.key == a.key }); i >= 0 {
		if l.keys[i].round <= a.round {
			return
		}
		l.keys = slices.Delete(l.keys, i, i+1)
	}
	l.last[a.tenant] = a.round
	m.last[a.key] = added{tenant: a.tenant, own: last.own || a.own}
	l.keys = append(l.keys, a)
	slices.SortStableFunc(l.keys, func(a, b added) int { return a.round - b.round })
}

// queued returns the keys of a lane that may be taken.
func (m *model) queued(in lane) []added {
	return slices.DeleteFunc(slices.Clone(m.lanes[in].keys), func(a added) bool { _, busy := m.busy[a.key]; return busy })
}

// len returns the number of keys that may be taken.
func (m *model) len() int {
	keys := map[string]bool{}
	for _, a := range append(m.queued(laneChanges), m.queued(laneShown)...) {
		keys[a.key] = true
	}
	return len(keys)
}

// take returns the next key, and laneShown if that is the only lane in which it is queued.
func (m *model) take() (key string, in lane) {
	changes, shown := m.queued(laneChanges), m.queued(laneShown)
	from, first := laneChanges, append(changes, added{})[0]
	if len(changes) == 0 || m.inARow >= 4 && len(shown) > 0 {
		from, first = laneShown, shown[0]
	}
	if m.inARow++; from == laneShown {
		m.inARow = 0
	}
	m.lanes[from].present = max(m.lanes[from].present, first.round)
	is := func(a added) bool { return a.key == first.key }
	if in = laneShown; slices.ContainsFunc(changes, is) {
		in = laneChanges
	}
	for i := range m.lanes {
		m.lanes[i].keys = slices.DeleteFunc(m.lanes[i].keys, is)
	}
	m.busy[first.key] = m.last[first.key]
	delete(m.last, first.key)
	return first.key, in
}

func TestLanesDoWhatTheirModelDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := testQueue[string](t)
		m := &model{lanes: [2]modelLane{{last: map[string]int{}}, {last: map[string]int{}}}, last: map[string]added{}, busy: map[string]added{}, turns: map[string]string{}}
		items := map[string]*item[string]{}
		some := func(what string, n int) string { return what + fmt.Sprint(rapid.IntRange(0, n-1).Draw(t, what)) }
		take := func(t *rapid.T) {
			if q.Len() == 0 {
				t.Skip("empty")
			}
			got, _ := q.Get()
			if _, busy := m.busy[got]; busy {
				t.Fatalf("%s was taken twice at once", got)
			}
			it, from := q.ready.lanes.takenItem(got)
			items[got] = it
			if want, lane := m.take(); got != want || from != lane {
				t.Fatalf("took %s from lane %d, want %s from %d", got, from, want, lane)
			}
		}
		done := func(t *rapid.T) {
			if len(m.busy) == 0 {
				t.Skip("none is busy")
			}
			key := rapid.SampledFrom(slices.Sorted(maps.Keys(m.busy))).Draw(t, "done")
			comesBack, failedBefore := rapid.Bool().Draw(t, "comes back"), rapid.Bool().Draw(t, "failed before")
			q.ready.lanes.keepTurn(items[key], comesBack, failedBefore)
			if taken := m.busy[key]; taken.own || !comesBack {
				delete(m.turns, key)
			} else if !failedBefore {
				m.turns[key] = taken.tenant
			}
			q.Done(key)
			delete(m.busy, key)
		}
		t.Repeat(map[string]func(*rapid.T){
			"add for a tenant": func(t *rapid.T) {
				a := added{key: some("key", 8), in: lane(rapid.IntRange(0, 1).Draw(t, "lane")), tenant: some("tenant", 4), own: rapid.Bool().Draw(t, "own")}
				q.ready.add(a.key, a.in, a.tenant, a.own)
				m.add(a)
			},
			"add as a delay does": func(*rapid.T) {
				key := some("key", 8)
				q.AddAfter(key, 0)
				tenant, kept := m.turns[key]
				m.add(added{key: key, in: laneChanges, tenant: tenant, own: !kept})
			},
			"take": take, "take again": take, "done": done,
			"": func(t *rapid.T) {
				if got, want := q.Len(), m.len(); got != want || !maps.Equal(q.ready.lanes.turns, m.turns) {
					t.Fatalf("%d keys are queued, want %d; turns %v, want %v", got, want, q.ready.lanes.turns, m.turns)
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
		clear(q.ready.lanes.turns) // the same as those of the model
		expectEmpty(t, q.ready.lanes)
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

func TestRoomInTheQueueWakesEveryReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := testQueue[int](t)
		for i := range replayAhead {
			q.ready.add(i, laneShown, "", true)
		}
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { q.ready.lanes.waitForRoom(t.Context()) })
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
		s := f.loop.Status()
		same(t, "reconciles, keys queued and phase", []any{uint64(busy + 2), 0, PhaseRunning}, []any{s.Reconciles, s.QueueDepth, s.Phase})
	})
}
