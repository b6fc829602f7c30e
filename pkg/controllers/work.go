// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import "context"

type workKey struct{}

// WithWork returns a copy of ctx for [Controller].Run. When ctx ends, the controller must drain;
// when work ends, the contexts of its reconciles end too. The write fence stops what goes to the
// API server. This stops the rest, such as a request to another service.
func WithWork(ctx, work context.Context) context.Context {
	return context.WithValue(ctx, workKey{}, work)
}

// workContext returns the context of reconciles. It does not end with ctx but with the context that
// was passed to WithWork, and for the same cause. stop ends it and releases its resources.
func workContext(ctx context.Context) (work context.Context, stop context.CancelFunc) {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop = func() { cancel(nil) }
	if host, ok := ctx.Value(workKey{}).(context.Context); ok {
		unlink := context.AfterFunc(host, func() { cancel(context.Cause(host)) })
		stop = func() { unlink(); cancel(nil) }
	}
	return work, stop
}
