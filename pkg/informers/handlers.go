// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
)

// sharedInformer is client-go's, with handlers whose backlog can be seen. client-go queues the
// notifications of each handler too, but does not show how many wait; so its queue is drained at once
// into one of ours.
type sharedInformer struct {
	cache.SharedIndexInformer

	mu            sync.Mutex
	registrations map[*registration]struct{}
	wg            sync.WaitGroup
}

func newSharedInformer(inner cache.SharedIndexInformer) *sharedInformer {
	return &sharedInformer{SharedIndexInformer: inner, registrations: map[*registration]struct{}{}}
}

// Run is RunWithContext for those who have a channel.
func (i *sharedInformer) Run(stop <-chan struct{}) {
	i.RunWithContext(wait.ContextForChannel(stop))
}

// RunWithContext returns when ctx has ended and no handler runs any more.
func (i *sharedInformer) RunWithContext(ctx context.Context) {
	i.SharedIndexInformer.RunWithContext(ctx)
	i.mu.Lock()
	for r := range i.registrations {
		r.close()
	}
	clear(i.registrations)
	i.mu.Unlock()
	i.wg.Wait()
}

// SetTransform refuses: the needs decide what is cached.
func (i *sharedInformer) SetTransform(cache.TransformFunc) error {
	return fmt.Errorf("a shared informer's transform follows from the declared needs")
}

// AddIndexers is client-go's, except that several controllers may add the index by namespace.
func (i *sharedInformer) AddIndexers(indexers cache.Indexers) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if _, ok := i.GetIndexer().GetIndexers()[cache.NamespaceIndex]; ok {
		indexers = maps.Clone(indexers)
		delete(indexers, cache.NamespaceIndex)
	}
	return i.SharedIndexInformer.AddIndexers(indexers)
}

func (i *sharedInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{})
}

func (i *sharedInformer) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, period time.Duration) (
	cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{ResyncPeriod: &period})
}

// AddEventHandlerWithOptions registers h under the name that its Name method returns, else its type.
func (i *sharedInformer) AddEventHandlerWithOptions(h cache.ResourceEventHandler, opts cache.HandlerOptions) (
	cache.ResourceEventHandlerRegistration, error) {
	r := newRegistration(h)
	i.mu.Lock()
	defer i.mu.Unlock()
	inner, err := i.SharedIndexInformer.AddEventHandlerWithOptions(r, opts)
	if err != nil {
		return nil, err
	}
	r.inner = inner
	i.registrations[r] = struct{}{}
	i.wg.Go(r.run)
	i.wg.Go(r.awaitInner)
	return r, nil
}

// RemoveEventHandler returns at once; cache.ShutDownEventHandler also waits for a running handler.
// Notifications that wait are dropped.
func (i *sharedInformer) RemoveEventHandler(handle cache.ResourceEventHandlerRegistration) error {
	r, ok := handle.(*registration)
	if !ok {
		return fmt.Errorf("%T is no registration of this informer", handle)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.registrations, r)
	defer r.close()
	return i.SharedIndexInformer.RemoveEventHandler(r.inner)
}

func (i *sharedInformer) handlers() []HandlerStatus {
	i.mu.Lock()
	defer i.mu.Unlock()
	statuses := make([]HandlerStatus, 0, len(i.registrations))
	for r := range i.registrations {
		statuses = append(statuses, r.status())
	}
	slices.SortFunc(statuses, func(a, b HandlerStatus) int { return strings.Compare(a.Name, b.Name) })
	return statuses
}

// registration queues what client-go delivers and hands it to one handler, in order. It is
// client-go's handler and the caller's registration in one.
type registration struct {
	name    string
	handler cache.ResourceEventHandler
	inner   cache.ResourceEventHandlerRegistration

	mu     sync.Mutex
	wake   sync.Cond
	queue  []notification
	taken  int // of the batch that is being handled, the notification at the handler included
	closed bool
	// initial counts notifications of the initial list that have not been handled, innerSynced says
	// that no more of them will come.
	initial     int
	innerSynced bool
	handled     int64

	synced   chan struct{}
	quit     chan struct{}
	finished chan struct{}
}

type notification struct {
	kind     notificationKind
	old, obj any
	initial  bool
}

type notificationKind uint8

const (
	added notificationKind = iota
	updated
	deleted
)

func newRegistration(h cache.ResourceEventHandler) *registration {
	r := &registration{
		name:     fmt.Sprintf("%T", h),
		handler:  h,
		synced:   make(chan struct{}),
		quit:     make(chan struct{}),
		finished: make(chan struct{}),
	}
	if named, ok := h.(interface{ Name() string }); ok {
		r.name = named.Name()
	}
	r.wake.L = &r.mu
	return r
}

// OnAdd, OnUpdate and OnDelete are called by client-go.
func (r *registration) OnAdd(obj any, initial bool) {
	r.enqueue(notification{kind: added, obj: obj, initial: initial})
}
func (r *registration) OnUpdate(old, obj any) {
	r.enqueue(notification{kind: updated, old: old, obj: obj})
}
func (r *registration) OnDelete(obj any) { r.enqueue(notification{kind: deleted, obj: obj}) }

func (r *registration) enqueue(n notification) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.queue = append(r.queue, n)
	if n.initial {
		r.initial++
	}
	r.wake.Signal()
}

// run hands notifications over until close.
func (r *registration) run() {
	defer close(r.finished)
	for {
		batch := r.next()
		if batch == nil {
			return
		}
		for i := range batch {
			if !r.deliver(&batch[i]) {
				return
			}
		}
	}
}

// next waits for notifications and takes them all; nil after close.
func (r *registration) next() []notification {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) == 0 && !r.closed {
		r.wake.Wait()
	}
	if r.closed {
		return nil
	}
	batch := r.queue
	r.queue = nil
	r.taken = len(batch)
	return batch
}

// deliver reports false after close.
func (r *registration) deliver(n *notification) bool {
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	if closed {
		return false
	}
	func() {
		defer utilruntime.HandleCrash()
		switch n.kind {
		case added:
			r.handler.OnAdd(n.obj, n.initial)
		case updated:
			r.handler.OnUpdate(n.old, n.obj)
		case deleted:
			r.handler.OnDelete(n.obj)
		}
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handled++
	r.taken--
	if n.initial {
		r.initial--
		r.checkSynced()
	}
	*n = notification{} // let the objects go before the whole batch is done
	return true
}

// awaitInner notes that client-go has delivered the whole initial list.
func (r *registration) awaitInner() {
	select {
	case <-r.inner.HasSyncedChecker().Done():
	case <-r.quit:
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.innerSynced = true
	r.checkSynced()
}

func (r *registration) checkSynced() {
	if !r.innerSynced || r.initial > 0 {
		return
	}
	select {
	case <-r.synced:
	default:
		close(r.synced)
	}
}

func (r *registration) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.closed = true
	r.queue = nil
	close(r.quit)
	r.wake.Signal()
}

func (r *registration) status() HandlerStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return HandlerStatus{Name: r.name, Handled: r.handled, Backlog: len(r.queue) + r.taken}
}

// HasSynced reports whether the handler has seen the whole initial list.
func (r *registration) HasSynced() bool { return cache.IsDone(r) }

func (r *registration) HasSyncedChecker() cache.DoneChecker { return r }

// Name and Done implement cache.DoneChecker.
func (r *registration) Name() string          { return r.name }
func (r *registration) Done() <-chan struct{} { return r.synced }

// ShutdownChan is closed when the handler does not run any more, see cache.ShutDownEventHandler.
func (r *registration) ShutdownChan() <-chan struct{} { return r.finished }
