// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

const (
	// A watch that was asked for at run time is tried again after followRetry, after twice that, and so on
	// up to followRetryMax; not before forbiddenRetry if it is forbidden. There may be hundreds, most
	// of them of no interest to anybody.
	followRetry    = time.Second
	followRetryMax = 10 * time.Minute
	forbiddenRetry = time.Minute
	// listPatience is how long a list that does not end keeps others waiting.
	listPatience = 30 * time.Second
)

// Following is a resource that a controller has asked for at run time.
type Following struct {
	stop   func()
	status func() ResourceStatus
}

// Stop gives the resource back. No watch and no goroutine is left when it returns, and its handler is not
// called any more.
func (w *Following) Stop() { w.stop() }

// Status returns what is known of the resource and of the requests for it.
func (w *Following) Status() ResourceStatus { return w.status() }

// Follow shows handler the objects of a resource for which need.When returns true, until Stop or until
// ctx ends; call Stop in any case. If the resource is one that controllers share, so that the needs of
// this controller must have one that is Shared, its informer is used. Otherwise Follow watches the
// metadata of the resource, and keeps nothing of objects for which When returns false. The need must be
// of metadata. When is called with what the cache holds too, so it may only look at the annotations
// and fields of the need. lists limits the lists that are taken at once: each holds a place in it.
//
// Two controllers that follow the same resource have a watch each.
func (f *Factory) Follow(ctx context.Context, need Need, lists chan struct{}, handler cache.ResourceEventHandler) (*Following, error) {
	if need.Form != Reduced || need.Digest != nil || need.When == nil {
		return nil, fmt.Errorf("%s: to follow %s takes a need of metadata with When", need.For, resourceName(need.Resource))
	}
	if informer, ok := f.Informer(need.For, need.Resource); ok {
		return f.attach(informer, need, handler)
	}
	plans, err := newPlans([]Need{need})
	if err != nil {
		return nil, err
	}
	plans[0].selective = true
	scopes, err := newScopes(plans[0], f.clients, f.namespaces)
	if err != nil {
		return nil, err
	}
	return f.follow(ctx, plans[0], scopes, lists, handler)
}

// attach uses the informer that other controllers need.
func (f *Factory) attach(informer cache.SharedIndexInformer, need Need, handler cache.ResourceEventHandler) (*Following, error) {
	gate := &gatedHandler{ResourceEventHandler: handler}
	registration, err := informer.AddEventHandler(cache.FilteringResourceEventHandler{
		FilterFunc: func(obj any) bool {
			m, err := meta.Accessor(obj)
			return err != nil || need.When(m) // a tombstone: handler knows whether it had the object
		},
		Handler: gate,
	})
	if err != nil {
		return nil, fmt.Errorf("%s: follow %s: %w", need.For, resourceName(need.Resource), err)
	}
	r := f.resource(need.Resource)
	return &Following{
		stop: func() {
			gate.close()
			_ = informer.RemoveEventHandler(registration) // it is one of this informer
		},
		status: func() ResourceStatus { return r.status(false) },
	}, nil
}

// gatedHandler drops events after close, which client-go goes on to deliver for a while.
type gatedHandler struct {
	cache.ResourceEventHandler
	mu     sync.Mutex
	closed bool
}

func (g *gatedHandler) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

func (g *gatedHandler) pass(call func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		call()
	}
}

func (g *gatedHandler) OnAdd(obj any, initial bool) {
	g.pass(func() { g.ResourceEventHandler.OnAdd(obj, initial) })
}

func (g *gatedHandler) OnUpdate(old, obj any) {
	g.pass(func() { g.ResourceEventHandler.OnUpdate(old, obj) })
}

func (g *gatedHandler) OnDelete(obj any) { g.pass(func() { g.ResourceEventHandler.OnDelete(obj) }) }

// follow starts a watch of its own.
func (f *Factory) follow(ctx context.Context, p *plan, scopes []*scope, lists chan struct{}, handler cache.ResourceEventHandler) (*Following, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return nil, errors.New("the informers have been shut down")
	}
	name := resourceName(p.resource)
	w := &ownWatch{plan: p, state: newState(name, f.clock), clock: f.clock, lists: lists}
	problems := newPanics(name, f.clock, f.panicked)
	w.store = selected{
		objects: map[cache.ObjectName]*Object{}, listed: w.listed,
		handler: &controllerInformer{resource: &resource{panics: problems}, controller: p.needs[0].For}, to: handler,
	}
	w.lw = &reducingListWatch{
		reducer: reducer{plan: p, panics: problems}, scopes: scopes, state: w.state, clock: f.clock, wg: &w.wg, inCache: w.store.has,
	}
	w.reflector = cache.NewReflectorWithOptions(w.lw, nil, &w.store, cache.ReflectorOptions{Name: name, TypeDescription: name})
	ctx, cancel := context.WithCancel(ctx)
	stop := sync.OnceFunc(func() {
		cancel()
		w.wg.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.own = slices.DeleteFunc(f.own, func(other *ownWatch) bool { return other == w })
	})
	w.cancel = cancel
	f.own = append(f.own, w)
	w.wg.Go(func() { pprof.Do(ctx, pprof.Labels("informer", name), w.run) })
	return &Following{stop: stop, status: w.status}, nil
}

