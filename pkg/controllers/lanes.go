// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"sync"

	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/internal/panics"
)

// lane says why a key is in the queue.
type lane uint8

const (
	// laneChanges is the lane of changes, requeues, back-offs and Enqueue.
	laneChanges lane = iota
	// laneShown is the lane of objects that are merely shown again: by a relist, or to a new leader.
	laneShown
)

// changesFirst is how many keys of laneChanges are taken for each key of laneShown, while both have keys.
// Otherwise a tenant who writes all the time would keep a new leader from what changed while nobody led.
const changesFirst = 4

// replayAhead is how many keys wait in laneShown before a replay waits too. The workqueue has each key in
// three maps, and a map never becomes smaller: with 10,000 keys in the queue at once, the maps would take
// 2 MiB for as long as the replica leads.
const replayAhead = 500

// queue is the queue of a loop. Its keys wait in lanes.
type queue[K comparable] struct {
	workqueue.TypedDelayingInterface[K] // Add and AddAfter add to laneChanges
	keys                                *laneQueue[K]
}

func newQueue[K comparable](opts LoopOptions, logger *klog.Logger) *queue[K] {
	lanes, name := newLanes[K](), opts.String()
	if opts.Cluster != "" {
		name = "" // without metrics, which client-go cannot remove
	}
	keys := &laneQueue[K]{lanes: lanes, TypedInterface: workqueue.NewTypedWithConfig(
		workqueue.TypedQueueConfig[K]{Name: name, Clock: opts.Clock, Queue: lanes})}
	return &queue[K]{keys: keys, TypedDelayingInterface: workqueue.NewTypedDelayingQueueWithConfig(
		workqueue.TypedDelayingQueueConfig[K]{Logger: logger, Name: name, Clock: opts.Clock, Queue: keys})}
}

// laneQueue is a workqueue whose keys wait in lanes.
type laneQueue[K comparable] struct {
	workqueue.TypedInterface[K]
	lanes *lanes[K]
}

// Add adds a key to laneChanges. The workqueue calls it too, when the delay of a key has passed.
func (q *laneQueue[K]) Add(key K) { q.add(key, laneChanges, tenantOf(key)) }

// add adds a key to a tenant's turn in a lane.
func (q *laneQueue[K]) add(key K, lane lane, tenant string) {
	if q.ShuttingDown() {
		return // the workqueue would ignore the key, and its note would stay
	}
	q.lanes.note(key, lane, tenant)
	q.TypedInterface.Add(key)
}

// tenantOf returns in whose turn a key is taken. The turn of a key whose Tenant panics has no name: the panic
// would end the process, and each new leader has the key again.
func tenantOf[K comparable](key K) (tenant string) {
	if name, ok := any(key).(cache.ObjectName); ok {
		return name.Namespace
	}
	if k, ok := any(key).(interface{ Tenant() string }); ok {
		if stack, err := panics.Recover(func() error { tenant = k.Tenant(); return nil }); stack != nil {
			klog.Background().Error(err, "Tenant of a key panicked", "stack", string(stack))
		}
	}
	return tenant
}

// lanes stores the keys of a workqueue. In each of the two lanes, the tenants with keys take turns, one key
// each. The keys of one tenant are first in, first out. A key has a place for each lane and tenant for which
// it was added. When the turn of one of its places comes, the key is taken and leaves all its places. So
// nobody delays a key by adding it to a long queue of their own.
//
// For instance, shop adds the keys a and b to laneChanges, and team adds b and c:
//
//	order[laneChanges]: shop, team
//	turns[laneChanges]: shop has places of a and b, team has places of b and c
//
// Pop takes a, from shop's turn, and then b, from team's turn; with that, b leaves shop's turn, which ends.
// Then it takes c.
//
// The workqueue knows neither lanes nor tenants, so a key is noted before it is added: the turn has a place
// for the key, in which it does not stand yet.
//
//	the key is         note            then Add of the workqueue calls
//	not queued         makes a place   Push: the key stands there
//	queued             makes a place   Touch: the key stands there too
//	being reconciled   makes a place   nothing; Push comes when the reconcile has ended
//
// Pop takes a key from all places where it stands. Those that are only noted are for the next Push.
type lanes[K comparable] struct {
	mu          sync.Mutex                   // the workqueue calls its methods, Push to Pop, under a lock of its own
	places      map[K]*item[place[K]]        // of keys that are queued or noted
	turns       [2]map[string]*item[turn[K]] // of the tenants with places, by lane
	order       [2]ring[turn[K]]             // the turns with queued keys, by lane
	queued      int                          // keys
	shownPlaces int                          // places in laneShown, without noted ones
	vacated     chan struct{}                // has an item if laneShown may have room
	inARow      int                          // keys taken from laneChanges since the last one from laneShown
	// onlyShown has popped keys that waited in laneShown only, until the worker calls laneTakenFrom: Get of
	// the workqueue returns nothing but the key.
	onlyShown map[K]bool
}

// place is where a key stands in a turn's ring, or is to stand once the workqueue pushes it. A key has
// one place in a turn, however often it is added.
type place[K comparable] struct {
	key  K
	turn *item[turn[K]]
	// nextOfKey is another place of the key. In the list of a key's places, those that are only noted come
	// before those where it stands.
	nextOfKey *item[place[K]]
}

// turn has the keys of one tenant in one lane.
type turn[K comparable] struct {
	tenant string
	lane   lane
	places int // noted ones included
	keys   ring[place[K]]
}

func newLanes[K comparable]() *lanes[K] {
	l := &lanes[K]{places: map[K]*item[place[K]]{}, onlyShown: map[K]bool{}, vacated: make(chan struct{}, 1)}
	for lane := range l.turns {
		l.turns[lane] = map[string]*item[turn[K]]{}
	}
	return l
}

