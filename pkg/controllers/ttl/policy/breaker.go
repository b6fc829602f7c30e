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
	// deletions, unless it is stopped. The limit of all namespaces together bounds the size of the map.
	namespaces map[string]*tally
	lastForget time.Time // when idle namespaces were last forgotten
}

// tally is what a breaker knows of one namespace, or of all namespaces.
type tally struct {
	deletions    []time.Time // the times of those that were permitted in the last minute, in order
	stoppedUntil time.Time
}

// full reports whether the last minute had as many deletions as the limit.
func (t *tally) full(now time.Time, limit int) bool {
	t.deletions = slices.DeleteFunc(t.deletions, func(at time.Time) bool { return now.Sub(at) >= window })
	return len(t.deletions) >= limit
}

// StoppedFor returns how long no deletion is permitted in a namespace.
func (b *Breaker) StoppedFor(namespace string, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	stoppedUntil := b.total.stoppedUntil
	if t := b.namespaces[namespace]; t != nil && t.stoppedUntil.After(stoppedUntil) {
		stoppedUntil = t.stoppedUntil
	}
	return max(stoppedUntil.Sub(now), 0)
}

// Stopped returns how many namespaces are stopped for their own deletions, and whether all are stopped.
func (b *Breaker) Stopped(now time.Time) (namespaces int, all bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.namespaces {
		if t.stoppedUntil.After(now) {
			namespaces++
		}
	}
	return namespaces, b.total.stoppedUntil.After(now)
}

// Take counts a deletion and reports whether it is permitted. If it is the first that exceeds a limit,
// stopped is what has been stopped now.
func (b *Breaker) Take(namespace string, now time.Time) (permitted bool, stopped Scope) {
	if b.Limit == 0 {
		return true, ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forgetIdle(now)
	t := b.namespaces[namespace]
	if t == nil {
		t = &tally{}
	}
	switch {
	case t.stoppedUntil.After(now), b.total.stoppedUntil.After(now):
		return false, ""
	case t.full(now, b.Limit):
		t.stoppedUntil = now.Add(b.Cooldown)
		return false, OneNamespace
	case b.total.full(now, TotalLimitFactor*b.Limit):
		b.total.stoppedUntil = now.Add(b.Cooldown)
		return false, AllNamespaces
	}
	t.deletions = append(t.deletions, now)
	b.total.deletions = append(b.total.deletions, now)
	if b.namespaces == nil {
		b.namespaces = map[string]*tally{}
	}
	b.namespaces[namespace] = t
	return true, ""
}

// forgetIdle forgets idle namespaces, once a minute.
func (b *Breaker) forgetIdle(now time.Time) {
	if now.Sub(b.lastForget) < window {
		return
	}
	b.lastForget = now
	maps.DeleteFunc(b.namespaces, func(_ string, t *tally) bool { return !t.full(now, 1) && !t.stoppedUntil.After(now) })
}

// Return takes back the last permission in a namespace, which led to no deletion.
func (b *Breaker) Return(namespace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range []*tally{b.namespaces[namespace], &b.total} {
		if t != nil && len(t.deletions) > 0 {
			t.deletions = t.deletions[:len(t.deletions)-1]
		}
	}
}
