// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"fmt"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

const (
	// maxUnmapped limits how many objects of a loop are kept to be mapped again, since anybody may
	// create them. What fails beyond it is counted, and waits for the object's next event.
	maxUnmapped = 1000
	// maxDeletionTries is how often the deletion of an object is mapped before it is given up. No
	// later event of the object would end that.
	maxDeletionTries = 5
)

// mapper maps the events of one watch to keys. Its handler is registered from the beginning, and a
// gate drops what comes while the loop does not run, so that nothing piles up on a standby. If the
// mapping panics or fails, the event is kept and mapped again with back-off. Later events of that
// object are merged with it. So no event of a run is lost, within the limits above, and other objects
// do not wait.
type mapper[K comparable] struct {
	loop  *Loop[K]
	watch Watch[K]

	mu sync.Mutex // held while the mapping is called
	// What follows is that of the run. While there is none, the gate is closed: queue is nil.
	queue   *queue[K]
	retries *mappingRetries[K]
	logger  klog.Logger
	failed  map[cache.ObjectName]change
}

// mappingRetries is the queue of objects whose events must be mapped again, for all watches of one
// run.
type mappingRetries[K comparable] struct {
	workqueue.TypedDelayingInterface[failedMapping[K]]
	limiter workqueue.TypedRateLimiter[failedMapping[K]]
	// unmapped counts the objects that all mappers of the run keep.
	unmapped atomic.Int64
}

type failedMapping[K comparable] struct {
	mapper *mapper[K]
	object cache.ObjectName
}

func (l *Loop[K]) newMappingRetries(logger *klog.Logger) *mappingRetries[K] {
	return &mappingRetries[K]{
		// The queue has no name, so that it has no metrics: those of the controller's queue are
		// about keys.
		TypedDelayingInterface: workqueue.NewTypedDelayingQueueWithConfig(
			workqueue.TypedDelayingQueueConfig[failedMapping[K]]{Logger: logger, Clock: l.opts.Clock}),
		limiter: workqueue.NewTypedItemExponentialFailureRateLimiter[failedMapping[K]](minBackoff, maxBackoff),
	}
}

// run maps failed events again until ShutDown.
func (r *mappingRetries[K]) run() {
	for {
		f, shutdown := r.Get()
		if shutdown {
			return
		}
		f.mapper.again(f.object)
		r.Done(f)
	}
}

// open lets events through to the queue.
func (m *mapper[K]) open(q *queue[K], retries *mappingRetries[K], logger klog.Logger) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queue, m.retries, m.logger, m.failed = q, retries, logger, map[cache.ObjectName]change{}
}

// close waits for a mapping that is under way.
func (m *mapper[K]) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queue, m.retries, m.failed = nil, nil, nil
}

// replay maps an object of the cache, as it is there by now: an event that the gate dropped is in it
// already, and what has been mapped since then is not older. It returns the number of keys.
func (m *mapper[K]) replay(obj any) (keys int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.queue == nil {
		return 0
	}
	now, exists, err := m.watch.informer.GetIndexer().GetByKey(change{new: obj}.object().String())
	if err != nil || !exists {
		return 0 // its deletion is an event
	}
	return m.join(change{new: now, initial: true}, shown)
}

// handle maps an event if the gate is open.
func (m *mapper[K]) handle(c change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.queue == nil || m.queue.ShuttingDown() {
		return
	}
	m.join(c, c.lane())
}

// join maps a change, merged with earlier ones of that object that could not be mapped, and returns
// the number of keys, which it adds to the lane. The caller holds mu.
func (m *mapper[K]) join(c change, in lane) (keys int) {
	if len(m.failed) > 0 {
		object := c.object()
		if earlier, ok := m.failed[object]; ok {
			c = earlier.then(c)
		}
		if c.old == nil && c.new == nil {
			m.forget(object)
			return 0
		}
	}
	return m.try(c, in)
}

func (m *mapper[K]) again(object cache.ObjectName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := m.failed[object]; ok {
		m.try(c, changed)
	}
}

// try calls the mapping, adds its keys to the lane and returns their number. The caller holds mu.
func (m *mapper[K]) try(c change, in lane) int {
	var keys []K
	stack, err := Contain(func() (err error) {
		keys, err = m.watch.keys(c)
		return err
	})
	if err != nil {
		m.keep(c, stack, err)
		return 0
	}
	if len(m.failed) > 0 {
		m.forget(c.object())
	}
	for _, key := range keys {
		m.queue.keys.add(key, in, tenantOf(key))
	}
	return len(keys)
}

// keep stores an event that could not be mapped, and tries again later. It logs the first failure
// of an object. Later ones show in the metric, the status and the health check.
func (m *mapper[K]) keep(c change, stack []byte, err error) {
	object := c.object()
	m.loop.mappingFailed(object, stack != nil, err)
	if c.new == nil {
		if c.deletionTries++; c.deletionTries == maxDeletionTries {
			m.forget(object)
			return
		}
	}
	if _, known := m.failed[object]; !known {
		if m.retries.unmapped.Add(1) > maxUnmapped {
			m.retries.unmapped.Add(-1)
			return
		}
		m.logger.Error(err, "Event could not be mapped to keys, trying again with back-off",
			"object", object.String(), "stack", string(stack))
	}
	m.failed[object] = c
	f := failedMapping[K]{m, object}
	m.retries.AddAfter(f, m.retries.limiter.When(f))
}

func (m *mapper[K]) forget(object cache.ObjectName) {
	if _, ok := m.failed[object]; !ok {
		return
	}
	delete(m.failed, object)
	m.retries.limiter.Forget(failedMapping[K]{m, object})
	m.retries.unmapped.Add(-1)
}

// mappingFailed records a failure of the mapping.
func (l *Loop[K]) mappingFailed(object cache.ObjectName, panicked bool, err error) {
	if panicked {
		l.opts.Metrics.Panicked(l.opts.Name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if panicked {
		l.counts.panics++
	} else {
		l.counts.errors++
	}
	l.lastErr = &LastError{Key: object.String(), Text: "event mapping: " + err.Error(), Time: l.opts.Clock.Now()}
}

// object returns the name of the changed object. All that have no name count as one object.
func (c change) object() cache.ObjectName {
	obj := c.new
	if obj == nil {
		obj = c.old
	}
	name, err := cache.DeletionHandlingObjectToName(obj)
	if err != nil {
		return cache.ObjectName{Name: fmt.Sprintf("<%T>", obj)}
	}
	return name
}

// lane returns shown for an update that changed nothing. client-go shows every object so at a resync,
// and when it has listed a resource again.
func (c change) lane() lane {
	before, errBefore := meta.Accessor(c.old)
	after, errAfter := meta.Accessor(c.new)
	if errBefore != nil || errAfter != nil || after.GetResourceVersion() == "" ||
		before.GetResourceVersion() != after.GetResourceVersion() {
		return changed
	}
	return shown
}

// then returns c merged with a later change of the same object. The result is empty if the object
// came and went: then nothing has been done for it that its deletion must undo. That may have been
// done for an initial object, by an earlier run or leader.
func (c change) then(later change) change {
	if c.old == nil && later.new == nil && c.initial {
		return later
	}
	return change{old: c.old, new: later.new, initial: c.initial}
}
