// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// informer keeps the objects of one plan. It has one feed for all namespaces, or one for each of
// --namespaces, each of which changes nothing but the objects in its namespace.
type informer struct {
	plan     *plan
	bad      *badObjects
	name     string
	feeds    []*feed
	objects  *store
	detector cache.MutationDetector // of client-go, see KUBE_CACHE_MUTATION_DETECTOR

	mu        sync.Mutex // held until a change is queued for the listeners, so that they get changes in order
	listeners []*listener
	lists     firstLists
	handlers  atomic.Int64       // how many listeners there have been
	stopped   atomic.Bool        // listeners are not called any more
	cancel    context.CancelFunc // ends the feeds; nil until they start
	duringRun bool               // followed after Start, in the process's own cluster: EndRun ends it
}

func newInformer(p *plan, logger klog.Logger, countPanic func(controller string)) *informer {
	name := resourceName(p.resource)
	return &informer{
		plan: p, name: name, objects: newStore(),
		bad: newBadObjects(name, logger, countPanic), detector: cache.NewCacheMutationDetector(name),
		lists: firstLists{synced: make(chan struct{})},
	}
}

func (i *informer) hasSynced() bool { return isClosed(i.lists.synced) }

// put stores an object that f has read. created says that a watch saw it come.
func (i *informer) put(f *feed, obj any, created bool) error {
	reduced, err := i.reduce(obj)
	if err != nil {
		return err
	}
	o, ok := reduced.(*Object)
	switch {
	case !ok:
		i.leaveOut(f, reduced.(*misfit))
		return nil
	case o == unwanted:
		return i.remove(f, obj)
	}
	if o.extra != nil {
		i.detector.AddObject(o.extra.changeable())
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	key := o.key()
	before := i.objects.get(key)
	// With a selector, an ADDED event may be a change of an existing object that the selector now chooses.
	o.inherit(before, created && !i.plan.selects())
	i.objects.put(key, o)
	i.bad.forgetMisfit(o.objectName()) // not earlier: LeftOut must not miss the object in between
	if before == nil {
		f.state.addObjects(1)
	}
	if before == nil || !o.isState(before) { // a relist shows each object again
		i.notify(event{old: before, new: o, initial: !i.hasSynced()})
	}
	return nil
}

// leaveOut remembers a misfit. The earlier state of the object stays in the cache, that of a predecessor with
// the same name does not.
func (i *informer) leaveOut(f *feed, m *misfit) {
	i.bad.addMisfit(m) // first, so that LeftOut is true when the predecessor's event comes
	key := cache.MetaObjectToName(m).String()
	if before := i.objects.get(key); before != nil && before.GetUID() != m.UID {
		i.removeKey(f, key)
		i.bad.forgetPanics(before.objectName())
	}
}

// LeftOut reports whether an object exists in a state that does not fit its Go type. The cache leaves it out,
// or has an earlier state of it.
func (i *informer) LeftOut(name cache.ObjectName) bool { return i.bad.isMisfit(name) }

// remove removes an object that f has read as deleted, or that Filter no longer accepts.
func (i *informer) remove(f *feed, obj any) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	name := cache.MetaObjectToName(m)
	i.bad.forgetMisfit(name) // first, since a loop blocks its key until then
	i.removeKey(f, name.String())
	// removeKey has just called the index functions with the object again, which may have panicked again.
	i.bad.forgetPanics(name)
	return nil
}

func (i *informer) removeKey(f *feed, key string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	before := i.objects.get(key)
	if before == nil {
		return
	}
	i.objects.put(key, nil)
	f.state.addObjects(-1)
	i.notify(event{old: before})
}

// replace stores the objects of a list, and removes all others in the namespace of f.
func (i *informer) replace(f *feed, list []any) error {
	listed := make(map[cache.ObjectName]struct{}, len(list))
	for _, obj := range list {
		if obj == any(unwanted) {
			continue
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return err
		}
		listed[cache.MetaObjectToName(m)] = struct{}{}
		if err := i.put(f, obj, false); err != nil {
			return err
		}
	}
	isGone := func(name cache.ObjectName) bool {
		_, found := listed[name]
		return !found && f.covers(name.Namespace)
	}
	for _, o := range i.objects.list() {
		if isGone(o.objectName()) {
			i.removeKey(f, o.key())
		}
	}
	i.bad.forgetGone(isGone)
	return nil
}

// event is a change of an object: old is nil for a new object, new for a deleted one.
type event struct {
	old, new *Object
	initial  bool // the informer had not synced, or the listener was added later and the object was there
	replayed bool // no change: replay of AddMapping
}

// object returns the newest state that the event has.
func (e event) object() *Object { return cmp.Or(e.new, e.old) }

// listener calls a function of a controller with each event, one at a time. A slow function delays no other.
type listener struct {
	informer   *informer
	controller string
	// function has a number, so that the success of one handler does not hide the panic of another.
	function string
	changed  func(event) (handled bool)
	removed  atomic.Bool

	mu      sync.Mutex
	events  []event // which wait
	running bool
}

// notify queues an event for all listeners. The caller holds mu.
func (i *informer) notify(e event) {
	for _, l := range i.listeners {
		l.add(e)
	}
}

// listen adds a listener and, with showCached, first queues an addition for each cached object. changed
// returns false for an event that it leaves out: then an earlier panic for the object still counts.
func (i *informer) listen(controller, kind string, showCached bool, changed func(event) (handled bool)) *listener {
	function := fmt.Sprintf("%s%s %d", eventPrefix, kind, i.handlers.Add(1))
	l := &listener{informer: i, controller: controller, function: function, changed: changed}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.listeners = append(i.listeners, l)
	if showCached {
		for _, o := range i.objects.list() {
			l.add(event{new: o, initial: true})
		}
	}
	return l
}

// remove removes the listener; a call that is in progress goes on. It does not wait for the informer's mu: an
// index function that hangs must not hang the end of a loop.
func (l *listener) remove() {
	i := l.informer
	l.removed.Store(true)
	i.bad.forgetFunction(l.controller, l.function)
	go func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.listeners = slices.DeleteFunc(i.listeners, func(other *listener) bool { return other == l })
	}()
}

// call calls the function with an event.
func (l *listener) call(e event) {
	i := l.informer
	if l.removed.Load() || i.stopped.Load() {
		return
	}
	panicked := i.bad.containHandled(l.controller, l.function, e.object(), func() bool { return l.changed(e) })
	if panicked && (l.removed.Load() || i.objects.get(e.object().key()) == nil) {
		i.bad.forgetCall(badCall{l.controller, l.function, e.object().objectName()})
	}
}

func (l *listener) add(e event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
	if !l.running {
		l.running = true
		go l.run()
	}
}

// run returns when no event waits.
func (l *listener) run() {
	for {
		e, found := l.next()
		if !found {
			return
		}
		l.call(e)
	}
}

// next takes the first event that waits.
func (l *listener) next() (e event, found bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) == 0 {
		l.events, l.running = nil, false
		return event{}, false
	}
	e, l.events[0] = l.events[0], event{}
	l.events = l.events[1:]
	return e, true
}
