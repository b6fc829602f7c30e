// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"maps"
	"sync"

	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/third_party/forked/golang/btree"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
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
	workqueue.TypedDelayingInterface[K]               // Add and AddAfter add to laneChanges
	ready                               *laneQueue[K] // the keys whose delay, if any, has passed
}

func newQueue[K comparable](opts LoopOptions, logger *klog.Logger) *queue[K] {
	lanes, name := newLanes[K](), opts.String()
	lanes.panicked = func(key K, err error, stack []byte) {
		opts.Metrics.Panicked(opts.Name)
		logger.Error(err, "Tenant of a key panicked", "key", fmt.Sprint(key), "stack", string(stack))
	}
	if opts.Cluster != "" {
		name = "" // without metrics, which client-go cannot remove
	}
	ready := &laneQueue[K]{lanes: lanes, TypedInterface: workqueue.NewTypedWithConfig(
		workqueue.TypedQueueConfig[K]{Name: name, Queue: lanes})}
	return &queue[K]{ready: ready, TypedDelayingInterface: workqueue.NewTypedDelayingQueueWithConfig(
		workqueue.TypedDelayingQueueConfig[K]{Logger: logger, Name: name, Queue: ready})}
}

// close shuts the queue down and takes the keys that no worker has taken. The next run counts on in the same
// metric of the depth, so a key that is left here would be counted for ever.
func (q *queue[K]) close() {
	q.ShutDown()
	for {
		key, shutdown := q.Get()
		if shutdown {
			return
		}
		q.Done(key)
	}
}

// laneQueue is a workqueue whose keys wait in lanes.
type laneQueue[K comparable] struct {
	workqueue.TypedInterface[K]
	lanes *lanes[K]
}

// Add adds a key to laneChanges when it comes back: its delay has passed, or this replica leads.
func (q *laneQueue[K]) Add(key K) {
	q.lanes.mu.Lock()
	tenant, kept := q.lanes.turns[key]
	q.lanes.mu.Unlock()
	if !kept {
		tenant = q.lanes.tenantOf(key)
	}
	q.add(key, laneChanges, tenant, !kept)
}

// add adds a key to a lane, on behalf of a tenant. own says whether that is the key's own tenant.
func (q *laneQueue[K]) add(key K, in lane, tenant string, own bool) {
	if q.ShuttingDown() {
		return // the workqueue would ignore the key, and its note would stay
	}
	q.lanes.mu.Lock()
	q.lanes.note(key, in, tenant, own)
	q.lanes.mu.Unlock()
	q.TypedInterface.Add(key)
}

// tenantOf returns in whose turn a key is taken. The turn of a key whose Tenant panics has no name: the panic
// would end the process, and each new leader has the key again.
func (l *lanes[K]) tenantOf(key K) (tenant string) {
	if name, ok := any(key).(cache.ObjectName); ok {
		return name.Namespace
	}
	if k, ok := any(key).(interface{ Tenant() string }); ok {
		if stack, err := panics.Recover(func() error { tenant = k.Tenant(); return nil }); stack != nil {
			l.panicked(key, err, stack)
		}
	}
	return tenant
}

// lanes stores the keys of a workqueue, by fair queueing: each lane goes on in rounds, and in each round a
// tenant has one turn. A key that a tenant adds is due in the round after the tenant's last one, or after the
// present one if that is later. Keys of one round are taken in the order in which they were added.
//
// If several tenants add a key, it is due in the earliest of their rounds, and a tenant who would have it
// later spends no turn. So nobody delays a key by adding it to a long queue of their own. For instance, shop
// adds the keys a and b to a lane, and then team adds b and c. Without team, b would be due in round 2:
//
//	round 1: a, b
//	round 2: c
//
// The workqueue knows neither lanes nor tenants, so a key is noted before it is added:
//
//	the key is         note                      then Add of the workqueue calls
//	not queued         keeps when it is due      Push, which queues the key
//	queued             may make it due earlier   Touch
//	being reconciled   keeps when it is due      nothing; Push comes when the reconcile has ended
type lanes[K comparable] struct {
	panicked func(key K, err error, stack []byte) // is told of a panic of the key's Tenant

	mu            sync.Mutex // the workqueue calls its methods, Push to Pop, under a lock of its own
	noted, queued map[K]*item[K]
	rounds        [2]rounds[K] // the rounds of each lane
	inARow        int          // keys taken from laneChanges since the last one from laneShown
	room          *sync.Cond   // broadcasts when laneShown may have become shorter
	// taken has the taken keys until a worker calls takenItem. Get of the workqueue returns nothing but the key.
	taken map[K]*item[K]
	turns map[K]string // the tenants that keepTurn has kept
}

// item is a key, and when it is due in each lane: the round and the order in the round; 0 if it is not there.
type item[K comparable] struct {
	key    K
	due    [2]uint64 // round*perRound + order
	tenant string    // the last one who made it due or, then, due earlier
	own    bool      // whether the key's own tenant is among those who added it
}

