// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
)

// listSlotTimeout is how long a list that does not end keeps the lists of other followed resources waiting.
const listSlotTimeout = 5 * time.Second

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

	// The goroutine of run uses attempt. So does ListWithContext, in another goroutine, for which the reflector
	// waits unless ctx ends.
	attempt attempt
}

func (f *feed) covers(namespace string) bool {
	return f.namespace == metav1.NamespaceAll || f.namespace == namespace
}

// run lists and watches until ctx ends.
func (f *feed) run(ctx context.Context) {
	requests := &cache.ListWatch{ListWithContextFunc: f.ListWithContext, WatchFuncWithContext: f.WatchWithContext}
	reflector := cache.NewReflectorWithOptions(requests, nil, f,
		cache.ReflectorOptions{Name: f.state.name, TypeDescription: f.state.name})
	delay := backoff
	for f.begin(ctx) {
		err := f.listAndWatch(ctx, reflector)
		complete := !f.attempt.listed.IsZero()
		if complete && time.Since(f.attempt.listed) > failingAfter {
			delay = backoff
		}
		if err != nil && ctx.Err() == nil {
			f.handleFailure(ctx, err)
			f.informer.reviewFirstLists()
			if expired := apierrors.IsResourceExpired(err) || apierrors.IsGone(err); !expired || !complete {
				f.state.logFailure(err) // an expired watch is no failure: a list follows
			}
		}
		select {
		case <-time.After(delay.Step()):
		case <-ctx.Done():
		}
	}
}

// listAndWatch lists and watches until the watch breaks, which is no error, or a request fails.
func (f *feed) listAndWatch(ctx context.Context, reflector *cache.Reflector) error {
	err := reflector.ListAndWatchWithContext(ctx)
	f.attempt.endWatch()
	f.attempt.endList()
	if err != nil && !errors.Is(err, errBrief) {
		return err
	}
	if ctx.Err() == nil && f.attempt.isCut(time.Now()) {
		f.state.recordFailure("watch", errCut)
		return errCut
	}
	return nil
}

// begin begins an attempt. It waits for a slot in listSlots, if that is set, and returns false if ctx ends.
func (f *feed) begin(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false // ListWithContext may go on, and use the attempt
	}
	f.attempt = attempt{}
	if f.listSlots == nil {
		return true
	}
	select {
	case f.listSlots <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	free := sync.OnceFunc(func() { <-f.listSlots })
	timer := time.AfterFunc(listSlotTimeout, free)
	f.attempt.freeSlot = func() { timer.Stop(); free() }
	return true
}

// handleFailure handles the failure of a list or a watch. If discovery confirms that an optional resource
// does not exist, handleFailure empties the cache, and the failure is no problem.
func (f *feed) handleFailure(ctx context.Context, err error) {
	mayBeAbsent := f.informer.plan.optional && (apierrors.IsNotFound(err) || f.state.isAbsent())
	if !mayBeAbsent {
		return
	}
	discovered := f.discover(ctx)
	switch {
	case ctx.Err() != nil:
	case apierrors.IsNotFound(discovered):
		_ = f.informer.replace(f, nil) // never fails without objects
		f.state.markAbsent()
	case discovered == nil:
		f.state.markPresent()
	}
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
	if err := f.informer.replace(f, list); err != nil {
		return err
	}
	f.attempt.complete(time.Now())
	f.state.recordList(version)
	f.informer.reviewFirstLists()
	return nil
}

// Resync is never called: no feed has a period for it.
func (f *feed) Resync() error { return nil }
