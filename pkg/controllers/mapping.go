// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

// The way of an event to a reconcile:
//
//	informer: object stored      then its listener is called, in the order of an object's events
//	mapper: gate open?           no: dropped, since Run shows what is in the cache when it begins
//	Watch: only, then keys       the author's functions, under the mapper's lock
//	queue: add                   in the first lane, in the turn of the key's tenant
//	worker: take, reconcile
//
// A replay takes the same way from the mapper on, with the state that the cache has then, to the second lane.

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync"

	"k8s.io/client-go/tools/cache"
)

// mapper maps the events of one watch to keys. Its handler is registered by NewLoop, and a gate drops the
// events that come while the loop does not run, so that nothing piles up on a standby.
type mapper[K comparable] struct {
	loop    *Loop[K]
	watch   Watch[K]
	replay  func(cache.ObjectName) // maps an object in the cache
	remove  func()                 // ends the mapping of events, once
	removed chan struct{}          // closed by remove

	mu     sync.Mutex // held while the mapping is called
	opened bool       // the gate
}

func newMapper[K comparable](loop *Loop[K], watch Watch[K]) *mapper[K] {
	m := &mapper[K]{loop: loop, watch: watch, removed: make(chan struct{})}
	var remove func()
	m.replay, remove = watch.register(m)
	m.remove = sync.OnceFunc(func() {
		close(m.removed)
		remove()
	})
	return m
}

// open opens the gate: events get to the queue.
func (m *mapper[K]) open() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opened = true
}

// close closes the gate. It waits for a mapping that is under way.
func (m *mapper[K]) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opened = false
}

// ifOpen calls mapping if the gate is open.
func (m *mapper[K]) ifOpen(mapping func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.opened {
		mapping()
	}
}

// cached is an object in the cache of a watch, without the object itself, which may be replaced long before
// its turn.
type cached[K comparable] struct {
	mapper  *mapper[K]
	name    cache.ObjectName
	version uint64
	turn    int
}

// listCached returns the objects in the caches of watches, for replay. The objects that changed last come
// first: what changed while nobody led has work to do, and most others have none. Namespaces take turns, as
// in the queue.
func (l *Loop[K]) listCached(mappers ...*mapper[K]) (all []cached[K]) {
	for _, m := range mappers {
		list := m.watch.list()
		all = slices.Grow(all, len(list))
		for _, obj := range list {
			o := cached[K]{mapper: m, name: cache.MetaObjectToName(obj)}
			// Versions are decimal (KEP-5504). An object whose version is no number comes last.
			o.version, _ = strconv.ParseUint(obj.GetResourceVersion(), 10, 64)
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b cached[K]) int { return cmp.Compare(b.version, a.version) })
	turns := map[string]int{}
	for i := range all {
		all[i].turn = turns[all[i].name.Namespace]
		turns[all[i].name.Namespace]++
	}
	slices.SortStableFunc(all, func(a, b cached[K]) int { return cmp.Compare(a.turn, b.turn) })
	l.toReplay.Add(int64(len(all)))
	return all
}

// replay maps objects that listCached has returned, as fast as the queue takes them, and returns early if ctx
// ends.
func (l *Loop[K]) replay(ctx context.Context, all []cached[K]) {
	for n, o := range all {
		if !l.queue.waitForRoom(ctx) {
			l.toReplay.Add(int64(n - len(all)))
			return
		}
		select {
		case <-o.mapper.removed:
		default:
			o.mapper.replay(o.name)
		}
		l.toReplay.Add(-1)
	}
}
