// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// templateWatch follows the Deployments of a namespace through the benchmark's own client.
type templateWatch struct {
	mu          sync.Mutex
	deployments map[string]*appsv1.Deployment
	rolls       []roll
	changed     chan struct{} // closed and replaced at every event
	err         error         // why it ended
}

// roll is a change of a pod template.
type roll struct {
	at   time.Time
	name string
}

// watchTemplates follows the Deployments until ctx ends or the watch fails. The waits return that
// failure.
func (b *bench) watchTemplates(ctx context.Context, namespace string) *templateWatch {
	w := &templateWatch{deployments: map[string]*appsv1.Deployment{}, changed: make(chan struct{})}
	go func() {
		err := w.follow(ctx, b, namespace)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = fmt.Errorf("the watch of Deployments ended: %w", err)
		close(w.changed)
	}()
	return w
}

func (w *templateWatch) follow(ctx context.Context, b *bench, namespace string) error {
	events, err := b.admin.AppsV1().Deployments(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		now := time.Now()
		d, ok := event.Object.(*appsv1.Deployment)
		if !ok {
			return fmt.Errorf("unexpected event %s", event.Type)
		}
		w.observe(now, event.Type, d)
	}
	return context.Cause(ctx)
}

func (w *templateWatch) observe(now time.Time, kind watch.EventType, d *appsv1.Deployment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.deployments[d.Name]
	if kind == watch.Deleted {
		delete(w.deployments, d.Name)
		return
	}
	w.deployments[d.Name] = d
	if before != nil && !equality.Semantic.DeepEqual(before.Spec.Template, d.Spec.Template) {
		w.rolls = append(w.rolls, roll{now, d.Name})
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// allRecorded returns an error unless n Deployments have the annotation that records their state.
func (w *templateWatch) allRecorded(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	recorded := 0
	for _, d := range w.deployments {
		if d.Annotations["quartermaster.dev/reload-state"] != "" {
			recorded++
		}
	}
	if recorded < n {
		return fmt.Errorf("%d of %d have it", recorded, n)
	}
	return nil
}

// mark returns the place in the history to wait from.
func (w *templateWatch) mark() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.rolls)
}

// rolled waits for the first change of a Deployment's template since mark, and returns when it was
// seen.
func (w *templateWatch) rolled(ctx context.Context, mark int, name string) (time.Time, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%s was not rolled within %s", name, patience))
	defer cancel()
	for {
		w.mu.Lock()
		rolls, changed, err := w.rolls[mark:], w.changed, w.err
		w.mu.Unlock()
		for _, r := range rolls {
			if r.name == name {
				return r.at, nil
			}
		}
		if err != nil {
			return time.Time{}, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, context.Cause(ctx)
		}
	}
}

// parallel calls do with 0 to n-1, several at once, until one call fails.
func parallel(ctx context.Context, workers, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}