// perRound is more than the keys that are added to a lane while one waits. It leaves 36 bits for the round.
const perRound = 1 << 28

// rounds has the queued keys of a lane.
type rounds[K comparable] struct {
	due     *btree.BTree[*item[K]]
	present uint64            // the latest round of which a key was taken
	last    map[string]uint64 // round of each tenant; it counts only if it is later than the present one
	sweepAt int               // length of last
	added   uint64            // keys so far
}

func newLanes[K comparable]() *lanes[K] {
	l := &lanes[K]{noted: map[K]*item[K]{}, queued: map[K]*item[K]{}, taken: map[K]*item[K]{}, turns: map[K]string{}}
	l.room = sync.NewCond(&l.mu)
	for i := range l.rounds {
		less := func(a, b *item[K]) bool { return a.due[i] < b.due[i] }
		l.rounds[i] = rounds[K]{due: btree.New(32, less), last: map[string]uint64{}}
	}
	return l
}

// note says in which lane, and on behalf of whom, a key is added to the workqueue next. The caller holds mu.
func (l *lanes[K]) note(key K, in lane, tenant string, own bool) {
	it, queued := l.queued[key]
	if !queued {
		it = l.noted[key]
	}
	if it == nil {
		it = &item[K]{key: key}
		l.noted[key] = it
	}
	it.own = it.own || own
	r := &l.rounds[in]
	round := max(r.present, r.last[tenant]) + 1
	if due := it.due[in]; due != 0 && due/perRound <= round {
		return
	}
	if queued {
		r.due.Delete(it)
	}
	it.due[in], it.tenant = round*perRound+r.added%perRound, tenant
	if queued {
		r.due.ReplaceOrInsert(it)
	}
	r.last[tenant] = round
	r.added++
	if len(r.last) > r.sweepAt {
		maps.DeleteFunc(r.last, func(_ string, last uint64) bool { return last <= r.present })
		r.sweepAt = 2*len(r.last) + 100
	}
}

// Push implements workqueue.Queue.
func (l *lanes[K]) Push(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.noted[key] == nil { // it was taken between note and Add, or another Add used the note
		l.note(key, laneChanges, "", true) // Tenant might hang, and the workqueue holds its lock
	}
	it := l.noted[key]
	delete(l.noted, key)
	l.queued[key] = it
	for i, due := range it.due {
		if due != 0 {
			l.rounds[i].due.ReplaceOrInsert(it)
		}
	}
}

// Touch implements workqueue.Queue: a queued key was added again, and note has done what there is to do.
func (l *lanes[K]) Touch(K) {}

// Len implements workqueue.Queue. The workqueue's lock guards the length too.
func (l *lanes[K]) Len() int { return len(l.queued) }

// Pop implements workqueue.Queue. There is a key.
func (l *lanes[K]) Pop() K {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := laneChanges
	l.inARow++
	if l.rounds[laneChanges].due.Len() == 0 || l.inARow > changesFirst && l.rounds[laneShown].due.Len() > 0 {
		from, l.inARow = laneShown, 0
	}
	r := &l.rounds[from]
	it, _ := r.due.Min()
	r.present = max(r.present, it.due[from]/perRound) // it may have been noted long ago
	delete(l.queued, it.key)
	for i, due := range it.due {
		if due != 0 {
			l.rounds[i].due.Delete(it)
		}
	}
	l.room.Broadcast()
	l.taken[it.key] = it
	return it.key
}

// waitForRoom waits while laneShown has replayAhead keys. It returns false if ctx ends.
func (l *lanes[K]) waitForRoom(ctx context.Context) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rounds[laneShown].due.Len() < replayAhead { // as for most objects of a small cluster: without garbage
		return ctx.Err() == nil
	}
	defer context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.room.Broadcast()
	})()
	for ctx.Err() == nil && l.rounds[laneShown].due.Len() >= replayAhead {
		l.room.Wait()
	}
	return ctx.Err() == nil
}

// takenItem returns the item of a taken key, and laneShown if it was not queued in laneChanges. Each worker
// calls it once for its key.
func (l *lanes[K]) takenItem(key K) (it *item[K], from lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	it = l.taken[key]
	delete(l.taken, key)
	if it.due[laneChanges] == 0 {
		from = laneShown
	}
	return it, from
}

// keepTurn says in whose turn a key comes back that has been reconciled: not in its own if only others had
// added it. For instance, a source in team has 300 targets in shop, and all fail. In the turns of shop, a
// change in shop would wait for them. A key that has failed before comes back as it did then, so team cannot
// delay what failed for shop by adding it again.
func (l *lanes[K]) keepTurn(it *item[K], comesBack, failedBefore bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case it.own || !comesBack:
		delete(l.turns, it.key)
	case !failedBefore:
		l.turns[it.key] = it.tenant
	}
}
