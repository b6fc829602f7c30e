// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// failingAfter is how long the requests of a synced informer must fail before this counts as a
// problem of its controllers. A restart of the API server or a burst of 429 is over sooner.
const failingAfter = time.Minute

// state records what has been observed of the requests of one feed.
type state struct {
	name   string // of the resource, and the namespace if there are several
	logger klog.Logger

	mu           sync.Mutex
	recorded     ResourceStatus // what status returns, without what it computes
	lastActivity time.Time
	failing      map[string]*failure // by verb; removed when the verb succeeds
	lastFailure  *failure
	logged       string // why the request failed that was logged last; empty when requests succeed again
	everFilled   bool   // the resource has been listed, or has counted as empty
}

func newState(name string, logger klog.Logger) *state {
	return &state{name: name, logger: logger, failing: map[string]*failure{}}
}

// addObjects adds to the number of cached objects.
func (s *state) addObjects(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorded.Objects += n
}

// recordList records a complete list.
func (s *state) recordList(version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorded.Lists++
	s.everFilled = true
	s.recorded.ResourceVersion, s.recorded.Absent, s.lastActivity = version, false, time.Now()
	s.recordSuccess("list")
}

// markAbsent records that the server has the resource in no version, so that it counts as empty.
func (s *state) markAbsent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.everFilled, s.recorded.Absent, s.lastActivity = true, true, time.Now()
	s.recordSuccess("list")
	s.recordSuccess("watch")
}

// markPresent records that the server has the resource again, although it cannot be listed yet.
func (s *state) markPresent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorded.Absent = false
}

// isAbsent reports whether the server had the resource in no version when it was last asked.
func (s *state) isAbsent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.recorded.Absent
}

// recordWatch records that the server accepted a watch.
func (s *state) recordWatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorded.Watches++
}

// recordLasting records that a watch has lasted, and so works.
func (s *state) recordLasting() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordSuccess("watch")
}

// recordSuccess ends the failures of a verb. The caller holds mu.
func (s *state) recordSuccess(verb string) {
	f := s.failing[verb]
	if f == nil {
		return
	}
	delete(s.failing, verb)
	if s.logged != "" && len(s.failing) == 0 {
		s.logged = ""
		s.logger.Info("List or watch works again", "resource", s.name, "verb", verb, "failures", f.count, "since", f.since)
	}
}

// recordActivity records an event, or a bookmark.
func (s *state) recordActivity(obj any, isEvent bool) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorded.ResourceVersion, s.lastActivity = m.GetResourceVersion(), time.Now()
	if isEvent {
		s.recorded.Events++
	}
}

func (s *state) recordFailure(verb string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.recorded.Absent || !apierrors.IsNotFound(err) { // an absent resource is no failure
		s.recorded.Failures++
	}
	f := s.failing[verb]
	if f == nil {
		f = &failure{verb: verb, since: time.Now()}
		s.failing[verb] = f
	}
	f.err, f.last = err, time.Now()
	f.count++
	switch {
	case !isRefusal(err):
		f.refused = time.Time{}
	case f.refused.IsZero():
		f.refused = f.last
	case f.last.Sub(f.refused) >= refusedAfter:
		f.settled = true
	}
	s.lastFailure = f
}

// problem returns what is wrong, or nil if nothing is worth reporting.
func (s *state) problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problemLocked()
}

// problemLocked is problem for a caller that holds mu.
func (s *state) problemLocked() error {
	var errs []error
	for _, verb := range []string{"list", "watch"} {
		f := s.failing[verb]
		if f == nil || s.recorded.Absent || s.everFilled && !isDenied(f.err) && time.Since(f.since) < failingAfter {
			continue
		}
		errs = append(errs, fmt.Errorf("cannot %s %s: %s", verb, s.name, reasonOf(f.err)))
	}
	if !s.everFilled && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s not synced yet", s.name))
	}
	return errors.Join(errs...)
}

// logFailure logs an error, unless the last one had the same cause and no request has succeeded since: they
// are tried again for ever.
func (s *state) logFailure(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.recorded.Absent || s.logged == causeOf(err) {
		return
	}
	s.logged = causeOf(err)
	s.logger.Error(err, "Cannot list or watch", "resource", s.name)
}

// status returns what is known of the requests.
func (s *state) status() ResourceStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.recorded
	if problem := s.problemLocked(); problem != nil {
		status.Problem = problem.Error()
	}
	status.Synced, status.Relists = s.everFilled, max(0, status.Lists-1)
	if !s.lastActivity.IsZero() {
		status.LastActivityAge = &metav1.Duration{Duration: time.Since(s.lastActivity).Round(time.Millisecond)}
	}
	if f := s.failing["list"]; f != nil {
		status.Forbidden = apierrors.IsForbidden(f.err)
	}
	if f := s.lastFailure; f != nil {
		status.LastFailure = &FailureStatus{Verb: f.verb, Error: f.err.Error(), Count: f.count,
			Since: metav1.NewTime(f.since), Last: metav1.NewTime(f.last)}
	}
	return status
}
