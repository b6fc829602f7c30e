// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"time"
)

type (
	processKey  struct{}
	drainingKey struct{}
)

// process is what the host tells a loop about the process.
type process struct {
	work    context.Context
	leading <-chan struct{}
}

// WithProcess returns a copy of ctx for [Controller].Run. When ctx ends, the controller must drain; when
// work ends, the contexts of its reconciles end too. The fence stops writes to the API server. The
// contexts stop the rest, such as a request to another service. leading is closed when this replica begins to
// lead.
func WithProcess(ctx, work context.Context, leading <-chan struct{}) context.Context {
	return context.WithValue(ctx, processKey{}, process{work, leading})
}

// processOf returns what WithProcess has put into ctx. Without it, work does not end and the replica leads.
func processOf(ctx context.Context) process {
	if p, ok := ctx.Value(processKey{}).(process); ok {
		return p
	}
	leads := make(chan struct{})
	close(leads)
	return process{context.WithoutCancel(ctx), leads}
}

// workContext returns the context of reconciles. It does not end with ctx but with the context of the
// process's work, and for the same cause. cutOff ends work and releases its resources.
func workContext(ctx context.Context) (work context.Context, cutOff context.CancelCauseFunc) {
	processWork := processOf(ctx).work
	work, cancel := context.WithCancelCause(context.WithValue(context.WithoutCancel(ctx), drainingKey{}, ctx.Done()))
	unlink := context.AfterFunc(processWork, func() { cancel(context.Cause(processWork)) })
	return work, func(cause error) { unlink(); cancel(cause) }
}

// Draining returns a channel that is closed when the process, or the loop that runs the reconcile with this
// ctx, begins to drain: the reconcile should end soon, at a place from which its successor can go on. It may
// still write. For any other context, Draining returns nil.
func Draining(ctx context.Context) <-chan struct{} {
	draining, _ := ctx.Value(drainingKey{}).(<-chan struct{})
	return draining
}

// drainTimeLeft returns how long the reconciles of a loop have to end that stops with a status.
func (o LoopOptions) drainTimeLeft(s Status) time.Duration {
	if o.Cluster == "" {
		return o.DrainTimeout
	}
	_, running := s.LongestRunning(o.Clock.Now())
	return max(o.DrainTimeout-running, 0)
}
