// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"time"
)

// window is the time over which deletions are counted.
const window = time.Minute

// Breaker stops all deletions for a while when there have been too many. It is not safe for concurrent
// use.
type Breaker struct {
	Limit    int // deletions per window; 0 is no limit
	Cooldown time.Duration

	taken []time.Time // in order
	until time.Time   // open before this
}

// Open returns how long no deletion is permitted.
func (b *Breaker) Open(now time.Time) time.Duration { return max(b.until.Sub(now), 0) }

// Take permits a deletion, or returns for how long none is. opened is set when this is what opened
// the breaker.
func (b *Breaker) Take(now time.Time) (wait time.Duration, opened bool) {
	if b.Limit == 0 {
		return 0, false
	}
	if open := b.Open(now); open > 0 {
		return open, false
	}
	b.taken = slices.DeleteFunc(b.taken, func(t time.Time) bool { return now.Sub(t) >= window })
	if len(b.taken) < b.Limit {
		b.taken = append(b.taken, now)
		return 0, false
	}
	b.until = now.Add(b.Cooldown)
	return b.Cooldown, true
}

// Return takes back a permission of the last window that led to no deletion.
func (b *Breaker) Return() {
	if n := len(b.taken); n > 0 {
		b.taken = b.taken[:n-1]
	}
}
