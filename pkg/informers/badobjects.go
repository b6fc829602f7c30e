// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

const (
	// maxBad limits how many calls that panic are remembered of a resource: anybody may create such objects.
	maxBad = 1000
	// misfitsPerSecond and misfitsAtOnce limit the log's lines about misfits of a resource, and maxMisfitText
	// the letters of an error in them, which may quote a field: anybody may change such an object all the time.
	misfitsPerSecond, misfitsAtOnce, maxMisfitText = 1, 100, 300
)

// stuckCall is how long a controller's function may take for one object. Meanwhile other events wait: those
// of the handler or, for a function that is no handler, all events of the resource.
const stuckCall = time.Minute

// badObjects recovers panics of the controllers' functions that are called with the objects of one resource.
// It remembers the objects on which a function panics or hangs, and the misfits. None of them ends the
// process. A panic or a misfit does not stop other controllers; a call that hangs may.
type badObjects struct {
	resource    string
	logger      klog.Logger
	misfitLines *rate.Limiter
	countPanic  func(controller string) // called for every panic

	mu       sync.Mutex
	calls    uint64                 // so far
	running  map[uint64]runningCall // by number of the call
	panicked map[badCall]struct{}
	misfits  map[cache.ObjectName]struct{} // no problem of a controller: a tenant can make one, and leave it
}

// eventPrefix begins the names of functions that are called with events.
const eventPrefix = "event "

// badCall is a function of a controller and an object, on which the last call of the function panicked.
type badCall struct {
	controller, function string
	object               cache.ObjectName
}

// runningCall is a call that has not returned.
type runningCall struct {
	badCall
	since time.Time
}

func newBadObjects(resource string, logger klog.Logger, countPanic func(controller string)) *badObjects {
	return &badObjects{
		resource: resource, logger: logger, misfitLines: rate.NewLimiter(misfitsPerSecond, misfitsAtOnce), countPanic: countPanic,
		running: map[uint64]runningCall{}, panicked: map[badCall]struct{}{}, misfits: map[cache.ObjectName]struct{}{},
	}
}

// contain calls a function of a controller for m and reports whether it panicked. It logs a panic unless
// the last call for the same object panicked too.
func (b *badObjects) contain(controller, function string, m metav1.Object, call func()) bool {
	return b.containHandled(controller, function, m, func() bool { call(); return true })
}

// containHandled is contain of a function that says whether it has handled m. If not, an earlier panic for m
// still counts.
func (b *badObjects) containHandled(controller, function string, m metav1.Object, call func() (handled bool)) bool {
	key := badCall{controller, function, cache.MetaObjectToName(m)}
	b.mu.Lock()
	b.calls++
	number := b.calls
	b.running[number] = runningCall{key, time.Now()}
	b.mu.Unlock()
	handled := false
	stack, err := panics.Recover(func() error { handled = call(); return nil })
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.running, number)
	if handled {
		delete(b.panicked, key)
	}
	if stack == nil {
		return false
	}
	b.countPanic(controller)
	if _, known := b.panicked[key]; !known && len(b.panicked) < maxBad {
		b.panicked[key] = struct{}{}
		b.logger.Error(err, "A function of a controller panicked", "controller", controller, "function", function,
			"resource", b.resource, "object", klog.KRef(key.object.Namespace, key.object.Name), "stack", string(stack))
	}
	return true
}

// addMisfit remembers and logs an object that does not fit its Go type.
func (b *badObjects) addMisfit(m *misfit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, known := b.misfits[cache.MetaObjectToName(m)]
	b.misfits[cache.MetaObjectToName(m)] = struct{}{} // without a limit: to a loop, a forgotten one would seem to be gone
	if !known && b.misfitLines.Allow() {
		b.logger.Error(fmt.Errorf("%.*s", maxMisfitText, m.err), "An object does not fit its Go type, and is left out",
			"resource", b.resource, "object", klog.KObj(m))
	}
}

// forgetMisfit forgets that an object did not fit its Go type, since it does now, or is gone.
func (b *badObjects) forgetMisfit(object cache.ObjectName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.misfits, object)
}

// forgetCall forgets a panic, since the function will not be called with the object again.
func (b *badObjects) forgetCall(key badCall) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.panicked, key)
}

// forgetFunction forgets all panics of a function, since it will not be called again.
func (b *badObjects) forgetFunction(controller, function string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.panicked, func(key badCall, _ struct{}) bool {
		return key.controller == controller && key.function == function
	})
}

// forgetPanics forgets the panics on an object, since it is gone, or another one has its name now.
func (b *badObjects) forgetPanics(object cache.ObjectName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.panicked, func(key badCall, _ struct{}) bool { return key.object == object })
}

// forgetGone forgets the objects that are gone.
func (b *badObjects) forgetGone(isGone func(cache.ObjectName) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.panicked, func(key badCall, _ struct{}) bool { return isGone(key.object) })
	maps.DeleteFunc(b.misfits, func(object cache.ObjectName, _ struct{}) bool { return isGone(object) })
}

func (b *badObjects) isMisfit(object cache.ObjectName) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, found := b.misfits[object]
	return found
}

// countMisfits returns how many objects in the namespaces do not fit their Go type.
func (b *badObjects) countMisfits(in func(namespace string) bool) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for object := range b.misfits {
		if in(object.Namespace) {
			n++
		}
	}
	return n
}

// problem returns an error that names an object on which a function of the controller hangs, or a function of
// any controller for which all wait; or else one on which a function of the controller panics; nil if there
// is none.
func (b *badObjects) problem(controller string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.running {
		allWait := !strings.HasPrefix(c.function, eventPrefix) // a handler has a queue of its own
		if age := time.Since(c.since); age >= stuckCall && (allWait || c.controller == controller) {
			return fmt.Errorf("%s of %s has not returned for %s of %s for %s",
				c.function, c.controller, c.object, b.resource, age.Round(time.Second))
		}
	}
	n := 0
	var example badCall
	for key := range b.panicked {
		if key.controller == controller {
			n++
			if example.function == "" || key.object.String() < example.object.String() { // always the same one
				example = key
			}
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%s panics on %d objects of %s, one of them %s", example.function, n, b.resource, example.object)
}
