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
	// laneReplay is the lane of objects in the cache that Run, or a watch that was added, maps at its beginning.
	laneReplay
)

// changesPerReplay is how many keys of laneChanges are taken for each key of laneReplay, while both have
// keys. Otherwise a tenant who writes all the time would keep a new leader from what changed while nobody
// led.
const changesPerReplay = 4

// replayAhead is how many keys of a replay wait before the replay waits too. It also waits while laneReplay
// has maxReplay keys, which take 3 MiB: a reconcile may add many keys there, see EnqueueFor. Fewer of them do
// not keep the replay from the objects of others.
const (
	replayAhead = 500
	maxReplay   = 10_000
)

// queue has the keys of one run of a loop: those that are due, those that a worker has taken, and those that
// come back later.
//
// Due keys wait in lanes, by fair queueing: each lane goes on in rounds, and in each round a tenant has one
// turn. A key that a tenant adds is due in the round after the tenant's last one, or after the present one if
// that is later. Keys of one round are taken in the order in which they were added.
//
// If several tenants add a key, it is due in the earliest of their rounds, and a tenant who would have it
// later spends no turn; who was earlier at first has spent one. So nobody delays a key by adding it to a long
// queue of their own. For instance, shop adds the keys a and b to a lane, and then team adds b and c. Without
// team, b would be due in round 2:
//
//	round 1: a, b
//	round 2: c
//
// A key that comes back does so in the turn in which it was taken. For instance, a source in team has 300
// targets in shop, and all fail: they come back in turns of team, one in each round, and a change in shop
// waits for one of them at most.
//
// What changes the state of a key:
//
//	            sets                            clears
//	makeDue     due, turnTenant; replayed by addReplayed
//	take        taken, lane, returnTenant       due, replayed, parked, backIn
//	park        parked
//	putBack     backIn, and what done sets
//	done        askedAt or backoffAt, returnAt  taken; after a success backoffAt, notBefore
//	            and notBefore
//	endDelays   due                             those of askedAt, backoffAt, returnAt that have passed
//	unpark      due                             parked
type queue[K comparable] struct {
	metrics loopmetrics.Queue

	mu            sync.Mutex
	items         map[K]*queueItem[K] // nil while the queue is closed
	mostItems     int                 // length that items has had
	rounds        [2]rounds[K]        // the due keys of each lane, but those that a worker has
	depth         int                 // number of keys in rounds
	replayed      int                 // number of due keys that addReplayed has added
	changesInARow int                 // keys taken from laneChanges since the last one from laneReplay
	delayed       *btree.BTree[*queueItem[K]]
	lastDelaySeq  uint64      // of the key that was delayed last
	timer         *time.Timer // of the first delayed key
	readyCond     *sync.Cond  // signals that a key is due
	roomCond      *sync.Cond  // broadcasts when waitForRoom may have room
}

// queueItem is a key for as long as it is due, taken, delayed or parked.
type queueItem[K comparable] struct {
	key    K
	tenant string // whose key it is

	due        [2]position // in each lane; zero if it is not due there
	turnTenant string      // in whose turn it is due
	since      time.Time   // when it became due
	replayed   bool        // addReplayed has made it due
	taken      bool        // a worker has it: even if it is due, it is taken again only when the worker is done

	// Set when a worker takes it:
	lane         lane   // laneReplay if it was not due in laneChanges
	returnTenant string // in whose turn it comes back

	failures  int       // how often in a row reconcile has failed for it
	askedAt   time.Time // the earliest time for which reconcile has asked; zero for none
	backoffAt time.Time // when its back-off ends; zero without one
	notBefore time.Time // for which the API server has asked at a failure; zero after a success
	returnAt  time.Time // the earlier of askedAt and backoffAt, but not before notBefore; zero if it is not delayed
	delaySeq  uint64    // tells keys apart that come back at the same time
	parked    bool      // it comes back when this replica leads
	backIn    lane      // in which it comes back after a time
}

func (item *queueItem[K]) isDue() bool { return item.due != [2]position{} }

// position says when a key is taken from its lane: in which round, and after how many keys that were ever
// added.
type position struct{ round, order uint64 }

func (p position) before(other position) bool {
	return p.round < other.round || p.round == other.round && p.order < other.order
}

// rounds has the due keys of a lane.
type rounds[K comparable] struct {
	keys         *btree.BTree[*queueItem[K]]
	presentRound uint64            // the latest round of which a key was taken
	lastRound    map[string]uint64 // round of each tenant; it counts only if it is later than the present one
	sweepAt      int               // length of lastRound
	added        uint64            // keys so far
}

// newQueue returns a closed queue, which must get its metrics before it opens.
func newQueue[K comparable]() *queue[K] {
	q := &queue[K]{}
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
	q.items = map[K]*queueItem[K]{}
	for i := range q.rounds {
		less := func(a, b *queueItem[K]) bool { return a.due[i].before(b.due[i]) }
		q.rounds[i] = rounds[K]{keys: btree.New(32, less), lastRound: map[string]uint64{}}
	}
	q.delayed = btree.New(32, func(a, b *queueItem[K]) bool {
		return a.returnAt.Before(b.returnAt) || a.returnAt.Equal(b.returnAt) && a.delaySeq < b.delaySeq
	})
}

