// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
)

// workContext returns the context of reconciles. It does not end with ctx but with Work of the lifetime, and
// for the same cause. cutOff ends it and releases its resources.
func workContext(ctx context.Context) (work context.Context, cutOff context.CancelCauseFunc) {
	term := lifetime.FromContext(ctx)
	// A loop of another cluster outlasts the end of Run, but its reconciles must learn of it.
	draining, drain := context.WithCancel(ctx)
	unlinkRun := context.AfterFunc(term.Run, drain)
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	unlinkWork := context.AfterFunc(term.Work, func() { cancel(context.Cause(term.Work)) })
	return reconciling{draining: draining.Done()}.addTo(work), func(cause error) {
		unlinkRun()
		drain()
		unlinkWork()
		cancel(cause)
	}
}

// Draining returns a channel that is closed when the process, or the loop that runs the reconcile with this
// ctx, begins to drain: the reconcile should end soon, at a place from which its successor can go on. It may
// still write. For any other context, Draining returns nil.
func Draining(ctx context.Context) <-chan struct{} {
	return reconcilingFrom(ctx).draining
}

// drain takes no more keys, and calls cutOff if the reconciles in flight do not end in time. Call drained
// when these reconciles have ended.
func (l *Loop[K]) drain(ctx context.Context, cutOff context.CancelCauseFunc) (drained func()) {
	logger := klog.FromContext(ctx)
	l.setPhase(PhaseDraining)
	l.admitAdded(nil)
	logger.Info("Loop is draining", "inFlight", l.Status().InFlight)
	l.queue.close()
	d := l.opts.DrainTimeout
	if d == 0 {
		return func() {}
	}
	timer := time.AfterFunc(l.opts.drainTimeLeft(l.Status()), func() {
		logger.Info("Reconciles did not end within the drain time; cancelling them",
			"drainTimeout", d, "inFlight", l.Status().InFlight)
		cutOff(fmt.Errorf("the reconcile did not end within the %s that %s has to drain", d, l.opts))
	})
	return func() { timer.Stop() }
}

// drainTimeLeft returns how long the reconciles in flight may still take, if s is the status of the loop when
// it begins to drain.
func (o LoopOptions) drainTimeLeft(s Status) time.Duration {
	if o.Cluster == "" {
		return o.DrainTimeout
	}
	_, running := s.LongestRunning(time.Now())
	return max(o.DrainTimeout-running, 0)
}
