// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// entry is what the process remembers of one workload. It exists only while there is something to
// remember; most workloads have none.
type entry struct {
	uid    types.UID
	window window
	// touched counts the changes in the window, so that a change during the write of a reload is
	// not dropped with the window.
	touched uint64
	// seen holds the values before changes seen live, for sources of which nothing is recorded yet,
	// and the content of an annotation that somebody removed. What is recorded takes precedence.
	seen state
	// kept is the state if it is not kept on the workload; nil before the first decision.
	kept state
	// removed is set if somebody removed the annotation. It is written again, but not sooner than
	// rewriteInterval after the last time.
	removed   bool
	rewritten time.Time
	// written is the resourceVersion of the last write. Until the cache has it, a decision from the
	// cache would repeat the write.
	written string
	rolled  string // see facts
	// reported are the problems for which an Event was sent.
	reported string
	// recreate is a Job that was, or may have been, deleted and has to be created again. Only the
	// worker that holds the key changes it.
	recreate *replacement
}

// rewriteInterval is the least time between two writes of a state annotation that somebody else
// removes.
const rewriteInterval = 10 * time.Minute

func (e *entry) empty(now time.Time) bool {
	return !e.window.open() && e.seen == nil && e.kept == nil && !e.removed &&
		now.Sub(e.rewritten) >= rewriteInterval && e.written == "" && e.rolled == "" &&
		e.reported == "" && e.recreate == nil
}

// memory holds the entries. Handlers and workers use it concurrently.
type memory struct {
	mu      sync.Mutex
	entries map[workloadKey]*entry
	paused  map[workloadKey]struct{}
	// cached returns the UID of the object that is now in the cache. It is called under the lock,
	// so that nobody else has seen a later one.
	cached func(workloadKey) types.UID
}

func newMemory(cached func(workloadKey) types.UID) *memory {
	return &memory{entries: map[workloadKey]*entry{}, paused: map[workloadKey]struct{}{}, cached: cached}
}

// get returns a copy for a decision. An entry of another object of the same name is ignored, unless
// it holds a Job that has to be created again.
func (m *memory) get(key workloadKey, uid types.UID) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	if !ok || e.uid != uid {
		return entry{uid: uid}
	}
	c := *e
	c.window.changed = maps.Clone(e.window.changed)
	c.seen, c.kept = maps.Clone(e.seen), maps.Clone(e.kept)
	return c
}

// update changes an entry under the lock and deletes it if nothing is left. If the entry belongs to
// another object of the same name, the object in the cache wins: update replaces the entry if uid
// is that object's, and otherwise does nothing. An entry that holds a Job to be created again is
// never replaced.
func (m *memory) update(key workloadKey, uid types.UID, now time.Time, change func(e *entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	switch {
	case ok && e.uid == uid:
	case ok && (e.recreate != nil || m.cached(key) != uid):
		return
	default:
		e = &entry{uid: uid}
	}
	change(e)
	if e.empty(now) {
		delete(m.entries, key)
		return
	}
	m.entries[key] = e
}

func (m *memory) forget(key workloadKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.entries, key)
	delete(m.paused, key)
}

// succeed replaces the entry by one of the Job that was created again.
func (m *memory) succeed(key workloadKey, uid types.UID, kept state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.entries[key] = &entry{uid: uid, kept: kept}
}

// clear is called at the end of a run; the next run begins with what is recorded.
func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.entries)
	clear(m.paused)
}

// setPaused updates the set that the gauge counts.
func (m *memory) setPaused(key workloadKey, paused bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if paused {
		m.paused[key] = struct{}{}
	} else {
		delete(m.paused, key)
	}
}

// counts returns the number of open windows and of paused Deployments.
func (m *memory) counts() (pending, paused int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.window.open() {
			pending++
		}
	}
	return pending, len(m.paused)
}

// replacements returns the Jobs that wait to be created again.
func (m *memory) replacements() map[workloadKey]*replacement {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := map[workloadKey]*replacement{}
	for key, e := range m.entries {
		if e.recreate != nil {
			list[key] = e.recreate
		}
	}
	return list
}

// touch notes a change of a source. It returns false if the change joins others that are already
// waiting.
func (e *entry) touch(key sourceKey, is change) bool {
	first := !e.window.open()
	if first {
		e.window.first = is.at
	}
	e.window.last = is.at
	if e.window.changed == nil {
		e.window.changed = map[sourceKey]change{}
	}
	e.window.changed[key] = is
	if _, read := e.window.ran[key]; read {
		e.window.ran = nil
	}
	e.touched++
	return first
}

// see notes the value before a change, unless an older one is known.
func (e *entry) see(key sourceKey, value string) {
	if _, known := e.seen[key]; known {
		return
	}
	if e.seen == nil {
		e.seen = state{}
	}
	e.seen[key] = value
}

// close ends the window in which the decision was made. Changes since then keep a window open.
func (e *entry) close(decided entry, now time.Time) {
	if e.touched == decided.touched {
		e.window = window{}
		return
	}
	e.window.first, e.window.notBefore, e.window.waits = now, time.Time{}, false
}

// behind reports whether a cached version is older than the last write.
func (e *entry) behind(version string) bool {
	if e.written == "" {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(version, e.written)
	return err == nil && order < 0
}
