// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

const (
	// pageSize limits how many full objects are in memory at once when a list cannot be streamed.
	pageSize = 250
	// listSlotTimeout is how long a list that does not end keeps the lists of other followed resources waiting.
	listSlotTimeout = 5 * time.Second
)

// backoff is the back-off of client-go's informers.
var backoff = wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 100, Factor: 2, Jitter: 1}

// feed reads one namespace of a resource, or all, for an informer. It is what client-go's reflector
// reads from, a cache.ListerWatcherWithContext, and what it writes to, a cache.ReflectorStore.
type feed struct {
	informer  *informer
	namespace string // empty: all
	source    source
	state     *state
	// listSlots, if set, limits the lists that are read at once: each list holds a slot in it.
	listSlots chan struct{}
	// discover returns a NotFound error if the server does not have the resource in any version.
	discover func(context.Context) error

	// The goroutine of run uses the fields below. So does ListWithContext, in another goroutine, for which the
	// reflector waits unless ctx ends.

	attempt attempt
	// freeSlot gives the slot of the present list back. A second call does nothing.
	freeSlot func()
}

// attempt is the state of one call of the reflector's ListAndWatchWithContext. WatchWithContext tells the
// reflector by its error what to do next:
//
//	asked for          error                      the reflector
//	a streamed list    429, connection refused    waits without ctx, and asks again: it never gets these
//	a streamed list    any other, errBrief        asks ListWithContext for pages
//	                   429 in its events          waits without ctx, and asks again
//	a watch            429, connection refused    waits, and asks again
//	a watch            any other, errBrief        returns the error to run
type attempt struct {
	listed  time.Time // when the list was complete; zero before
	opened  time.Time // when the last watch or streamed list began; zero after a complete list
	streams int       // how many streamed lists have begun
	// throttled is the error of a streamed list for which the API server was too busy, for ListWithContext.
	throttled error
}

// errBrief is for an attempt that must not go on as it is.
var errBrief = errors.New("the last watch ended within a second, or two streamed lists broke")

// maxStreams is how many streamed lists may break, as behind a proxy that cuts long responses, before the
// list is read in pages. The reflector would stream it again for ever.
const maxStreams = 2

// isBrief reports whether the request must not be made now: the last one lasted less than a second, after
// which the reflector does not wait if there was an event, or maxStreams lists have broken.
func (a *attempt) isBrief(now time.Time, streamed bool) bool {
	return now.Sub(a.opened) < time.Second || streamed && a.streams == maxStreams
}

// begin notes that a watch or a streamed list has begun.
func (a *attempt) begin(now time.Time, streamed bool) {
	a.opened = now
	if streamed {
		a.streams++
	}
}

// complete notes that the list is complete.
func (a *attempt) complete(now time.Time) { a.listed, a.opened = now, time.Time{} }

func (f *feed) covers(namespace string) bool {
	return f.namespace == metav1.NamespaceAll || f.namespace == namespace
}

// run lists and watches until ctx ends.
func (f *feed) run(ctx context.Context) {
	requests := &cache.ListWatch{ListWithContextFunc: f.ListWithContext, WatchFuncWithContext: f.WatchWithContext}
	reflector := cache.NewReflectorWithOptions(requests, nil, f, cache.ReflectorOptions{Name: f.state.name, TypeDescription: f.state.name})
	delay := backoff
	for f.takeListSlot(ctx) {
		answering := isClosed(f.informer.lists.answered)
		complete, watched, err := f.listAndWatch(ctx, reflector)
		switch {
		case watched > failingAfter:
			delay = backoff
		case complete && err == nil && ctx.Err() == nil:
			f.state.recordBreak()
		}
		if err != nil && ctx.Err() == nil {
			f.handleFailure(ctx, err)
			if answering && f.state.refusedFor(refusedAfter) {
				f.informer.lists.refuse(f)
			}
			f.state.logFailure(ctx, err)
		}
		f.wait(ctx, delay.Step(), !answering && !complete)
	}
}

// listAndWatch lists and watches until the watch breaks, which is no error, or a request fails. It returns
// whether the list was complete, and how long it has watched since then.
func (f *feed) listAndWatch(ctx context.Context, reflector *cache.Reflector) (complete bool, watched time.Duration, err error) {
	f.attempt = attempt{}
	err = reflector.ListAndWatchWithContext(ctx)
	f.giveListSlotBack()
	if errors.Is(err, errBrief) {
		err = nil
	}
	if complete = !f.attempt.listed.IsZero(); complete {
		watched = time.Since(f.attempt.listed)
	}
	return complete, watched, err
}

// wait waits before the next list. With forAnswer it returns once the server has answered another feed: the
// informer may be waiting for this feed alone.
func (f *feed) wait(ctx context.Context, pause time.Duration, forAnswer bool) {
	var answered <-chan struct{}
	if forAnswer {
		answered = f.informer.lists.answered
	}
	if f.state.isRefused() && !f.state.refusedFor(refusedAfter) {
		pause = min(pause, refusedAfter) // until it is known whether the refusal counts
	}
	select {
	case <-time.After(pause):
	case <-answered:
	case <-ctx.Done():
	}
}

