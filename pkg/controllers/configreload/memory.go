// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// entry is what a run remembers of one workload; the package comment has a table of the fields.
type entry struct {
	uid              types.UID
	lastState        string // the state, as the text of an annotation; empty if no state is known
	window           policy.Window
	writtenVersion   string // a resourceVersion
	rewrittenAt      time.Time
	reportedProblems string
	lastRun          cronJobRun
	replacement      *replacement
	pause            policy.Pause
}

// rewriteInterval is the least time between two writes of a state annotation that somebody else
// removes or changes.
const rewriteInterval = 10 * time.Minute

func (e *entry) isEmpty(now time.Time) bool {
	return e.lastState == "" && !e.window.IsOpen() && e.writtenVersion == "" && now.Sub(e.rewrittenAt) >= rewriteInterval &&
		e.reportedProblems == "" && e.lastRun.name == "" && e.replacement == nil && e.pause == (policy.Pause{})
}

// isBehind reports whether a cached version is older than the last write.
func (e *entry) isBehind(version string) bool { return policy.Newer(e.writtenVersion, version) }

// memory holds the entries. Handlers and workers use it concurrently.
type memory struct {
	mu      sync.Mutex
	entries map[policy.QueueKey]*entry
	// selectedVersions holds, for each namespace that was selected during this run, the version that selected
	// it.
	selectedVersions map[string]string
	// cachedUID returns the UID of the object that is now in the cache. It is called under the lock, so that no
	// other worker can act on a later UID in between.
	cachedUID func(policy.QueueKey) types.UID
}

func newMemory(cachedUID func(policy.QueueKey) types.UID) *memory {
	return &memory{entries: map[policy.QueueKey]*entry{}, selectedVersions: map[string]string{}, cachedUID: cachedUID}
}

// get returns a copy for a decision. An entry of another object of the same name is ignored.
func (m *memory) get(key policy.QueueKey, uid types.UID) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	if !ok || e.uid != uid {
		return entry{uid: uid}
	}
	c := *e
	c.window = e.window.Clone()
	return c
}

// replacement returns the Job to create again, if there is one, and whether anything is remembered
// under the name.
func (m *memory) replacement(key policy.QueueKey) (r *replacement, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, known := m.entries[key]
	if known {
		r = e.replacement
	}
	return r, known
}

// update changes an entry under the lock and deletes it if nothing is left. If the entry belongs to
// another object of the same name, the object in the cache wins: update replaces the entry if uid
// is that object's, and otherwise does nothing. An entry that holds a Job to be created again is
// never replaced.
func (m *memory) update(key policy.QueueKey, uid types.UID, now time.Time, change func(e *entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	switch {
	case ok && e.uid == uid:
	case ok && (e.replacement != nil || m.cachedUID(key) != uid):
		return
	default:
		e = &entry{uid: uid}
		// The name of a cached object is a substring, which would keep a longer text in memory.
		key.Name = strings.Clone(key.Name)
	}
	change(e)
	if e.isEmpty(now) {
		delete(m.entries, key)
		return
	}
	m.entries[key] = e
}

func (m *memory) forget(key policy.QueueKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.entries, key)
}

// clear is called at the end of a run; the next run begins with the recorded states.
func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.entries)
	clear(m.selectedVersions)
}

// setSelected notes the version with which a namespace was selected; empty if it is gone.
func (m *memory) setSelected(namespace, version string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if delete(m.selectedVersions, namespace); version != "" {
		m.selectedVersions[namespace] = version
	}
}

// selectedSince returns the version since when a namespace is selected; empty if since before this run.
func (m *memory) selectedSince(namespace string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.selectedVersions[namespace]
}

// counts returns the number of open windows and of paused Deployments.
func (m *memory) counts() (pending, paused int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.window.IsOpen() {
			pending++
		}
		if e.pause != (policy.Pause{}) {
			paused++
		}
	}
	return pending, paused
}

// replacements returns the Jobs that wait to be created again.
func (m *memory) replacements() map[policy.QueueKey]*replacement {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := map[policy.QueueKey]*replacement{}
	for key, e := range m.entries {
		if e.replacement != nil {
			list[key] = e.replacement
		}
	}
	return list
}
