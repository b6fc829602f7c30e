// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// window is the time over which deletions are counted.
const window = time.Minute

// TotalLimitFactor is how many times as high the limit of all namespaces together is as the limit of one.
const TotalLimitFactor = 10

// Scope is what a limit of the breaker applies to.
type Scope string

// The scopes. Objects without a namespace count together as one namespace.
const (
	OneNamespace  Scope = "namespace"
	AllNamespaces Scope = "total"
)

// Breaker stops the deletions in a namespace for a while when there have been too many, and the deletions
// in all namespaces when there have been ten times as many.
type Breaker struct {
	Limit    int // deletions in a namespace per minute; 0 is no limit
	Cooldown time.Duration

	mu    sync.Mutex
	total tally
	// namespaces has each namespace that had a deletion, until it is forgotten: after a minute without
	// deletions, unless it is stopped. The total limits how many there are.
	namespaces map[string]*tally
	forgotten  time.Time // when idle namespaces were
}

// tally is what a breaker knows of one namespace, or of all namespaces.
type tally struct {
	taken []time.Time // in the last minute, in order
	until time.Time   // stopped before this
}

func (t *tally) full(now time.Time, limit int) bool {
	t.taken = slices.DeleteFunc(t.taken, func(deletion time.Time) bool { return now.Sub(deletion) >= window })
	return len(t.taken) >= limit
}

// Open returns how long no deletion is permitted in a namespace.
func (b *Breaker) Open(namespace string, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	until := b.total.until
	if t := b.namespaces[namespace]; t != nil && t.until.After(until) {
		until = t.until
	}
	return max(until.Sub(now), 0)
}

// Stopped returns how many namespaces are stopped for their own deletions, and whether all are stopped.
func (b *Breaker) Stopped(now time.Time) (namespaces int, all bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.namespaces {
		if t.until.After(now) {
			namespaces++
		}
	}
	return namespaces, b.total.until.After(now)
}

// Take counts a deletion and reports whether it is permitted. If it is the first that exceeds a limit,
// opened is what has been stopped now.
func (b *Breaker) Take(namespace string, now time.Time) (permitted bool, opened Scope) {
	if b.Limit == 0 {
		return true, ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget(now)
	t := b.namespaces[namespace]
	if t == nil {
		t = &tally{}
	}
	switch {
	case t.until.After(now), b.total.until.After(now):
		return false, ""
	case t.full(now, b.Limit):
		t.until = now.Add(b.Cooldown)
		return false, OneNamespace
	case b.total.full(now, TotalLimitFactor*b.Limit):
		b.total.until = now.Add(b.Cooldown)
		return false, AllNamespaces
	}
	t.taken = append(t.taken, now)
	b.total.taken = append(b.total.taken, now)
	if b.namespaces == nil {
		b.namespaces = map[string]*tally{}
	}
	b.namespaces[namespace] = t
	return true, ""
}

// forget forgets idle namespaces, once a minute.
func (b *Breaker) forget(now time.Time) {
	if now.Sub(b.forgotten) < window {
		return
	}
	b.forgotten = now
	maps.DeleteFunc(b.namespaces, func(_ string, t *tally) bool { return !t.full(now, 1) && !t.until.After(now) })
}

// Return takes back the last permission in a namespace, which led to no deletion.
func (b *Breaker) Return(namespace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range []*tally{b.namespaces[namespace], &b.total} {
		if t != nil && len(t.taken) > 0 {
			t.taken = t.taken[:len(t.taken)-1]
		}
	}
}
