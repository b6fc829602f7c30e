// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"
)

// reducingWatch reduces the objects of a watch.
type reducingWatch struct {
	from   stream
	l      *reducingListWatch
	result chan watch.Event
	done   chan struct{}
	once   sync.Once
	// streaming is set until all initial events have come.
	streaming bool
	// timer fires when there was no event for too long, or when the resource must be listed again, see
	// panics. It is nil until the first event is waited for.
	timer clock.Timer
	fired atomic.Bool // by the timer, or by relist
}

func (w *reducingWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *reducingWatch) Stop() {
	w.once.Do(func() {
		close(w.done)
		w.from.stop()
	})
}

func (w *reducingWatch) run() {
	defer close(w.result)
	defer w.from.stop()
	for {
		if !w.streaming && !w.waitForStore() {
			return
		}
		w.startTimer()
		event, ok := w.next()
		w.stopTimer()
		if !ok {
			return
		}
		select {
		case <-w.done:
			return
		case w.result <- event:
			w.delivered(event)
		}
	}
}

// waitForStore waits until the store has the first list: before, history finds no predecessor of a changed
// object. It returns false if the watch was stopped.
func (w *reducingWatch) waitForStore() bool {
	if w.l.history == nil {
		return true
	}
	select {
	case <-w.l.history.filled():
		return true
	case <-w.done:
		return false
	}
}

// delivered records that the reflector has received the event.
func (w *reducingWatch) delivered(event watch.Event) {
	w.l.delivered(event)
	if o, ok := event.Object.(*Object); ok && !w.streaming {
		w.l.history.deliver(o)
	}
}

// next returns the next event, reduced. If the resource must be listed when the timer fires, it returns
// the error that makes the reflector list; else the watch has ended, and the reflector resumes it.
func (w *reducingWatch) next() (watch.Event, bool) {
	event, ok := w.from.next()
	switch {
	case ok:
	case !w.fired.Swap(false):
		return event, false
	case w.streaming:
		event = watch.Event{Type: watch.Error, Object: &errStalled}
	case !w.l.mustList():
		return event, false
	default:
		w.l.panics.relisting(w.l.inCache)
		return watch.Event{Type: watch.Error, Object: &errRelist}, true
	}
	if w.streaming && event.Type == watch.Error && apierrors.IsTooManyRequests(apierrors.FromObject(event.Object)) {
		event.Object = &errStalled // for a 429 the reflector would sleep for up to a minute, Shutdown or not
	}
	event = w.l.convert(event)
	if o, ok := event.Object.(*Object); ok && event.Type == watch.Added && !w.streaming {
		o.created()
	}
	if isEndOfList(event) {
		w.streaming = false
	}
	return event, true
}

func (w *reducingWatch) startTimer() {
	delay := watchPatience
	if in, due := w.l.panics.relistIn(); w.streaming {
		delay = streamPatience
	} else if due {
		delay = min(delay, in)
	}
	if w.timer == nil {
		w.timer = w.l.clock.AfterFunc(delay, w.interrupt)
	} else {
		w.timer.Reset(delay)
	}
}

// mustList reports whether relist was called, or a function that panicked is due.
func (l *reducingListWatch) mustList() bool {
	in, due := l.panics.relistIn()
	return l.again.Load() || due && in == 0
}

// interrupt ends the watch.
func (w *reducingWatch) interrupt() {
	w.fired.Store(true)
	w.from.stop()
}

func (w *reducingWatch) stopTimer() { w.timer.Stop() }

// errAppeared makes the reflector list a resource that did not exist before.
var errAppeared = apierrors.NewResourceExpired("the resource exists now").ErrStatus

// errRelist makes the reflector list again.
var errRelist = apierrors.NewResourceExpired("the host lists the resource again").ErrStatus

// errStalled makes the reflector list in pages instead.
var errStalled = apierrors.NewTimeoutError(fmt.Sprintf(
	"the streamed list paused for %s without the bookmark that ends it", streamPatience), 0).ErrStatus

// isEndOfList reports whether event is the bookmark that ends the initial events (KEP-3157).
func isEndOfList(event watch.Event) bool {
	if event.Type != watch.Bookmark {
		return false
	}
	m, err := meta.Accessor(event.Object)
	return err == nil && m.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

func (l *reducingListWatch) convert(event watch.Event) watch.Event {
	var err error
	if (event.Type == watch.Added || event.Type == watch.Modified) && l.unwanted(event.Object) {
		event.Type = watch.Deleted // also for an unknown object, so that the reflector notes the version
	}
	switch event.Type {
	case watch.Added, watch.Modified, watch.Deleted:
		event.Object, err = l.reduce(event.Object)
	case watch.Bookmark:
		l.history.settle()
		event.Object, err = l.bookmark(event.Object)
	}
	if m, ok := event.Object.(metav1.Object); ok && event.Type == watch.Deleted {
		l.panics.gone(m)
	}
	if o, ok := event.Object.(*Object); ok && event.Type == watch.Deleted {
		l.history.deleted(o)
	}
	if err != nil {
		status := apierrors.NewInternalError(err).Status()
		event = watch.Event{Type: watch.Error, Object: &status}
	}
	if event.Type == watch.Error {
		l.state.failed("watch", apierrors.FromObject(event.Object))
	} else {
		l.state.observed(event)
	}
	return event
}

// idleWatch is a watch without events that ends when its timer fires.
type idleWatch struct {
	timer  clock.Timer
	result chan watch.Event
	done   chan struct{}
	once   sync.Once
}

func (w *idleWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *idleWatch) Stop() { w.once.Do(func() { close(w.done) }) }

func (w *idleWatch) run() {
	defer close(w.result)
	select {
	case <-w.timer.C():
	case <-w.done:
		w.timer.Stop()
	}
}
