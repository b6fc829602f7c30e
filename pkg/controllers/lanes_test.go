// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"fmt"
	"slices"
	"testing"

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
	left := len(l.places) + len(l.merelyShown) + l.Len()
	for i := range l.turns {
		left += len(l.turns[i])
	}
	if left != 0 || l.order[laneChanged].first != nil || l.order[laneShown].first != nil {
		t.Errorf("left in empty lanes: %d keys, places %v, turns %v", l.Len(), l.places, l.turns)
	}
}

func TestLanesStoreNothingAfterShutdown(t *testing.T) {
	q := testQueue[string](t)
	q.ShutDown()
	q.keys.add("a", laneChanged, "shop")
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
	from := laneChanged
	if len(m.lanes[laneChanged]) == 0 || m.inARow >= 4 && len(m.lanes[laneShown]) > 0 {
		from = laneShown
	}
	if m.inARow++; from == laneShown {
		m.inARow = 0
	}
	t := m.lanes[from][0]
	m.lanes[from] = append(m.lanes[from][1:], t)
	key, in = t.keys[0], laneShown
	for _, t := range m.lanes[laneChanged] {
		if slices.Contains(t.keys, key) {
			in = laneChanged
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
				m.add(added{key, laneChanged, ""})
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
