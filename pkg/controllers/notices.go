// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"sync"
	"time"

	"k8s.io/utils/lru"
)

// maxNotices is how many notices are remembered. Beyond it the least recently used is forgotten, and
// may be sent again too early; client-go limits the Events of each object besides.
const maxNotices = 4096

// Notices remembers what owners of objects were told, so that they are not told again and again. It is
// safe for concurrent use.
type Notices struct {
	interval time.Duration
	mu       sync.Mutex
	sent     *lru.Cache
}

// NewNotices returns an empty memory. The same notice is due again after interval.
func NewNotices(interval time.Duration) *Notices {
	return &Notices{interval: interval, sent: lru.New(maxNotices)}
}

// Due reports whether a notice is to be sent at now, and remembers it as sent if so. The notice must be
// comparable and should name the object, by its UID or name, and the reason.
func (n *Notices) Due(notice any, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if sent, was := n.sent.Get(notice); was && now.Sub(sent.(time.Time)) < n.interval {
		return false
	}
	n.sent.Add(notice, now)
	return true
}

// Clear forgets all notices.
func (n *Notices) Clear() { n.sent.Clear() }
