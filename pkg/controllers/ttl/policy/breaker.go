// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"sync"
	"time"
)

// window is the time over which deletions are counted.
const window = time.Minute

// Breaker stops deletions for a while, such as when there have been too many.
type Breaker struct {
	Limit int // deletions per window; 0 is no limit

	mu    sync.Mutex
	taken []time.Time // in order
	until time.Time   // open before this
}

// Open returns how long no deletion is permitted.
func (b *Breaker) Open(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return max(b.until.Sub(now), 0)
}

// Trip opens the breaker, and reports whether it was closed.
func (b *Breaker) Trip(now time.Time, pause time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	closed := !b.until.After(now)
	if closed {
		b.until = now.Add(pause)
	}
	return closed
}

// Take counts a deletion and reports whether there may be one more.
func (b *Breaker) Take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taken = slices.DeleteFunc(b.taken, func(t time.Time) bool { return now.Sub(t) >= window })
	if b.Limit > 0 && len(b.taken) >= b.Limit || b.until.After(now) {
		return false
	}
	b.taken = append(b.taken, now)
	return true
}

// Return takes back the last permission, which led to no deletion.
func (b *Breaker) Return() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.taken); n > 0 {
		b.taken = b.taken[:n-1]
	}
}
