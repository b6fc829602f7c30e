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
	// laneReplay is the lane of objects that are merely shown again: by a relist, or to a new leader.
	laneReplay
)

// changesPerReplay is how many keys of laneChanges are taken for each key of laneReplay, while both have
// keys. Otherwise a tenant who writes all the time would keep a new leader from what changed while nobody
// led.
const changesPerReplay = 4

// replayAhead is how many keys wait in laneReplay before a replay waits too, since 10,000 keys in the
// queue at once take 3 MiB.
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
	mostItems     int            // length that items has had
	rounds        [2]rounds[K]   // the due keys of each lane, but those that a worker has
	depth         int            // number of keys in rounds
	changesInARow int            // keys taken from laneChanges since the last one from laneReplay
	delayed       *btree.BTree[*item[K]]
	lastDelaySeq  uint64      // of the key that was delayed last
	timer         *time.Timer // of the first delayed key
	readyCond     *sync.Cond  // signals that a key is due
	roomCond      *sync.Cond  // broadcasts when laneReplay may have become shorter
}

// item is a key for as long as it is due, taken, delayed or parked.
type item[K comparable] struct {
	key    K
	tenant string      // whose key it is
	due    [2]position // in each lane; zero if it is not due there
	turn   string      // the tenant in whose turn it is due
	since  time.Time   // when it became due
	taken  bool        // a worker has it: even if it is due, it is taken again only when the worker is done

	// Set when a worker takes it:
	lane       lane   // laneReplay if it was not due in laneChanges
	returnTurn string // the tenant in whose turn it comes back

	failures int       // how often in a row reconcile has failed for it
	returnAt time.Time // when it comes back; zero if it is not delayed
	delaySeq uint64    // tells keys apart that come back at the same time
	parked   bool      // it comes back when this replica leads
}

func (entry *item[K]) isDue() bool { return entry.due != [2]position{} }

// position says when a key is taken from its lane: in which round, and after how many keys that were ever
// added.
type position struct{ round, order uint64 }

func (p position) before(other position) bool {
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
	q.readyCond, q.roomCond = sync.NewCond(&q.mu), sync.NewCond(&q.mu)
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
	q.readyCond.Broadcast()
	q.roomCond.Broadcast()
}

// len returns how many keys are due and not taken.
func (q *queue[K]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.depth
}

// add adds a key that belongs to tenant to a lane, where it uses up a turn of the tenant named turn. A key
// that a worker has can be taken again only when the worker is done.
func (q *queue[K]) add(key K, tenant string, ln lane, turn string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return
	}
	entry := q.items[key]
	if entry == nil {
		entry = &item[K]{key: key, tenant: tenant}
		q.items[key] = entry
		q.mostItems = max(q.mostItems, len(q.items))
	}
	q.makeDue(entry, ln, turn)
}

// makeDue makes a key due in a lane, unless it is due there earlier. The caller holds mu.
func (q *queue[K]) makeDue(entry *item[K], ln lane, turn string) {
	first := !entry.isDue()
	if first {
		entry.since = time.Now()
		q.metrics.Adds.Inc()
	}
	r := &q.rounds[ln]
	round := max(r.presentRound, r.lastRound[turn]) + 1
	earlier := entry.due[ln] == (position{}) || round < entry.due[ln].round
	// Its own tenant's turn stays; else the turn counts that made it due first, or earlier.
	if first || turn == entry.tenant || earlier && entry.turn != entry.tenant {
		entry.turn = turn
	}
	if !earlier {
		return
	}
	if !first {
		r.keys.Delete(entry) // unless a worker has it
	}
	entry.due[ln] = position{round, r.added}
	switch {
	case entry.taken:
	case first:
		q.push(entry)
	default:
		r.keys.ReplaceOrInsert(entry)
	}
	r.lastRound[turn] = round
	r.added++
	if len(r.lastRound) > r.sweepAt {
		maps.DeleteFunc(r.lastRound, func(_ string, last uint64) bool { return last <= r.presentRound })
		r.sweepAt = 2*len(r.lastRound) + 100
	}
}

// push offers a due key to the workers. The caller holds mu.
func (q *queue[K]) push(entry *item[K]) {
	for i, due := range entry.due {
		if due != (position{}) {
			q.rounds[i].keys.ReplaceOrInsert(entry)
		}
	}
	q.depth++
	q.readyCond.Signal()
}

