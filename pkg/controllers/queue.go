// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"maps"
	"math"
	"sync"
	"time"

	"k8s.io/utils/third_party/forked/golang/btree"

	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
)

// lane says why a key is due.
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

// replayAhead is how many keys wait in laneShown before a replay waits too. A map never becomes smaller: with
// 10,000 keys in the queue at once, it would take 1 MiB for as long as the replica leads.
const replayAhead = 500

// queue has the keys of one run of a loop: those that are due, those that a worker has taken, and those that
// come back later.
//
// Due keys wait in lanes, by fair queueing: each lane goes on in rounds, and in each round a tenant has one
// turn. A key that a tenant adds is due in the round after the tenant's last one, or after the present one if
// that is later. Keys of one round are taken in the order in which they were added.
//
// If several tenants add a key, it is due in the earliest of their rounds, and a tenant who would have it
// later spends no turn. So nobody delays a key by adding it to a long queue of their own. For instance, shop
// adds the keys a and b to a lane, and then team adds b and c. Without team, b would be due in round 2:
//
//	round 1: a, b
//	round 2: c
type queue[K comparable] struct {
	metrics loopmetrics.Queue

	mu            sync.Mutex
	items         map[K]*item[K] // nil while the queue is closed
	rounds        [2]rounds[K]   // the due keys of each lane, but those that a worker has
	depth         int            // number of keys in rounds
	changesInARow int            // keys taken from laneChanges since the last one from laneShown
	delayed       *btree.BTree[*item[K]]
	lastDelaySeq  uint64      // of the key that was delayed last
	timer         *time.Timer // of the first delayed key
	ready         *sync.Cond  // signals that a key is due
	room          *sync.Cond  // broadcasts when laneShown may have become shorter
}

// item is a key for as long as it is due, taken, delayed or parked.
type item[K comparable] struct {
	key    K
	tenant string    // whose key it is
	due    [2]place  // in each lane; zero if it is not due there
	turn   string    // the tenant in whose turn it is due
	since  time.Time // when it became due
	taken  bool      // a worker has it: even if it is due, it is taken again only when the worker is done

	// Set when a worker takes it:
	lane       lane   // laneShown if it was not due in laneChanges
	returnTurn string // the tenant in whose turn it comes back

	failures int       // how often in a row reconcile has failed for it
	returnAt time.Time // when it comes back; zero if it is not delayed
	delaySeq uint64    // tells keys apart that come back at the same time
	parked   bool      // it comes back when this replica leads
}

func (it *item[K]) isDue() bool { return it.due != [2]place{} }

// place says when a key is taken from its lane: in which round, and after how many keys that were ever added.
type place struct{ round, order uint64 }

func (p place) before(other place) bool {
	return p.round < other.round || p.round == other.round && p.order < other.order
}

// rounds has the due keys of a lane.
type rounds[K comparable] struct {
	keys         *btree.BTree[*item[K]]
	presentRound uint64            // the latest round of which a key was taken
	lastRound    map[string]uint64 // round of each tenant; it counts only if it is later than the present one
	sweepAt      int               // length of lastRound
	added        uint64            // keys so far
}

// newQueue returns a closed queue.
func newQueue[K comparable](metrics loopmetrics.Queue) *queue[K] {
	q := &queue[K]{metrics: metrics}
	q.ready, q.room = sync.NewCond(&q.mu), sync.NewCond(&q.mu)
	q.timer = time.AfterFunc(math.MaxInt64, q.endDelays)
	q.timer.Stop() // until a key is delayed
	return q
}

// open lets a queue that is closed take keys.
func (q *queue[K]) open() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items != nil {
		return
	}
	q.items = map[K]*item[K]{}
	for i := range q.rounds {
		less := func(a, b *item[K]) bool { return a.due[i].before(b.due[i]) }
		q.rounds[i] = rounds[K]{keys: btree.New(32, less), lastRound: map[string]uint64{}}
	}
	q.delayed = btree.New(32, func(a, b *item[K]) bool {
		return a.returnAt.Before(b.returnAt) || a.returnAt.Equal(b.returnAt) && a.delaySeq < b.delaySeq
	})
}

// close drops all keys. Until the queue is opened again, take returns nil, and add drops its key.
func (q *queue[K]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer.Stop()
	q.items, q.rounds, q.depth, q.delayed = nil, [2]rounds[K]{}, 0, nil
	q.ready.Broadcast()
	q.room.Broadcast()
}

// len returns how many keys are due and not taken.
func (q *queue[K]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.depth
}

// add adds a key of tenant to a lane, in a turn of the tenant turn. A key that a worker has can be taken
// again only when the worker is done.
func (q *queue[K]) add(key K, tenant string, ln lane, turn string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return
	}
	it := q.items[key]
	if it == nil {
		it = &item[K]{key: key, tenant: tenant}
		q.items[key] = it
	}
	q.makeDue(it, ln, turn)
}