// note says where a key is to stand that is added to the workqueue next.
func (l *lanes[K]) note(key K, lane lane, tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noteLocked(key, lane, tenant)
}

func (l *lanes[K]) noteLocked(key K, lane lane, tenant string) *item[place[K]] {
	t, first := l.turns[lane][tenant], l.places[key]
	if t == nil {
		t = &item[turn[K]]{value: turn[K]{tenant: tenant, lane: lane}}
		l.turns[lane][tenant] = t
	}
	for p := first; p != nil; p = p.value.nextOfKey {
		if p.value.turn == t {
			return first
		}
	}
	first = &item[place[K]]{value: place[K]{key: key, turn: t, nextOfKey: first}}
	l.places[key] = first
	t.value.places++
	return first
}

// Push implements workqueue.Queue.
func (l *lanes[K]) Push(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queued++
	first := l.places[key]
	if first == nil { // another Add of the key came between note and Add, and used the note
		first = l.noteLocked(key, laneChanges, tenantOf(key))
	}
	l.link(first)
}

// Touch implements workqueue.Queue: the key is queued, and was added again.
func (l *lanes[K]) Touch(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link(l.places[key])
}

// link lets a key stand at its noted places. The argument is the first place of the key.
func (l *lanes[K]) link(p *item[place[K]]) {
	for ; p != nil && !p.linked(); p = p.value.nextOfKey {
		t := p.value.turn
		t.value.keys.add(p)
		if !t.linked() {
			l.order[t.value.lane].add(t)
		}
		if t.value.lane == laneShown {
			l.shownPlaces++
		}
	}
}

// waitForRoom waits while laneShown has replayAhead keys. It returns false if ctx ends.
func (l *lanes[K]) waitForRoom(ctx context.Context) bool {
	for ctx.Err() == nil {
		l.mu.Lock()
		full := l.shownPlaces >= replayAhead
		l.mu.Unlock()
		if !full {
			l.wakeReplay() // another replay may wait, for which there is room too
			return true
		}
		select {
		case <-l.vacated: // the place may have been taken again
		case <-ctx.Done():
		}
	}
	return false
}

// Len implements workqueue.Queue. It counts keys, not places. The workqueue's lock guards queued.
func (l *lanes[K]) Len() int { return l.queued }

// Pop implements workqueue.Queue. There is a key.
func (l *lanes[K]) Pop() K {
	l.mu.Lock()
	defer l.mu.Unlock()
	lane := laneChanges
	if l.order[laneChanges].first == nil || l.inARow >= changesFirst && l.order[laneShown].first != nil {
		lane = laneShown
	}
	t := l.order[lane].first
	l.order[lane].first = t.next
	key := t.value.keys.first.value.key
	onlyShown := true
	for p := l.places[key]; p != nil; p = p.value.nextOfKey {
		onlyShown = onlyShown && (!p.linked() || p.value.turn.value.lane == laneShown)
	}
	l.leave(key)
	l.queued--
	l.inARow++
	if lane == laneShown {
		l.inARow = 0
	}
	if onlyShown {
		l.onlyShown[key] = true
	}
	return key
}

// leave removes a key from all places where it stands. What is only noted stays.
func (l *lanes[K]) leave(key K) {
	p := l.places[key]
	if p.linked() {
		delete(l.places, key)
	}
	for p != nil {
		next := p.value.nextOfKey
		if next != nil && next.linked() {
			p.value.nextOfKey = nil
		}
		if p.linked() {
			l.remove(p)
		}
		p = next
	}
}

// remove removes a place, and its turn if that was the last one in it.
func (l *lanes[K]) remove(p *item[place[K]]) {
	t := p.value.turn
	lane := t.value.lane
	t.value.keys.remove(p)
	if t.value.keys.first == nil {
		l.order[lane].remove(t)
	}
	t.value.places--
	if t.value.places == 0 {
		delete(l.turns[lane], t.value.tenant)
	}
	if lane == laneShown {
		l.shownPlaces--
		l.wakeReplay()
	}
}

// wakeReplay wakes one of those that wait for room.
func (l *lanes[K]) wakeReplay() {
	select {
	case l.vacated <- struct{}{}:
	default:
	}
}

// laneTakenFrom returns laneShown for a popped key that stood in no turn of laneChanges. Each worker calls
// it once for its key.
func (l *lanes[K]) laneTakenFrom(key K) lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.onlyShown[key] {
		return laneChanges
	}
	delete(l.onlyShown, key)
	return laneShown
}

type laneKey struct{}

// withLane returns the context of the reconcile of a key that was taken from a lane.
func withLane(ctx context.Context, lane lane) context.Context {
	return context.WithValue(ctx, laneKey{}, lane)
}

// laneFrom returns the lane of withLane, or laneChanges.
func laneFrom(ctx context.Context) lane {
	taken, _ := ctx.Value(laneKey{}).(lane)
	return taken
}

// ring is a doubly-linked list that takes no memory but its items. The last item is first.prev.
type ring[T any] struct{ first *item[T] }

type item[T any] struct {
	prev, next *item[T] // nil outside of a ring
	value      T
}

func (i *item[T]) linked() bool { return i.next != nil }

// add adds an item as the last one.
func (r *ring[T]) add(i *item[T]) {
	if r.first == nil {
		r.first, i.prev, i.next = i, i, i
		return
	}
	i.prev, i.next = r.first.prev, r.first
	i.prev.next, i.next.prev = i, i
}

func (r *ring[T]) remove(i *item[T]) {
	switch {
	case i.next == i:
		r.first = nil
	case r.first == i:
		r.first = i.next
	}
	i.prev.next, i.next.prev = i.next, i.prev
	i.prev, i.next = nil, nil
}
