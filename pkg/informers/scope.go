// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"
)

// scope is what one list or watch request covers: all namespaces, or one of --namespaces.
type scope struct {
	source
	namespace string // empty: all

	mu sync.Mutex
	// version is that of the last event that the reflector received from this scope. The reflector
	// keeps a single version, which says nothing about a namespace without events.
	version string
}

func (s *scope) advance(version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = version
}

func (s *scope) resume() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// listInTime returns errNoAnswer if the list takes longer than answerPatience.
func (s *scope) listInTime(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerPatience, errNoAnswer)
	defer cancel()
	list, err := s.list(ctx, opts)
	if err != nil && errors.Is(context.Cause(ctx), errNoAnswer) {
		err = errNoAnswer
	}
	return list, err
}

// watchInTime returns errNoAnswer if the response takes longer to begin than answerPatience.
func (s *scope) watchInTime(ctx context.Context, opts metav1.ListOptions, clock clock.WithDelayedExecution) (stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	late := clock.AfterFunc(answerPatience, cancel)
	w, err := s.watch(ctx, opts)
	inTime := late.Stop()
	switch {
	case err == nil && inTime:
		return &begunStream{w, cancel}, nil
	case err == nil:
		w.stop()
		err = errNoAnswer
	case !inTime:
		err = errNoAnswer
	}
	cancel()
	return nil, err
}

// begunStream is a stream whose context ends with it.
type begunStream struct {
	stream
	cancel context.CancelFunc
}

func (s *begunStream) stop() {
	s.stream.stop()
	s.cancel()
}

// delivered records that the reflector has received the event.
func (l *reducingListWatch) delivered(event watch.Event) {
	m, ok := event.Object.(metav1.Object)
	if !ok || len(l.scopes) == 1 {
		return
	}
	for _, s := range l.scopes {
		if s.namespace == m.GetNamespace() {
			s.advance(m.GetResourceVersion())
		}
	}
}

// watchScopes opens a watch of each scope and returns one that merges them.
func (l *reducingListWatch) watchScopes(ctx context.Context, opts metav1.ListOptions) (stream, error) {
	if len(l.scopes) == 1 {
		return l.scopes[0].watchInTime(ctx, opts, l.clock)
	}
	merged := &mergedStream{result: make(chan watch.Event), done: make(chan struct{})}
	var streams []stream
	for _, s := range l.scopes {
		opts.ResourceVersion = s.resume()
		w, err := s.watchInTime(ctx, opts, l.clock)
		if err != nil {
			for _, opened := range streams {
				opened.stop()
			}
			return nil, err
		}
		streams = append(streams, w)
	}
	for i, from := range streams {
		l.wg.Go(func() { merged.forward(from, l.scopes[i].namespace) })
	}
	l.wg.Go(func() {
		<-merged.done
		for _, from := range streams {
			from.stop()
		}
	})
	return merged, nil
}

// mergedStream ends when one of its streams ends. The reflector then opens all of them again.
type mergedStream struct {
	result chan watch.Event
	done   chan struct{}
	once   sync.Once
}

func (s *mergedStream) stop() { s.once.Do(func() { close(s.done) }) }

func (s *mergedStream) next() (watch.Event, bool) {
	select {
	case event := <-s.result:
		return event, true
	case <-s.done:
		return watch.Event{}, false
	}
}

func (s *mergedStream) forward(from stream, namespace string) {
	defer s.stop()
	for {
		event, ok := from.next()
		if !ok {
			return
		}
		if m, err := meta.Accessor(event.Object); err == nil && event.Type == watch.Bookmark {
			m.SetNamespace(namespace) // so that delivered knows whose it is
		}
		select {
		case <-s.done:
			return
		case s.result <- event:
		}
	}
}
