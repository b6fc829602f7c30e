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
	policy.Remembered
	failures  int
	announced policy.Action // by a dry run
}

// memory holds the entries. Handlers and workers use it concurrently.
type memory struct {
	mu      sync.Mutex
	entries map[key]*entry
}

func newMemory() *memory { return &memory{entries: map[key]*entry{}} }

// get returns a copy of an entry. An entry of another object of the same name does not count.
func (m *memory) get(k key, uid types.UID) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.entries[k]; e != nil && e.uid == uid {
		return *e
	}
	return entry{uid: uid}
}

// update changes an entry, and forgets it if nothing is left.
func (m *memory) update(k key, uid types.UID, change func(*entry)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entries[k]
	if e == nil || e.uid != uid {
		e = &entry{uid: uid}
		// The names of a cached object are part of a longer text.
		k.ObjectName = cache.NewObjectName(strings.Clone(k.Namespace), strings.Clone(k.Name))
	}
	if change(e); *e == (entry{uid: uid}) {
		delete(m.entries, k)
		return
	}
	m.entries[k] = e
}

func (m *memory) forget(k key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.entries, k)
}

// compare remembers a record that somebody has removed while nothing else changed.
func (m *memory) compare(k key, before, after *informers.Object) {
	if before.GetUID() != after.GetUID() {
		return
	}
	a, b := before.Digest(Name), after.Digest(Name)
	if bytes.Equal(a, b) {
		return
	}
	was, is := policy.Decode(a), policy.Decode(b)
	if lost := was.Lost(&is, k.Kind); lost > 0 {
		m.update(k, after.GetUID(), func(e *entry) { e.Lost = lost })
	}
}

// contested returns how many workloads are left to whoever raises them.
func (m *memory) contested() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.Contested() {
			n++
		}
	}
	return n
}
