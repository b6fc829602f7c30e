// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// RecoverPanic calls f, a function of a controller. If f panics, it returns the panic as an error, with
// the stack. It does the same if the Error method of f's error panics, such as for a nil pointer. The
// error returned is only text: no method of the controller's error is called later, outside of RecoverPanic.
func RecoverPanic(f func() error) (stack []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			stack, err = debug.Stack(), panicked(r)
		}
	}()
	if err := f(); err != nil {
		return nil, errors.New(err.Error())
	}
	return nil, nil
}

// Mistake is what [For], and a function of the host that cannot return an error, panics with. The host
// returns it as the error of the controller's entry.
type Mistake string

// Error implements error.
func (m Mistake) Error() string { return string(m) }

// RuntimeError makes a Mistake an error whose text is shown when a reconcile panics with it: the text names
// types and resources, and holds nothing of an object.
func (Mistake) RuntimeError() {}

// ShowPanics lets the error of a panic show any value. It is for the test kit, which sets it: no object there
// is secret.
var ShowPanics bool

// panicked returns an error for what recover returned. Only the runtime's own errors are sure to
// contain nothing of an object, which may be a Secret. Of other values the error says the type.
func panicked(recovered any) error {
	if ShowPanics {
		return fmt.Errorf("panic: %v", recovered)
	}
	if err, ok := recovered.(runtime.Error); ok {
		return fmt.Errorf("panic: %s", err.Error())
	}
	return fmt.Errorf("panic: a value of type %T", recovered)
}

// maxBad limits how many objects of a resource are remembered as misfits, and how many panics, since
// anybody may create such objects.
const maxBad = 1000

// badObjects contains panics of the controllers' functions that are called with cached objects. It remembers
// the objects on which they panic, and the objects that do not fit their Go type. Neither ends the process
// or the work of other controllers.
type badObjects struct {
	resource string
	count    func(controller string) // called for every panic

	mu    sync.Mutex
	bad   map[badObject]struct{}
	unfit map[cache.ObjectName]struct{} // a problem of all controllers
}

// badObject is an object, and the controller and function that panicked on it last.
type badObject struct {
	controller, function string
	object               cache.ObjectName
}

func newBadObjects(resource string, count func(controller string)) *badObjects {
	return &badObjects{resource: resource, count: count, bad: map[badObject]struct{}{}, unfit: map[cache.ObjectName]struct{}{}}
}

// contain calls a function of a controller with m and reports whether it panicked. A panic is logged once
// for an object, until the function returns for it without a panic.
func (p *badObjects) contain(controller, function string, m metav1.Object, call func()) bool {
	stack, err := RecoverPanic(func() error { call(); return nil })
	p.mu.Lock()
	defer p.mu.Unlock()
	if stack == nil && len(p.bad) == 0 {
		return false
	}
	key := badObject{controller, function, cache.MetaObjectToName(m)}
	if stack == nil {
		delete(p.bad, key)
		return false
	}
	p.count(controller)
	if remember(p.bad, key) {
		klog.Background().Error(err, "A function of a controller panicked", "controller", controller, "function", function,
			"resource", p.resource, "object", klog.KRef(key.object.Namespace, key.object.Name), "stack", string(stack))
	}
	return true
}

// misfit remembers an object that does not fit its Go type.
func (p *badObjects) misfit(m *misfit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if remember(p.unfit, cache.MetaObjectToName(m)) {
		klog.Background().Error(m.err, "An object does not fit its Go type, and is left out", "resource", p.resource, "object", klog.KObj(m))
	}
}

// remember adds key and returns true, unless it is known or there are too many.
func remember[K comparable](known map[K]struct{}, key K) bool {
	if _, is := known[key]; is || len(known) >= maxBad {
		return false
	}
	known[key] = struct{}{}
	return true
}

// forgetMisfit forgets that an object did not fit its Go type.
func (p *badObjects) forgetMisfit(object cache.ObjectName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.unfit, object)
}

// forget forgets a panic, since the function will not be called for the object again.
func (p *badObjects) forget(key badObject) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.bad, key)
}

// forgetGone forgets objects that are gone.
func (p *badObjects) forgetGone(is func(cache.ObjectName) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.bad, func(key badObject, _ struct{}) bool { return is(key.object) })
	maps.DeleteFunc(p.unfit, func(object cache.ObjectName, _ struct{}) bool { return is(object) })
}

// misfits returns how many objects do not fit their Go type.
func (p *badObjects) misfits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.unfit)
}

// problem returns an error that names an object that does not fit its Go type, or else one on which a
// function of the controller panics; nil if there is none.
func (p *badObjects) problem(controller string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for object := range p.unfit {
		return fmt.Errorf("%d objects of %s do not fit their Go type, one of them %s", len(p.unfit), p.resource, object)
	}
	n := 0
	var one badObject
	for key := range p.bad {
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
