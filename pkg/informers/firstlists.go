// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"slices"
	"sync"
	"time"
)

// firstLists tells when an informer has synced: when each feed has listed its part, or is not waited for.
type firstLists struct {
	answered chan struct{} // closed when a feed has filled its part of the cache: the others list at once
	synced   chan struct{} // closed when the informer has synced

	mu    sync.Mutex
	first time.Time // when answered was closed; not read before
}

// answeredAt returns when a feed first filled its part of the cache; zero if none has.
func (l *firstLists) answeredAt() time.Time {
	if !isClosed(l.answered) {
		return time.Time{}
	}
	return l.first
}

// missing reports whether the feed has not filled its part of the cache yet, and the API server does not
// refuse its list while it answers another feed. A server that answers none may just have started.
func (f *feed) missing() bool {
	answered := f.informer.lists.answeredAt()
	return !f.state.filled() && (answered.IsZero() || !f.state.refusedSince(answered))
}

// firstListWait is how long an informer waits for the first lists of other namespaces once one has been read.
// After that, loops hold back the keys of a namespace that is missing, see Unlisted.
const firstListWait = 10 * time.Second

// waitedFor reports whether the informer waits for the feed.
func (f *feed) waitedFor() bool {
	answered := f.informer.lists.answeredAt()
	return f.missing() && (answered.IsZero() || time.Since(answered) < firstListWait)
}

// reviewFirstLists closes answered and synced if it is time, as after a list or a failure.
func (i *informer) reviewFirstLists() {
	l := &i.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !isClosed(l.answered) && slices.ContainsFunc(i.feeds, func(f *feed) bool { return f.state.filled() })
	if first {
		l.first = time.Now()
		close(l.answered)
	}
	switch {
	case isClosed(l.synced):
	case !slices.ContainsFunc(i.feeds, (*feed).waitedFor):
		close(l.synced)
	case first:
		time.AfterFunc(firstListWait, i.reviewFirstLists)
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
	return !i.feeds[index].state.filled()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