// close drops all keys. Until the queue is opened again, take returns nil, and add drops its key.
func (q *queue[K]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer.Stop()
	q.items, q.rounds, q.depth, q.replayed, q.delayed = nil, [2]rounds[K]{}, 0, 0, nil
	q.readyCond.Broadcast()
	q.roomCond.Broadcast()
}

// counts returns how many keys are due and not taken, and how many come back later.
func (q *queue[K]) counts() (due, delayed int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return 0, 0
	}
	return q.depth, q.delayed.Len()
}

// add adds a key that belongs to tenant to a lane, where it uses up a turn of turnTenant. A key that a worker
// has can be taken again only when the worker is done.
func (q *queue[K]) add(key K, tenant string, ln lane, turnTenant string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if item := q.item(key, tenant); item != nil {
		q.makeDue(item, ln, turnTenant)
	}
}

// addReplayed adds a key to laneReplay that a replay has mapped. waitForRoom counts it.
func (q *queue[K]) addReplayed(key K, tenant string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if item := q.item(key, tenant); item != nil {
		q.makeDue(item, laneReplay, tenant)
		if !item.replayed {
			item.replayed = true
			q.replayed++
		}
	}
}

// item returns the item of a key, and makes one if there is none; nil while the queue is closed. The caller
// holds mu.
func (q *queue[K]) item(key K, tenant string) *queueItem[K] {
	item := q.items[key]
	if item == nil && q.items != nil {
		item = &queueItem[K]{key: key, tenant: tenant}
		q.items[key] = item
		q.mostItems = max(q.mostItems, len(q.items))
	}
	return item
}

// makeDue makes a key due in a lane, unless it is due there earlier. The caller holds mu.
func (q *queue[K]) makeDue(item *queueItem[K], ln lane, turnTenant string) {
	first := !item.isDue()
	if first {
		item.since = time.Now()
		q.metrics.Adds.Inc()
	}
	r := &q.rounds[ln]
	round := max(r.presentRound, r.lastRound[turnTenant]) + 1
	earlier := item.due[ln] == (position{}) || round < item.due[ln].round
	// Its own tenant's turn stays; else the turn counts that made it due first, or earlier.
	if first || turnTenant == item.tenant || earlier && item.turnTenant != item.tenant {
		item.turnTenant = turnTenant
	}
	if !earlier {
		return
	}
	if !first {
		r.keys.Delete(item) // unless a worker has it
	}
	item.due[ln] = position{round, r.added}
	switch {
	case item.taken:
	case first:
		q.push(item)
	default:
		r.keys.ReplaceOrInsert(item)
	}
	r.lastRound[turnTenant] = round
	r.added++
	if len(r.lastRound) > r.sweepAt {
		maps.DeleteFunc(r.lastRound, func(_ string, last uint64) bool { return last <= r.presentRound })
		r.sweepAt = 2*len(r.lastRound) + 100
	}
}

// push offers a due key to the workers. The caller holds mu.
func (q *queue[K]) push(item *queueItem[K]) {
	for i, due := range item.due {
		if due != (position{}) {
			q.rounds[i].keys.ReplaceOrInsert(item)
		}
	}
	q.depth++
	q.readyCond.Signal()
}

// take waits until a key is due. It returns nil once the queue is closed. The caller must call done.
func (q *queue[K]) take() *queueItem[K] {
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
	item, _ := r.keys.Min()
	r.presentRound = max(r.presentRound, item.due[from].round) // the key may have been due while a worker had it
	item.lane = laneChanges
	if item.due[laneChanges] == (position{}) {
		item.lane = laneReplay
	}
	for i, due := range item.due {
		if due != (position{}) {
			q.rounds[i].keys.Delete(item)
		}
	}
	q.depth--
	if item.replayed {
		item.replayed = false
		q.replayed--
	}
	item.taken, item.parked, item.backIn, item.due = true, false, laneChanges, [2]position{}
	// A key that comes back for shop keeps the turn of shop: team cannot delay it by adding it again.
	if item.turnTenant == item.tenant || item.returnAt.IsZero() {
		item.returnTenant = item.turnTenant
	}
	q.metrics.Waits.Observe(time.Since(item.since).Seconds())
	q.roomCond.Broadcast()
	return item
}

// waitForRoom waits while there are replayAhead keys of replays, or maxReplay keys in laneReplay. It returns
// false if ctx ends.
func (q *queue[K]) waitForRoom(ctx context.Context) bool {
	full := func() bool {
		return q.items != nil && (q.replayed >= replayAhead || q.rounds[laneReplay].keys.Len() >= maxReplay)
	}
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
