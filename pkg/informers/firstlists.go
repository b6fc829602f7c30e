// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

// How far the first lists have come decides four things:
//
//	Synced, for loops   an informer has filled the cache with one namespace, and the others are filled or
//	                    refused, or firstListWait has passed since the first was
//	Unlisted, for keys  until the namespace of the key is filled
//	CheckSync, for      not refused, and not failing unless no informer has synced; a pending list counts for
//	/readyz             maxFirstList
//	Problem             until all are filled: refused or failing, or not synced yet

import (
	"slices"
	"sync"
	"time"
)

// firstList says how far the first list of a feed has come.
type firstList int

const (
	pending firstList = iota
	filled            // the feed has filled its part of the cache once, or counts as empty
	refused           // the API server has refused it with 403 or 404 for refusedAfter
	failing           // it has failed for failingAfter
)

// refusedAfter is how long an API server must refuse a list before that counts: an API server that has just
// started, or has just got a role or a definition, refuses a list that it answers a moment later.
const refusedAfter = 2 * time.Second

// firstList returns how far the first list has come.
func (s *state) firstList() firstList {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.failing["list"]
	switch {
	case s.everFilled:
		return filled
	case f != nil && f.settled:
		return refused
	case f != nil && time.Since(f.since) >= failingAfter:
		return failing
	}
	return pending
}

// missing reports whether the feed has not filled its part of the cache, and may do so soon.
func (f *feed) missing() bool {
	first := f.state.firstList()
	return first != filled && first != refused
}

// firstListWait is how long an informer that has read one namespace waits for the first lists of the others.
// After that, loops hold back the keys of a namespace that is missing, see Unlisted.
const firstListWait = 20 * time.Second

// firstLists tells when an informer has synced.
type firstLists struct {
	synced chan struct{} // closed when the informer has synced

	mu    sync.Mutex
	first time.Time // when a feed first filled its part of the cache: a server that answers none may just have started
}

// reviewFirstLists closes synced if it is time, as after a list or a failure.
func (i *informer) reviewFirstLists() {
	l := &i.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.first.IsZero() && slices.ContainsFunc(i.feeds, func(f *feed) bool { return f.state.firstList() == filled }) {
		l.first = time.Now()
		if len(i.feeds) > 1 {
			time.AfterFunc(firstListWait, i.reviewFirstLists)
		}
	}
	if isClosed(l.synced) || l.first.IsZero() || i.stopped.Load() {
		return
	}
	if time.Since(l.first) >= firstListWait || !slices.ContainsFunc(i.feeds, (*feed).missing) {
		close(l.synced)
	}
}

// Unlisted reports whether nothing is known of a namespace, although the cache has synced: its first list
// hangs or fails. For a name that is not one of --namespaces, Unlisted reports whether this holds for any
// of --namespaces whose list is not refused.
func (i *informer) Unlisted(namespace string) bool {
	index := slices.IndexFunc(i.feeds, func(f *feed) bool { return f.covers(namespace) })
	if index < 0 {
		return slices.ContainsFunc(i.feeds, (*feed).missing)
	}
	return i.feeds[index].state.firstList() != filled
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
