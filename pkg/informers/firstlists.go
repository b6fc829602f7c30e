// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import "sync"

// firstLists tells when an informer has synced: when each of its feeds has filled its part of the cache, or
// is refused by an API server that has answered another feed.
type firstLists struct {
	answered chan struct{} // closed when a feed has filled its part of the cache: the others list at once
	synced   chan struct{} // closed when the informer has synced

	mu      sync.Mutex
	missing map[*feed]struct{} // have neither filled their part of the cache nor been refused
}

// expect adds a feed, before any feed runs.
func (l *firstLists) expect(f *feed) { l.missing[f] = struct{}{} }

// fill notes that a feed has filled its part of the cache, or that this part counts as empty.
func (l *firstLists) fill(f *feed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !isClosed(l.answered) {
		close(l.answered)
	}
	l.found(f)
}

// refuse notes that the API server refuses the lists of a feed, the last of which began after answered was
// closed. Before that, the server may just have started.
func (l *firstLists) refuse(f *feed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found(f)
}

// found notes that a feed is not missing. The caller holds mu.
func (l *firstLists) found(f *feed) {
	delete(l.missing, f)
	if len(l.missing) == 0 && !isClosed(l.synced) {
		close(l.synced)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
