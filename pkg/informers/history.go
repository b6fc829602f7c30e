// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"strconv"
	"sync"
	"unique"
)

// history finds the predecessor of an object that is about to be cached: the object of the same
// name that was reduced last. The store has it once client-go has worked off its queue. Until then
// it is in recent.
type history struct {
	// cached returns the object with that name in the store, or nil if there is none.
	cached func(objectName) *Object
	// stored returns the version of the last event that the store has; 0 if it is not known.
	stored func() uint64
	// filled returns a channel that is closed when the store has the first list.
	filled func() <-chan struct{}

	mu     sync.Mutex
	recent map[objectName]*Object
	sweep  int // the size of recent at which what the store has by now is removed
	// delivered is the version of the event that client-go received last; 0 if there may be others after it.
	// Events are stored in that order, so the store has all that is in recent once it has this one.
	delivered uint64
}

// objectName needs no memory of its own: the name shares that of the object.
type objectName struct {
	namespace unique.Handle[string]
	name      string
}

func (o *Object) objectName() objectName { return objectName{o.namespace, o.GetName()} }

// minSweep keeps a sweep from costing more than it frees.
const minSweep = 128

// minRecent keeps the store from being asked at each event.
const minRecent = 32

// listed is set in Object.first if the object was there before this cache.
const listed = 1 << 63

// follow sets when o first came and when its digests changed, and remembers o for its successor.
func (h *history) follow(o *Object) {
	if h == nil {
		return // nothing is cached
	}
	select {
	case <-h.filled():
	default:
		o.first = o.version | listed // an object of the first list has no predecessor
		return
	}
	name := o.objectName()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.recent) >= minRecent && h.delivered != 0 && h.delivered == h.stored() {
		h.forgetAll()
	}
	h.delivered = 0
	before := h.recent[name]
	if before == nil {
		before = h.cached(name)
	}
	switch {
	case before == nil || !before.sameUID(o):
		o.first = o.version | listed
	default:
		o.first, o.changed = before.first, before.changed
		switch replaced, came := o.compareDigests(before); {
		case came: // nobody has seen what changed before
			o.first, o.changed = o.first|listed, 0
		case replaced:
			o.changed = o.version
		}
	}
	if h.recent == nil {
		h.recent = map[objectName]*Object{}
	}
	h.recent[name] = o
	if len(h.recent) > h.sweep {
		h.forgetCached()
	}
}

func (o *Object) sameUID(other *Object) bool {
	return o.uid == other.uid && (o.uid != [16]byte{} || o.GetUID() == other.GetUID())
}

// created notes that o came by a watch and not by a list.
func (o *Object) created() {
	if o.first == o.version|listed {
		o.first = o.version
	}
}

// deliver notes that client-go has received an event, or a bookmark, that did not belong to a list.
func (h *history) deliver(o *Object) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.delivered = o.version
}

// deleted forgets an object that is gone. Its name may come back with another UID.
func (h *history) deleted(o *Object) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.recent, o.objectName())
}

// settle forgets what the store has by now.
func (h *history) settle() {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forgetCached()
}

func (h *history) forgetAll() {
	clear(h.recent)
	if h.sweep > minSweep {
		h.recent = nil // a map never shrinks
	}
	h.sweep = minSweep
}

// forgetCached forgets what the store has, or what it has in a later version. The caller holds mu.
func (h *history) forgetCached() {
	for name, o := range h.recent {
		if c := h.cached(name); c != nil && (c == o || c.version > o.version) {
			delete(h.recent, name)
		}
	}
	if len(h.recent) == 0 {
		h.forgetAll()
	}
	h.sweep = max(minSweep, 2*len(h.recent))
}

// compareDigests reports whether a digest of before is another one in o, and whether one has
// appeared or disappeared, which is no change. Only digests with a history count.
func (o *Object) compareDigests(before *Object) (replaced, came bool) {
	rest, restBefore := o.packed, before.packed
	for i := range o.plan.digests {
		var sum, was string
		sum, rest = next(rest)
		was, restBefore = next(restBefore)
		if !o.plan.digests[i].history {
			continue
		}
		came = came || (sum == "") != (was == "")
		replaced = replaced || sum != was
	}
	return replaced, came
}

// FirstVersion returns the resourceVersion with which this cache first saw the object; empty if
// that is not known.
func (o *Object) FirstVersion() string { return formatVersion(o.first &^ listed) }

// CreatedVersion returns FirstVersion if the object was created then; empty if it was there before.
func (o *Object) CreatedVersion() string {
	if o.first&listed != 0 {
		return ""
	}
	return formatVersion(o.first)
}

// ChangedVersion returns the resourceVersion with which a digest with a history was last seen to
// change; empty if none was. After a list that replaced a broken watch, the change itself may have
// been earlier.
func (o *Object) ChangedVersion() string { return formatVersion(o.changed) }

func formatVersion(v uint64) string {
	if v == 0 {
		return ""
	}
	return strconv.FormatUint(v, 10)
}