// makeDue makes a key due in a lane, unless it is due there earlier. The caller holds mu.
func (q *queue[K]) makeDue(it *item[K], ln lane, turn string) {
	first := !it.isDue()
	if first {
		it.since = time.Now()
		q.metrics.Adds.Inc()
	}
	r := &q.rounds[ln]
	round := max(r.presentRound, r.lastRound[turn]) + 1
	earlier := it.due[ln] == (place{}) || round < it.due[ln].round
	if first || turn == it.tenant || earlier && it.turn != it.tenant {
		it.turn = turn
	}
	if !earlier {
		return
	}
	if !first {
		r.keys.Delete(it) // unless a worker has it
	}
	it.due[ln] = place{round, r.added}
	switch {
	case it.taken:
	case first:
		q.push(it)
	default:
		r.keys.ReplaceOrInsert(it)
	}
	r.lastRound[turn] = round
	r.added++
	if len(r.lastRound) > r.sweepAt {
		maps.DeleteFunc(r.lastRound, func(_ string, last uint64) bool { return last <= r.presentRound })
		r.sweepAt = 2*len(r.lastRound) + 100
	}
}

// push offers a due key to the workers. The caller holds mu.
func (q *queue[K]) push(it *item[K]) {
	for i, due := range it.due {
		if due != (place{}) {
			q.rounds[i].keys.ReplaceOrInsert(it)
		}
	}
	q.depth++
	q.ready.Signal()
}

// take waits until a key is due. It returns nil once the queue is closed. The caller must call done.
func (q *queue[K]) take() *item[K] {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.depth == 0 && q.items != nil {
		q.ready.Wait()
	}
	if q.items == nil {
		return nil
	}
	from := laneChanges
	q.changesInARow++
	if q.rounds[laneChanges].keys.Len() == 0 || q.changesInARow > changesFirst && q.rounds[laneShown].keys.Len() > 0 {
		from, q.changesInARow = laneShown, 0
	}
	r := &q.rounds[from]
	it, _ := r.keys.Min()
	r.presentRound = max(r.presentRound, it.due[from].round) // it may have been due while a worker had it
	it.lane = laneChanges
	if it.due[laneChanges] == (place{}) {
		it.lane = laneShown
	}
	for i, due := range it.due {
		if due != (place{}) {
			q.rounds[i].keys.Delete(it)
		}
	}
	q.depth--
	it.taken, it.due = true, [2]place{}
	// It comes back in the turn in which it was due: for instance, a source in team has 300 targets in shop, and
	// all fail. In the turns of shop, a change in shop would wait for them. Nor can team delay what comes back
	// for shop by adding it again.
	if it.turn == it.tenant || it.returnAt.IsZero() {
		it.returnTurn = it.turn
	}
	q.metrics.Waits.Observe(time.Since(it.since).Seconds())
	q.room.Broadcast()
	return it
}

// park lets a taken key come back when this replica leads. It returns false if leading is closed already.
func (q *queue[K]) park(it *item[K], leading <-chan struct{}) bool {
	q.mu.Lock() // unpark sees the key if leading is open now
	defer q.mu.Unlock()
	select {
	case <-leading:
	default:
		it.parked = true
	}
	return it.parked
}

// unpark makes the parked keys due. It is called when this replica leads.
func (q *queue[K]) unpark() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, it := range q.items {
		if it.parked {
			it.parked = false
			q.makeDue(it, laneChanges, it.returnTurn)
		}
	}
}

// done ends the work on a taken key. If after > 0, the key comes back then, or earlier if that was decided
// before. failures is how often in a row it has failed by now.
func (q *queue[K]) done(it *item[K], after time.Duration, failures int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return
	}
	it.taken, it.failures = false, failures
	if after > 0 {
		q.metrics.Retries.Inc()
		q.delayUntil(it, time.Now().Add(after))
	}
	switch {
	case it.isDue():
		q.push(it)
	case it.returnAt.IsZero() && !it.parked:
		delete(q.items, it.key)
	}
}

// delayUntil lets a key come back at a time, or earlier if that was decided before. The caller holds mu.
func (q *queue[K]) delayUntil(it *item[K], at time.Time) {
	if !it.returnAt.IsZero() {
		if !at.Before(it.returnAt) {
			return
		}
		q.delayed.Delete(it)
	}
	q.lastDelaySeq++
	it.returnAt, it.delaySeq = at, q.lastDelaySeq
	q.delayed.ReplaceOrInsert(it)
	if first, _ := q.delayed.Min(); first == it {
		q.timer.Reset(time.Until(at))
	}
}

// endDelays makes the keys due whose delay has passed.
func (q *queue[K]) endDelays() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.items != nil {
		it, found := q.delayed.Min()
		if !found {
			return
		}
		if left := time.Until(it.returnAt); left > 0 {
			q.timer.Reset(left)
			return
		}
		q.delayed.Delete(it)
		it.returnAt = time.Time{}
		q.makeDue(it, laneChanges, it.returnTurn)
	}
}

// waitForRoom waits while laneShown has replayAhead keys. It returns false if ctx ends.
func (q *queue[K]) waitForRoom(ctx context.Context) bool {
	full := func() bool { return q.items != nil && q.rounds[laneShown].keys.Len() >= replayAhead }
	q.mu.Lock()
	defer q.mu.Unlock()
	if full() {
		defer context.AfterFunc(ctx, func() { // only then: it makes garbage
			q.mu.Lock()
			defer q.mu.Unlock()
			q.room.Broadcast()
		})()
	}
	for ctx.Err() == nil && full() {
		q.room.Wait()
	}
	return ctx.Err() == nil
}
