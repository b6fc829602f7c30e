// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import "context"

type workKey struct{}

// WithWork returns a copy of ctx, for [Controller].Run, whose reconciles end at
// the latest when work does: ctx asks a controller to drain, work cuts it off.
// The write fence stops what goes to the API server; this stops the rest, such as
// a call of another service.
func WithWork(ctx, work context.Context) context.Context {
	return context.WithValue(ctx, workKey{}, work)
}

// workContext returns the context of reconciles: it does not end with ctx but with
// the context that WithWork gave it, for the same cause.
func workContext(ctx context.Context) (work context.Context, stop context.CancelFunc) {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop = func() { cancel(nil) }
	if host, ok := ctx.Value(workKey{}).(context.Context); ok {
		unlink := context.AfterFunc(host, func() { cancel(context.Cause(host)) })
		stop = func() { unlink(); cancel(nil) }
	}
	return work, stop
}
