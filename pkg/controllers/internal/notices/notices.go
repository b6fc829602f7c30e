// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package notices remembers what owners of objects were told, so that they are not told again and again.
package notices

import (
	"sync"
	"time"

	"k8s.io/utils/lru"
)

// maxNotices is how many notices are remembered. Beyond it the least recently used is forgotten, and
// may be sent again too early; client-go limits the Events of each object besides.
const maxNotices = 4096

// Memory remembers notices. It is safe for concurrent use.
type Memory struct {
	interval time.Duration
	mu       sync.Mutex
	sentAt   *lru.Cache
}

// New returns an empty memory. The same notice is due again after interval.
func New(interval time.Duration) *Memory {
	return &Memory{interval: interval, sentAt: lru.New(maxNotices)}
}

// Due reports whether a notice is to be sent at now, and remembers it as sent if so. The notice must be
// comparable and should name the object, by its UID or name, and the reason.
func (m *Memory) Due(notice any, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if sentAt, found := m.sentAt.Get(notice); found && now.Sub(sentAt.(time.Time)) < m.interval {
		return false
	}
	m.sentAt.Add(notice, now)
	return true
}

// Clear forgets all notices.
func (m *Memory) Clear() { m.sentAt.Clear() }
