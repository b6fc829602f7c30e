// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import "time"

// What becomes of a key that a worker has taken: it is done with, or comes back later.

// endAtOnce is how many keys whose delay has passed become due under one hold of the queue's lock: at the
// boundary of a schedule there may be 100,000.
const endAtOnce = 1000

// park lets a taken key come back when this replica leads. It returns false if leading is closed already.
func (q *queue[K]) park(item *queueItem[K], leading <-chan struct{}) bool {
	q.mu.Lock() // unpark sees the key if leading is open now
	defer q.mu.Unlock()
	select {
	case <-leading:
	default:
		item.parked = true
	}
	return item.parked
}

// unpark makes the parked keys due. It is called when this replica leads.
func (q *queue[K]) unpark() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, item := range q.items {
		if item.parked {
			item.parked = false
			q.makeDue(item, item.lane, item.returnTenant) // what was replayed on a standby must not be ahead of changes
		}
	}
}

// done ends the work on a taken key. failures is how often in a row it has failed by now. If after > 0, the
// key comes back then, or earlier if that was decided before: as a back-off if it has failed, and then after
// notBefore at the earliest, for which the API server has asked at this failure or an earlier one. What fails
// during a back-off, because of an event, does not count: events must not make the back-off longer.
func (q *queue[K]) done(item *queueItem[K], after, notBefore time.Duration, failures int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items == nil {
		return
	}
	item.taken = false
	if failures < item.failures || item.backoffAt.IsZero() {
		item.failures = failures
	}
	at := &item.backoffAt
	if failures == 0 {
		item.backoffAt, item.notBefore, at = time.Time{}, time.Time{}, &item.askedAt
	}
	now := time.Now()
	if after > 0 {
		q.metrics.Retries.Inc()
		*at = earlier(*at, now.Add(after))
	}
	if notBefore > 0 && now.Add(notBefore).After(item.notBefore) {
		item.notBefore = now.Add(notBefore)
	}
	q.delay(item)
	switch {
	case item.isDue():
		q.push(item)
	case item.returnAt.IsZero() && !item.parked:
		delete(q.items, item.key)
		if len(q.items) == 0 && q.mostItems > replayAhead { // a map never becomes smaller
			q.items, q.mostItems = map[K]*queueItem[K]{}, 0
		}
	}
}

// putBack lets a taken key that was not reconciled come back after a time, in the lane in which it was due.
func (q *queue[K]) putBack(item *queueItem[K], after time.Duration) {
	q.mu.Lock()
	item.backIn = item.lane
	q.mu.Unlock()
	q.done(item, after, 0, item.failures)
}

// earlier returns the earlier of two times, of which a zero one does not count.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// delay lets a key come back when its times say so. The caller holds mu.
func (q *queue[K]) delay(item *queueItem[K]) {
	at := earlier(item.askedAt, item.backoffAt)
	if !at.IsZero() && at.Before(item.notBefore) {
		at = item.notBefore
	}
	if at.Equal(item.returnAt) {
		return
	}
	if !item.returnAt.IsZero() {
		q.delayed.Delete(item)
	}
	item.returnAt = at
	if at.IsZero() {
		return
	}
	q.lastDelaySeq++
	item.delaySeq = q.lastDelaySeq
	q.delayed.ReplaceOrInsert(item)
	if first, _ := q.delayed.Min(); first == item {
		q.timer.Reset(time.Until(at))
	}
}

// endDelays makes the keys due whose delay has passed. After endAtOnce of them it lets others have mu.
func (q *queue[K]) endDelays() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for n := 0; q.items != nil; n++ {
		item, found := q.delayed.Min()
		if !found {
			return
		}
		if left := time.Until(item.returnAt); left > 0 || n == endAtOnce {
			q.timer.Reset(left)
			return
		}
		for _, at := range []*time.Time{&item.askedAt, &item.backoffAt} {
			if !at.After(item.returnAt) {
				*at = time.Time{}
			}
		}
		q.delay(item)
		q.makeDue(item, item.backIn, item.returnTenant)
	}
}
