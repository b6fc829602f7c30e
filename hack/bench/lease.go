// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"
)

// leaseWatch follows one Lease of kube-system through the benchmark's own client.
type leaseWatch struct {
	mu      sync.Mutex
	history []leaseView
	changed chan struct{} // closed and replaced at every change
}

// leaseView is a version of the Lease and the time at which the watch delivered it.
type leaseView struct {
	at    time.Time
	lease *coordinationv1.Lease
}

func (v leaseView) holder() string { return ptr.Deref(v.lease.Spec.HolderIdentity, "") }

// watchLease starts to follow a Lease, at most once, until ctx ends.
func (b *bench) watchLease(ctx context.Context, name string) *leaseWatch {
	if w := b.leases[name]; w != nil {
		return w
	}
	w := &leaseWatch{changed: make(chan struct{})}
	b.leases[name] = w
	go func() {
		for ctx.Err() == nil && !b.stopping.Load() {
			if err := w.follow(ctx, b, name); err != nil && ctx.Err() == nil && !b.stopping.Load() {
				b.progress("The watch of Lease %s failed: %v", name, err)
				_ = sleep(ctx, time.Second) // the loop notices the end of ctx
			}
		}
	}()
	return w
}

// follow watches until the API server ends the watch, which it does after about an hour.
func (w *leaseWatch) follow(ctx context.Context, b *bench, name string) error {
	events, err := b.admin.CoordinationV1().Leases(metav1.NamespaceSystem).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
	})
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		now := time.Now()
		lease, ok := event.Object.(*coordinationv1.Lease)
		if !ok {
			return fmt.Errorf("unexpected event %s", event.Type)
		}
		w.mu.Lock()
		w.history = append(w.history, leaseView{now, lease})
		close(w.changed)
		w.changed = make(chan struct{})
		w.mu.Unlock()
	}
	return nil
}

// mark returns the place in the history to wait from.
func (w *leaseWatch) mark() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.history)
}

// last returns the newest version; false if there was none yet.
func (w *leaseWatch) last() (leaseView, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.history) == 0 {
		return leaseView{}, false
	}
	return w.history[len(w.history)-1], true
}

// newHolder waits for the first version since mark with a holder other than old.
func (w *leaseWatch) newHolder(ctx context.Context, mark int, old string) (leaseView, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("nobody took the Lease from %q within %s", old, patience))
	defer cancel()
	for {
		w.mu.Lock()
		seen, changed := w.history[mark:], w.changed
		w.mu.Unlock()
		for _, v := range seen {
			if v.holder() != "" && v.holder() != old {
				return v, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return leaseView{}, context.Cause(ctx)
		}
	}
}
