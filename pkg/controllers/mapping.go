// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"fmt"
	"sync"

	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// mapper maps the events of one watch to keys. If the mapping panics or fails, the event is kept
// and mapped again with back-off. Later events of that object are merged with it. So no event is
// lost, and other objects do not wait.
type mapper[K comparable] struct {
	loop    *Loop[K]
	watch   Watch[K]
	queue   queue[K]
	retries *mappingRetries[K]
	logger  klog.Logger

	mu     sync.Mutex // held while the mapping is called
	failed map[cache.ObjectName]change
}

// mappingRetries is the queue of objects whose events must be mapped again, for all watches of one
// run.
type mappingRetries[K comparable] struct {
	workqueue.TypedDelayingInterface[failedMapping[K]]
	limiter workqueue.TypedRateLimiter[failedMapping[K]]
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

// handle maps an event, merged with earlier events of that object that could not be mapped.
func (m *mapper[K]) handle(c change) {
	// A notification may still be under way when the handler is removed.
	if m.queue.ShuttingDown() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.failed) > 0 {
		if earlier, ok := m.failed[c.object()]; ok {
			c = earlier.then(c)
		}
	}
	m.try(c)
}

func (m *mapper[K]) again(object cache.ObjectName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := m.failed[object]; ok {
		m.try(c)
	}
}

// try calls the mapping. The caller holds mu.
func (m *mapper[K]) try(c change) {
	var keys []K
	stack, err := Contain(func() (err error) {
		keys, err = m.watch.keys(c)
		return err
	})
	if err != nil {
		m.keep(c, stack, err)
		return
	}
	if len(m.failed) > 0 {
		m.forget(c.object())
	}
	for _, key := range keys {
		m.queue.Add(key)
	}
}

// keep stores an event that could not be mapped, and tries again later. It logs the first failure
// of an object. Later ones show in the metric, the status and the health check.
func (m *mapper[K]) keep(c change, stack []byte, err error) {
	object := c.object()
	_, known := m.failed[object]
	m.failed[object] = c
	if !known {
		m.logger.Error(err, "Event could not be mapped to keys, trying again with back-off",
			"object", object.String(), "stack", string(stack))
	}
	m.loop.mappingFailed(object, known, stack != nil, err)
	f := failedMapping[K]{m, object}
	m.retries.AddAfter(f, m.retries.limiter.When(f))
}

func (m *mapper[K]) forget(object cache.ObjectName) {
	if _, ok := m.failed[object]; !ok {
		return
	}
	delete(m.failed, object)
	m.retries.limiter.Forget(failedMapping[K]{m, object})
	m.loop.mu.Lock()
	defer m.loop.mu.Unlock()
	m.loop.unmapped--
}

// mappingFailed records a failure of the mapping. known says that it has failed for that object
// before.
func (l *Loop[K]) mappingFailed(object cache.ObjectName, known, panicked bool, err error) {
	if panicked {
		l.opts.Metrics.Panicked(l.opts.Name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !known {
		l.unmapped++
	}
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

// then returns c merged with a later change of the same object.
func (c change) then(later change) change {
	if c.old == nil && later.new == nil {
		return later // an addition and a deletion
	}
	return change{old: c.old, new: later.new, initial: c.initial}
}
