// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// If a function panics on an object, the resource is listed again after relistAfterPanic, then
// after twice that time, and so on up to relistAfterPanicMax. So each function gets another chance,
// and a bad object does not cause one list after the other.
const (
	relistAfterPanic    = time.Minute
	relistAfterPanicMax = time.Hour
	eventHandler        = "event handler"
	// maxPanicking limits how many objects of a resource are remembered, since anybody may create
	// them.
	maxPanicking = 1000
)

// panics contains the functions of controllers that are called with cached objects: a panic on one
// object ends neither the process nor the work of other controllers.
type panics struct {
	resource string
	// count is called for every panic.
	count func(controller string)
	clock clock.PassiveClock

	mu sync.Mutex
	// failing are functions that another list calls again, handlers are event handlers, which it does
	// not call again for an unchanged object.
	failing, handlers map[panicking]struct{}
	// delay is the time between two lists while a function fails, due is when the next one is due.
	delay time.Duration
	due   time.Time
}

type panicking struct {
	controller, function string
	object               cache.ObjectName
}

func newPanics(resource string, c clock.PassiveClock, count func(controller string)) *panics {
	return &panics{resource: resource, count: count, clock: c, failing: map[panicking]struct{}{}, handlers: map[panicking]struct{}{}}
}

// contain records one call of a function with obj and reports whether it panicked. recovered is
// what recover returned. An object is logged once, until the function returns for it without a
// panic.
func (p *panics) contain(recovered any, controller, function string, obj metav1.Object) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.failing
	if function == eventHandler {
		all = p.handlers
	}
	if recovered == nil && len(all) == 0 {
		return false
	}
	key := panicking{controller, function, cache.MetaObjectToName(obj)}
	if recovered == nil {
		p.forget(key)
		return false
	}
	p.count(controller)
	if _, known := all[key]; known || len(all) == maxPanicking {
		return true
	}
	all[key] = struct{}{}
	if p.delay == 0 && function != eventHandler {
		p.delay = relistAfterPanic
		p.due = p.clock.Now().Add(p.delay)
	}
	// Only the runtime's own errors are sure to contain nothing of the object, which may be a
	// Secret.
	err, ok := recovered.(runtime.Error)
	if !ok {
		err = nil
	}
	klog.Background().Error(err, "A function of a controller panicked", "controller", controller, "function", function,
		"resource", p.resource, "object", klog.KRef(key.object.Namespace, key.object.Name),
		"panic", fmt.Sprintf("%T", recovered), "stack", string(debug.Stack()))
	return true
}

// gone forgets a deleted object.
func (p *panics) gone(obj metav1.Object) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := cache.MetaObjectToName(obj)
	for _, all := range []map[panicking]struct{}{p.failing, p.handlers} {
		for key := range all {
			if key.object == name {
				p.forget(key)
			}
		}
	}
}

func (p *panics) forget(key panicking) {
	delete(p.failing, key)
	delete(p.handlers, key)
	if len(p.failing) == 0 {
		p.delay = 0
	}
}

// relistIn returns how long to wait until the resource is listed again, and whether it has to be.
func (p *panics) relistIn() (time.Duration, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(p.due.Sub(p.clock.Now()), 0), p.delay > 0
}

// relisting doubles the wait. What fails is in the cache by now, or has left it.
func (p *panics) relisting(cached func(key string) bool) {
	p.forgetUncached(p.failing, cached)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = min(2*p.delay, relistAfterPanicMax)
	p.due = p.clock.Now().Add(p.delay)
}

// forgetUncached forgets those of all whose object left the cache without a delete event.
func (p *panics) forgetUncached(all map[panicking]struct{}, cached func(key string) bool) {
	p.mu.Lock()
	keys := slices.Collect(maps.Keys(all))
	p.mu.Unlock()
	// Without the lock: client-go calls index functions, and with them contain, under that of the cache.
	keys = slices.DeleteFunc(keys, func(key panicking) bool { return cached(key.object.String()) })
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		p.forget(key)
	}
}

// problem returns an error that names one of the objects on which a function of the controller
// panics, or nil.
func (p *panics) problem(controller string, cached func(key string) bool) error {
	p.forgetUncached(p.handlers, cached)
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	var one panicking
	for _, all := range []map[panicking]struct{}{p.failing, p.handlers} {
		for key := range all {
			if key.controller == controller {
				n++
				one = key
			}
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%s panics on %d objects of %s, one of them %s", one.function, n, p.resource, one.object)
}
