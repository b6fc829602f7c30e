// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// If a function panics on an object, the resource is listed again after relistAfterPanic, then
// after twice that time, and so on up to relistAfterPanicMax. So each function gets another chance,
// and a bad object does not cause one list after the other.
const (
	relistAfterPanic    = time.Minute
	relistAfterPanicMax = time.Hour
	// eventHandler is the one function that is not called again for an unchanged object when the
	// resource is listed again.
	eventHandler = "event handler"
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

	mu      sync.Mutex
	failing map[panicking]struct{}
	delay   time.Duration // until the next list, 0 while nothing fails
}

type panicking struct {
	controller, function string
	object               cache.ObjectName
}

func newPanics(resource string, count func(controller string)) *panics {
	return &panics{resource: resource, count: count, failing: map[panicking]struct{}{}}
}

// contain records one call of a function with obj and reports whether it panicked. recovered is
// what recover returned. An object is logged once, until the function returns for it without a
// panic.
func (p *panics) contain(recovered any, controller, function string, obj metav1.Object) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if recovered == nil && len(p.failing) == 0 {
		return false
	}
	key := panicking{controller, function, cache.MetaObjectToName(obj)}
	if recovered == nil {
		p.forget(key)
		return false
	}
	p.count(controller)
	_, known := p.failing[key]
	if known || len(p.failing) == maxPanicking {
		return true
	}
	p.failing[key] = struct{}{}
	if p.delay == 0 && function != eventHandler {
		p.delay = relistAfterPanic
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
	for key := range p.failing {
		if key.object == name {
			p.forget(key)
		}
	}
}

func (p *panics) forget(key panicking) {
	delete(p.failing, key)
	if len(p.failing) == 0 {
		p.delay = 0
	}
}

// relistIn returns how long to wait until the resource is listed again, or 0 if it need not be.
func (p *panics) relistIn() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delay
}

// relisting doubles the wait and forgets objects that left the cache without a delete event.
func (p *panics) relisting(cached func(key string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = min(2*p.delay, relistAfterPanicMax)
	for key := range p.failing {
		if !cached(key.object.String()) {
			p.forget(key)
		}
	}
}

// problem returns an error that names one of the objects on which a function of the controller
// panics, or nil.
func (p *panics) problem(controller string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	var one panicking
	for key := range p.failing {
		if key.controller == controller {
			n++
			one = key
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%s panics on %d objects of %s, one of them %s", one.function, n, p.resource, one.object)
}