// takeListSlot waits for a slot in listSlots, if it is set. It returns false if ctx ends.
func (f *feed) takeListSlot(ctx context.Context) bool {
	if f.listSlots == nil || ctx.Err() != nil {
		return ctx.Err() == nil
	}
	select {
	case f.listSlots <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	free := sync.OnceFunc(func() { <-f.listSlots })
	timer := time.AfterFunc(listSlotTimeout, free)
	f.freeSlot = func() { timer.Stop(); free() }
	return true
}

// giveListSlotBack lets the next list begin, since this one has been read or has failed.
func (f *feed) giveListSlotBack() {
	if f.freeSlot != nil {
		f.freeSlot()
	}
}

// ListWithContext returns the whole list, reduced page by page. With the reflector's own options, an
// API server that cannot stream would return all objects in one response.
func (f *feed) ListWithContext(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	err := f.attempt.throttled
	f.attempt.throttled = nil
	var list runtime.Object
	if err == nil { // otherwise the server is too busy for pages as well, and is asked later
		list, err = f.list(ctx, opts)
	}
	if err != nil && ctx.Err() == nil {
		f.state.recordFailure("list", err)
	}
	return list, err
}

// handleFailure handles the failure of a list or a watch. If discovery confirms that an optional resource
// does not exist, handleFailure empties the cache, and the failure is no problem. If discovery has the
// resource, the failure is one, and a cache that was never filled counts as empty after refusedAfter.
func (f *feed) handleFailure(ctx context.Context, err error) {
	mayBeAbsent := f.informer.plan.optional && (apierrors.IsNotFound(err) || f.state.isAbsent())
	if !mayBeAbsent {
		return
	}
	discovered := f.discover(ctx)
	absent, present := apierrors.IsNotFound(discovered), discovered == nil
	refusedFromTheStart := !f.state.filled() && f.state.refusedFor(refusedAfter)
	switch {
	case ctx.Err() != nil:
	case absent, present && refusedFromTheStart:
		_ = f.informer.replace(f, nil) // never fails without objects
		f.state.countAsEmpty(absent)
		f.informer.lists.fill(f)
	case present:
		f.state.markPresent()
	}
}

func (f *feed) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	f.setSelectors(&opts)
	opts.Limit, opts.Continue, opts.ResourceVersion, opts.ResourceVersionMatch = pageSize, "", "", ""
	list := &metainternalversion.List{}
	for {
		page, err := f.source.list(ctx, opts)
		if apierrors.IsResourceExpired(err) && opts.Continue != "" {
			// The list took longer than etcd keeps a version, and would again. So it is read as a whole.
			list.Items, opts.Limit, opts.Continue = nil, 0, ""
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}
		// WithAlloc copies each item. Otherwise an object that is kept would keep the whole page.
		if err := meta.EachListItemWithAlloc(page, func(obj runtime.Object) error {
			reduced, err := f.informer.reduce(obj)
			if err == nil && reduced != any(unwanted) {
				list.Items = append(list.Items, reduced.(runtime.Object))
			}
			return err
		}); err != nil {
			return nil, err
		}
		list.ResourceVersion = m.GetResourceVersion()
		if opts.Continue = m.GetContinue(); opts.Continue == "" {
			return list, nil
		}
	}
}

func (f *feed) setSelectors(opts *metav1.ListOptions) {
	opts.LabelSelector, opts.FieldSelector = f.informer.plan.labelSelector, f.informer.plan.fieldSelector
}

// errNoAnswer is the error of a watch that did not begin.
var errNoAnswer = errors.New("the connection broke or timed out before the server responded")

// WatchWithContext opens a watch, or a list that is streamed as a watch.
func (f *feed) WatchWithContext(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	f.setSelectors(&opts)
	streamed := opts.SendInitialEvents != nil
	if f.attempt.isBrief(time.Now(), streamed) {
		return nil, errBrief
	}
	w, err := f.source.watch(ctx, opts)
	if err == nil && reflect.TypeOf(w) == reflect.TypeOf(watch.NewEmptyWatch()) {
		err = errNoAnswer // client-go returns it if the connection broke ten times
	}
	if err == nil {
		f.attempt.begin(time.Now(), streamed)
		f.state.recordWatch(ctx)
		return w, nil
	}
	if ctx.Err() != nil {
		return nil, err
	}
	busy := apierrors.IsTooManyRequests(err)
	switch {
	case streamed && busy:
		f.attempt.throttled = err
	case streamed && apierrors.IsInvalid(err): // a server that does not stream lists is asked for pages
	default:
		f.state.recordFailure("watch", err)
	}
	switch retried := busy || utilnet.IsConnectionRefused(err); {
	case retried && streamed:
		err = errors.New(err.Error()) // see attempt: a wait without ctx would delay Shutdown
	case retried:
		f.state.logFailure(ctx, err) // the reflector does not return to run
	}
	return nil, err
}

// Transformer implements cache.TransformingStore, so that a streamed list is reduced as it comes.
func (f *feed) Transformer() cache.TransformFunc { return f.informer.reduce }

// Add implements cache.ReflectorStore, as do the other methods.
func (f *feed) Add(obj any) error {
	f.state.recordActivity(obj, true)
	return f.informer.put(f, obj, true)
}

// Update stores an object.
func (f *feed) Update(obj any) error {
	f.state.recordActivity(obj, true)
	return f.informer.put(f, obj, false)
}

// Delete removes an object, which may be unknown.
func (f *feed) Delete(obj any) error {
	f.state.recordActivity(obj, true)
	return f.informer.remove(f, obj)
}

// Bookmark notes that the server still talks.
func (f *feed) Bookmark(version string) error {
	f.state.recordActivity(&metav1.ObjectMeta{ResourceVersion: version}, false)
	return nil
}

// Replace stores a list, and removes everything else.
func (f *feed) Replace(list []any, version string) error {
	f.giveListSlotBack()
	f.attempt.complete(time.Now())
	if err := f.informer.replace(f, list); err != nil {
		return err
	}
	f.state.recordList(version)
	f.informer.lists.fill(f)
	return nil
}

// Resync is never called: no feed has a period for it.
func (f *feed) Resync() error { return nil }