// ownWatch is the watch of a resource that only one controller follows.
type ownWatch struct {
	plan      *plan
	state     *state
	clock     clock.WithDelayedExecution
	lw        *reducingListWatch
	store     selected
	reflector *cache.Reflector
	cancel    context.CancelFunc
	wg        sync.WaitGroup

	lists   chan struct{}
	listing atomic.Bool // has a place in lists
}

// run lists and watches until ctx ends.
func (w *ownWatch) run(ctx context.Context) {
	for delay := followRetry; ; {
		select {
		case w.lists <- struct{}{}:
		case <-ctx.Done():
			return
		}
		w.listing.Store(true)
		patience := w.clock.AfterFunc(listPatience, w.listed)
		began := w.clock.Now()
		err := w.reflector.ListAndWatchWithContext(ctx)
		patience.Stop()
		w.listed()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			w.state.watchError(ctx, w.reflector, err)
		}
		switch {
		case err == nil, w.clock.Since(began) > listPatience:
			delay = followRetry
		case apierrors.IsForbidden(err):
			delay = max(delay, forbiddenRetry)
		}
		timer := w.clock.NewTimer(delay + time.Duration(rand.Int64N(int64(delay/4))))
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return
		}
		delay = min(2*delay, followRetryMax)
	}
}

// listed gives the place in lists back.
func (w *ownWatch) listed() {
	if w.listing.CompareAndSwap(true, false) {
		<-w.lists
	}
}

func (w *ownWatch) status() ResourceStatus {
	objects, synced := w.store.count()
	s := w.plan.status(w.state, synced)
	s.Objects = objects
	return s
}

// selected is the store of the reflector. It has the objects for which When returns true, and calls the
// handler.
type selected struct {
	handler *controllerInformer // contains panics
	to      cache.ResourceEventHandler
	listed  func()

	mu      sync.Mutex
	objects map[cache.ObjectName]*Object
	synced  bool
}

func (s *selected) has(key string) bool {
	name, err := cache.ParseObjectName(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	return err == nil && s.objects[name] != nil
}

func (s *selected) count() (objects int, synced bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.objects), s.synced
}

// Add implements cache.ReflectorStore, as do the other methods.
func (s *selected) Add(obj any) error {
	s.put(obj.(*Object), false)
	return nil
}

// Update is Add.
func (s *selected) Update(obj any) error { return s.Add(obj) }

// Delete removes an object, which may be unknown.
func (s *selected) Delete(obj any) error {
	s.remove(cache.MetaObjectToName(obj.(*Object)))
	return nil
}

// Replace keeps what is in the list and removes everything else.
func (s *selected) Replace(list []any, _ string) error {
	s.listed()
	gone := map[cache.ObjectName]bool{}
	s.mu.Lock()
	for name := range s.objects {
		gone[name] = true
	}
	initial := !s.synced
	s.mu.Unlock()
	for _, obj := range list {
		o := obj.(*Object)
		delete(gone, cache.MetaObjectToName(o))
		s.put(o, initial)
	}
	for name := range gone {
		s.remove(name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
	return nil
}

// Resync does nothing.
func (s *selected) Resync() error { return nil }

// put is called by the reflector only, so no other changes come between.
func (s *selected) put(o *Object, initial bool) {
	name := cache.MetaObjectToName(o)
	s.mu.Lock()
	old := s.objects[name]
	s.objects[name] = o
	s.mu.Unlock()
	s.handler.contained(eventHandler, o, func() {
		if old == nil {
			s.to.OnAdd(o, initial)
		} else {
			s.to.OnUpdate(old, o)
		}
	})
}

func (s *selected) remove(name cache.ObjectName) {
	s.mu.Lock()
	old := s.objects[name]
	delete(s.objects, name)
	s.mu.Unlock()
	if old != nil {
		s.handler.contained(eventHandler, old, func() { s.to.OnDelete(old) })
	}
}

// unwanted reports whether nothing of an object is to be kept.
func (r *reducer) unwanted(obj runtime.Object) bool {
	if !r.plan.selective {
		return false
	}
	m, err := meta.Accessor(obj)
	return err == nil && !r.when(&r.plan.needs[0], m)
}
