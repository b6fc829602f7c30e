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
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// history is what a watch of the benchmark's own client has delivered: names, with the times.
type history struct {
	mu        sync.Mutex
	sightings []sighting
	changed   chan struct{} // closed and replaced at every addition
}

// sighting records when the watch showed a new holder of the Lease, or a Deployment with a changed template.
type sighting struct {
	at   time.Time
	name string
}

func newHistory() *history { return &history{changed: make(chan struct{})} }

func (h *history) add(s sighting) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sightings = append(h.sightings, s)
	close(h.changed)
	h.changed = make(chan struct{})
}

// position returns the place in the history to wait from.
func (h *history) position() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sightings)
}

// lastName returns the newest name, empty if there is none.
func (h *history) lastName() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.sightings) == 0 {
		return ""
	}
	return h.sightings[len(h.sightings)-1].name
}

// await waits for the first matching name since position.
func (h *history) await(ctx context.Context, position int, what string, match func(name string) bool) (sighting, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, waitTimeout, fmt.Errorf("%s: not within %s", what, waitTimeout))
	defer cancel()
	for {
		h.mu.Lock()
		sightings, changed := h.sightings[position:], h.changed
		h.mu.Unlock()
		for _, s := range sightings {
			if match(s.name) {
				return s, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return sighting{}, context.Cause(ctx)
		}
	}
}

// followWatch calls do with every event until ctx ends. It watches again when the API server ends a watch,
// which it does after about an hour.
func (b *bench) followWatch(ctx context.Context, what string, start func() (watch.Interface, error),
	do func(at time.Time, e watch.Event)) {
	go func() {
		for ctx.Err() == nil && !b.stopping.Load() {
			events, err := start()
			if err != nil {
				b.logProgress("The watch of %s failed: %v", what, err)
				_ = cluster.Sleep(ctx, time.Second) // the loop notices the end of ctx
				continue
			}
			for e := range events.ResultChan() {
				do(time.Now(), e)
			}
			events.Stop()
		}
	}()
}

// watchLease follows the holders of a Lease of kube-system, at most once, until ctx ends.
func (b *bench) watchLease(ctx context.Context, name string) *history {
	if h := b.leases[name]; h != nil {
		return h
	}
	h := newHistory()
	b.leases[name] = h
	b.followWatch(ctx, "Lease "+name, func() (watch.Interface, error) {
		return b.admin.CoordinationV1().Leases(metav1.NamespaceSystem).Watch(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()})
	}, func(at time.Time, e watch.Event) {
		if lease, ok := e.Object.(*coordinationv1.Lease); ok {
			h.add(sighting{at, ptr.Deref(lease.Spec.HolderIdentity, "")})
		}
	})
	return h
}

// awaitHolder waits for the first holder since position other than old.
func (h *history) awaitHolder(ctx context.Context, position int, old string) (sighting, error) {
	return h.await(ctx, position, fmt.Sprintf("take the Lease from %q", old),
		func(holder string) bool { return holder != "" && holder != old })
}

// watchTemplates follows the changes of pod templates of the Deployments of a namespace until ctx ends.
func (b *bench) watchTemplates(ctx context.Context, namespace string) *history {
	h := newHistory()
	templates := map[string]corev1.PodTemplateSpec{}
	b.followWatch(ctx, "Deployments", func() (watch.Interface, error) {
		return b.admin.AppsV1().Deployments(namespace).Watch(ctx, metav1.ListOptions{})
	}, func(at time.Time, e watch.Event) {
		d, ok := e.Object.(*appsv1.Deployment)
		if !ok || e.Type == watch.Deleted {
			return
		}
		if before, known := templates[d.Name]; known && !equality.Semantic.DeepEqual(before, d.Spec.Template) {
			h.add(sighting{at, d.Name})
		}
		templates[d.Name] = d.Spec.Template
	})
	return h
}

// awaitRoll waits for the first change of a Deployment's template since position, and returns when it was
// seen.
func (h *history) awaitRoll(ctx context.Context, position int, name string) (time.Time, error) {
	s, err := h.await(ctx, position, "roll "+name, func(rolled string) bool { return rolled == name })
	return s.at, err
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
