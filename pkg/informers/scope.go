// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
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
func (l *reducingListWatch) watchScopes(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	if len(l.scopes) == 1 {
		return l.scopes[0].watch(ctx, opts)
	}
	merged := &mergedWatch{result: make(chan watch.Event), done: make(chan struct{})}
	var watches []watch.Interface
	for _, s := range l.scopes {
		opts.ResourceVersion = s.resume()
		w, err := s.watch(ctx, opts)
		if err != nil || isEmpty(w) {
			for _, opened := range watches {
				opened.Stop()
			}
			return w, err
		}
		watches = append(watches, w)
	}
	var forwarding sync.WaitGroup
	for i, w := range watches {
		forwarding.Go(func() { merged.forward(w, l.scopes[i].namespace) })
	}
	l.wg.Go(func() {
		forwarding.Wait()
		close(merged.result)
	})
	return merged, nil
}

// mergedWatch ends when one of its watches ends. The reflector then opens all of them again.
type mergedWatch struct {
	result chan watch.Event
	done   chan struct{}
	once   sync.Once
}

func (w *mergedWatch) ResultChan() <-chan watch.Event { return w.result }

func (w *mergedWatch) Stop() { w.once.Do(func() { close(w.done) }) }

func (w *mergedWatch) forward(from watch.Interface, namespace string) {
	defer w.Stop()
	defer from.Stop()
	for {
		select {
		case <-w.done:
			return
		case event, ok := <-from.ResultChan():
			if !ok {
				return
			}
			if m, err := meta.Accessor(event.Object); err == nil && event.Type == watch.Bookmark {
				m.SetNamespace(namespace) // so that delivered knows whose it is
			}
			select {
			case <-w.done:
				return
			case w.result <- event:
			}
		}
	}
}
