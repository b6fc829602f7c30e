// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// failingAfter is how long the requests of a synced informer must fail before this counts as a
// problem of its controllers. A restart of the API server or a burst of 429 is over sooner.
const failingAfter = time.Minute

// state records what has been observed of the requests for one resource.
type state struct {
	resource string
	clock    clock.PassiveClock

	mu sync.Mutex
	// lists counts complete lists; streamed counts those of them that came as a watch. All but the
	// first are relists.
	lists, streamed, watches, events, bookmarks, failures int64
	// objects is the number of cached objects, from the last complete list and the events since.
	// While a list is being streamed, streaming is set and incoming counts its objects.
	objects, incoming                 int
	streaming                         bool
	lastEvent, lastBookmark, lastList time.Time
	resourceVersion                   string
	absent                            bool                // the server does not have the resource
	failing                           map[string]*failure // by verb; removed when it succeeds
	lastFailure                       *failure
	logged                            string // the error that was logged last; empty when it is over
}

// failure is a series of failed requests with one verb.
type failure struct {
	verb        string
	err         error
	count       int64
	since, last time.Time
}

func newState(resource string, c clock.PassiveClock) *state {
	return &state{resource: resource, clock: c, failing: map[string]*failure{}}
}

// listed records a complete paged list of n objects.
func (s *state) listed(ctx context.Context, resourceVersion string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete(resourceVersion, n)
	s.succeeded(ctx, "list")
}

// listedAbsent records that the server does not have the resource, which counts as an empty list.
func (s *state) listedAbsent(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete("", 0)
	s.absent = true
	s.succeeded(ctx, "list")
	s.succeeded(ctx, "watch")
}

// complete records a complete list of n objects. The caller holds mu.
func (s *state) complete(resourceVersion string, n int) {
	s.objects, s.streaming = n, false
	s.lists++
	s.lastList = s.clock.Now()
	s.resourceVersion = resourceVersion
	s.absent = false
}

func (s *state) isAbsent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.absent
}

// watching records that the server accepted a watch.
func (s *state) watching(ctx context.Context, streaming bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches++
	s.streaming, s.incoming = streaming, 0
	if !streaming {
		s.absent = false
	}
	s.succeeded(ctx, "watch")
}

func (s *state) succeeded(ctx context.Context, verb string) {
	f := s.failing[verb]
	if f == nil {
		return
	}
	delete(s.failing, verb)
	if s.logged != "" && len(s.failing) == 0 {
		s.logged = ""
		klog.FromContext(ctx).Info("List or watch works again", "resource", s.resource, "verb", verb,
			"failures", f.count, "since", f.since)
	}
}

// observed records an event or a bookmark.
func (s *state) observed(event watch.Event) {
	m, err := meta.Accessor(event.Object)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resourceVersion = m.GetResourceVersion()
	if event.Type != watch.Bookmark {
		s.events++
		s.lastEvent = s.clock.Now()
		s.countObjects(event.Type)
		return
	}
	s.bookmarks++
	s.lastBookmark = s.clock.Now()
	if isEndOfList(event) {
		s.streamed++
		s.complete(s.resourceVersion, s.incoming)
		delete(s.failing, "list") // the stream has replaced it
		if len(s.failing) == 0 {
			s.logged = ""
		}
	}
}

func (s *state) countObjects(kind watch.EventType) {
	n := &s.objects
	if s.streaming {
		n = &s.incoming
	}
	switch kind {
	case watch.Added:
		*n++
	case watch.Deleted:
		*n--
	}
}

func (s *state) failed(verb string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures++
	f := s.failing[verb]
	if f == nil {
		f = &failure{verb: verb, since: s.clock.Now()}
		s.failing[verb] = f
	}
	f.err, f.last = err, s.clock.Now()
	f.count++
	s.lastFailure = f
}

// problem returns what is wrong, or nil if nothing is worth reporting.
func (s *state) problem(synced bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, verb := range []string{"list", "watch"} {
		f := s.failing[verb]
		if f == nil || synced && !isDenied(f.err) && s.clock.Since(f.since) < failingAfter {
			continue
		}
		errs = append(errs, f.describe(s.resource))
	}
	if !synced && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s not synced yet", s.resource))
	}
	return errors.Join(errs...)
}

// refused reports whether the server's last response to a list was that we may not list the
// resource, or that it does not exist. A server that is slow or away has not refused.
func (s *state) refused() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.failing["list"]
	return f != nil && (apierrors.IsForbidden(f.err) || apierrors.IsNotFound(f.err))
}

// failsLong reports whether lists have failed for failingAfter.
func (s *state) failsLong() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.failing["list"]
	return f != nil && s.clock.Since(f.since) >= failingAfter
}

func isDenied(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

// describe returns the reason without the error's own text, which is in the log and in
// /debug/informers.
func (f *failure) describe(resource string) error {
	reason := string(apierrors.ReasonForError(f.err))
	if reason == "" {
		reason = "no answer"
	}
	return fmt.Errorf("cannot %s %s: %s", f.verb, resource, reason)
}

// watchError is the informer's watch error handler. It ignores an expired version, after which the
// informer lists again.
func (s *state) watchError(ctx context.Context, _ *cache.Reflector, err error) {
	if ctx.Err() == nil && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		s.logFailure(ctx, err)
	}
}

// logFailure logs a cause once until it is over, since client-go tries again for ever.
func (s *state) logFailure(ctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.logged == err.Error() {
		return
	}
	s.logged = err.Error()
	klog.FromContext(ctx).Error(err, "Cannot list or watch", "resource", s.resource)
}