// take waits until a key is due. It returns nil once the queue is closed. The caller must call done.
func (q *queue[K]) take() *item[K] {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.depth == 0 && q.items != nil {
		q.readyCond.Wait()
	}
	if q.items == nil {
		return nil
	}
	from := laneChanges
	q.changesInARow++
	if q.rounds[laneChanges].keys.Len() == 0 || q.changesInARow > changesPerReplay && q.rounds[laneReplay].keys.Len() > 0 {
		from, q.changesInARow = laneReplay, 0
	}
	r := &q.rounds[from]
	entry, _ := r.keys.Min()
	r.presentRound = max(r.presentRound, entry.due[from].round) // the key may have been due while a worker had it
	entry.lane = laneChanges
	if entry.due[laneChanges] == (position{}) {
		entry.lane = laneReplay
	}
	for i, due := range entry.due {
		if due != (position{}) {
			q.rounds[i].keys.Delete(entry)
		}
	}
	q.depth--
	entry.taken, entry.due = true, [2]position{}
	// It comes back in the turn in which it was due: for instance, a source in team has 300 targets in shop, and
	// all fail. In the turns of shop, a change in shop would wait for them. Nor can team delay what comes back
	// for shop by adding it again.
	if entry.turn == entry.tenant || entry.returnAt.IsZero() {
		entry.returnTurn = entry.turn
	}
	q.metrics.Waits.Observe(time.Since(entry.since).Seconds())
	q.roomCond.Broadcast()
	return entry
}

// park lets a taken key come back when this replica leads. It returns false if leading is closed already.
func (q *queue[K]) park(entry *item[K], leading <-chan struct{}) bool {
	q.mu.Lock() // unpark sees the key if leading is open now
	defer q.mu.Unlock()
	select {
	case <-leading:
	default:
		entry.parked = true
	}
	return entry.parked
}

// unpark makes the parked keys due. It is called when this replica leads.
func (q *queue[K]) unpark() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, entry := range q.items {
		if entry.parked {
			entry.parked = false
			q.makeDue(entry, laneChanges, entry.returnTurn)
		}
	}
}

// done ends the work on a taken key. If after > 0, the key comes back then, or earlier if that was decided
// before. failures is how often in a row it has failed by now. What fails while the key is to come back
// anyway, because of an event, does not count: events must not make the back-off longer.
func (q *queue[K]) done(entry *item[K], after time.Duration, failures int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return
	}
	entry.taken = false
	if failures < entry.failures || entry.returnAt.IsZero() {
		entry.failures = failures
	}
	if after > 0 {
		q.metrics.Retries.Inc()
		q.delayUntil(entry, time.Now().Add(after))
	}
	switch {
	case entry.isDue():
		q.push(entry)
	case entry.returnAt.IsZero() && !entry.parked:
		delete(q.items, entry.key)
		if len(q.items) == 0 && q.mostItems > replayAhead { // a map never becomes smaller
			q.items, q.mostItems = map[K]*item[K]{}, 0
		}
	}
}

// delayUntil lets a key come back at a time, or earlier if that was decided before. The caller holds mu.
func (q *queue[K]) delayUntil(entry *item[K], at time.Time) {
	if !entry.returnAt.IsZero() {
		if !at.Before(entry.returnAt) {
			return
		}
		q.delayed.Delete(entry)
	}
	q.lastDelaySeq++
	entry.returnAt, entry.delaySeq = at, q.lastDelaySeq
	q.delayed.ReplaceOrInsert(entry)
	if first, _ := q.delayed.Min(); first == entry {
		q.timer.Reset(time.Until(at))
	}
}

// endDelays makes the keys due whose delay has passed.
func (q *queue[K]) endDelays() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.items != nil {
		entry, found := q.delayed.Min()
		if !found {
			return
		}
		if left := time.Until(entry.returnAt); left > 0 {
			q.timer.Reset(left)
			return
		}
		q.delayed.Delete(entry)
		entry.returnAt = time.Time{}
		q.makeDue(entry, laneChanges, entry.returnTurn)
	}
}

// waitForRoom waits while laneReplay has replayAhead keys. It returns false if ctx ends.
func (q *queue[K]) waitForRoom(ctx context.Context) bool {
	full := func() bool { return q.items != nil && q.rounds[laneReplay].keys.Len() >= replayAhead }
	q.mu.Lock()
	defer q.mu.Unlock()
	if full() {
		defer context.AfterFunc(ctx, func() { // only then: it makes garbage
			q.mu.Lock()
			defer q.mu.Unlock()
			q.roomCond.Broadcast()
		})()
	}
	for ctx.Err() == nil && full() {
		q.roomCond.Wait()
	}
	return ctx.Err() == nil
}
