// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"bytes"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// entry is what a run remembers of a workload. Most workloads have none.
type entry struct {
	uid types.UID
	policy.History
	failures     int
	dryRunAction policy.Action // the last that a dry run has reported
}

// memory holds the entries. Handlers and workers use it concurrently.
type memory struct {
	mu      sync.Mutex
	entries map[objectKey]*entry
}

func newMemory() *memory { return &memory{entries: map[objectKey]*entry{}} }

// get returns a copy of an entry. An entry of another object of the same name does not count.
func (m *memory) get(key objectKey, uid types.UID) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.entries[key]; e != nil && e.uid == uid {
		return *e
	}
	return entry{uid: uid}
}

// update changes an entry, and forgets it if nothing is left.
func (m *memory) update(key objectKey, uid types.UID, change func(*entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entries[key]
	if e == nil || e.uid != uid {
		e = &entry{uid: uid}
		// The names of a cached object are substrings, which would keep a longer text in memory.
		key.ObjectName = cache.NewObjectName(strings.Clone(key.Namespace), strings.Clone(key.Name))
	}
	if change(e); *e == (entry{uid: uid}) {
		delete(m.entries, key)
		return
	}
	m.entries[key] = e
}

func (m *memory) forget(key objectKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.entries, key)
}

// rememberLostRecord remembers a record that somebody has removed while nothing else changed.
func (m *memory) rememberLostRecord(key objectKey, old, current *informers.Object) {
	if old.GetUID() != current.GetUID() {
		return
	}
	oldDigest, currentDigest := old.Digest(Name), current.Digest(Name)
	if bytes.Equal(oldDigest, currentDigest) {
		return
	}
	before, after := policy.Decode(oldDigest), policy.Decode(currentDigest)
	if lost := before.LostRecord(&after, key.Kind); lost > 0 {
		m.update(key, current.GetUID(), func(e *entry) { e.LostRecord = lost })
	}
}

// countContested returns how many workloads are left to whoever raises them.
func (m *memory) countContested() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.Contested() {
			n++
		}
	}
	return n
}
