// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
)

// replay maps the objects that are in the caches when a run begins. It adds keys only as fast as
// workers take them, so that a new leader with 200,000 objects does not hold as many keys.
type replay[K comparable] struct {
	queue *queue[K]
	// enough is how many keys in the lane shown keep all workers busy.
	enough int
	takes  atomic.Int64  // keys that workers have taken from the lane shown
	taken  chan struct{} // has an element if a worker has taken a key
	left   atomic.Int64  // objects that are not mapped yet
}

func newReplay[K comparable](q *queue[K], workers int) *replay[K] {
	return &replay[K]{queue: q, enough: workers, taken: make(chan struct{}, 1)}
}

// took tells that a worker has taken a key.
func (r *replay[K]) took(from lane) {
	if from == shown {
		r.takes.Add(1)
	}
	select {
	case r.taken <- struct{}{}:
	default:
	}
}

// run returns when it has mapped the objects or ctx has ended. After an object whose mapping has
// returned keys, it waits until the lane shown is short or, if a relist or EnqueueFor has filled that
// lane, until as many keys have been taken from it: those of other tenants do not wait for all of
// these.
func (r *replay[K]) run(ctx context.Context, objects []cachedObject[K]) {
	defer r.left.Store(0)
	next := int64(0) // the number of takes after which a full lane is no reason to wait
	for _, o := range objects {
		for r.queue.keys.lanes.waiting(shown) >= r.enough && r.takes.Load() < next && ctx.Err() == nil {
			select {
			case <-r.taken:
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return
		}
		keys := o.mapper.replay(o.obj)
		next = r.takes.Load() + int64(keys)
		r.left.Add(-1)
	}
}

type cachedObject[K comparable] struct {
	mapper    *mapper[K]
	obj       any
	namespace string
	version   uint64
	turn      int // of the namespace
}

// cached returns the objects to replay. Those that changed last come first, since what changed while
// nobody led has work to do, and most others have none. The namespaces take turns, so that one who has
// changed many objects keeps nobody else's waiting.
func cached[K comparable](mappers []*mapper[K]) (objects []cachedObject[K]) {
	for _, m := range mappers {
		if !m.watch.replayed {
			continue
		}
		list := m.watch.informer.GetIndexer().List()
		objects = slices.Grow(objects, len(list))
		for _, obj := range list {
			o := cachedObject[K]{mapper: m, obj: obj}
			// Versions are decimal (KEP-5504). One that is not would only come last.
			if accessor, err := meta.Accessor(obj); err == nil {
				o.namespace = accessor.GetNamespace()
				o.version, _ = strconv.ParseUint(accessor.GetResourceVersion(), 10, 64)
			}
			objects = append(objects, o)
		}
	}
	slices.SortFunc(objects, func(a, b cachedObject[K]) int { return cmp.Compare(b.version, a.version) })
	turns := map[string]int{}
	for i := range objects {
		o := &objects[i]
		o.turn = turns[o.namespace]
		turns[o.namespace]++
	}
	slices.SortStableFunc(objects, func(a, b cachedObject[K]) int { return cmp.Compare(a.turn, b.turn) })
	return objects
}
