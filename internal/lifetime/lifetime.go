// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package lifetime is what the manager tells the loops of a controller about its term.
//
//	context                                  ends
//	ctx of app.Run, and so of lead           with SIGTERM
//	ctx of a controller's Run, Lifetime.Run  with the term, and with SIGTERM; with EveryReplica with SIGTERM,
//	                                         or after the election
//	Lifetime.Work                            when the Lease was lost, or a drain took too long
//	ctx of a loop, its Background            with Run; in another cluster when that is closed
//	ctx of a reconcile                       with Work, or after LoopOptions.DrainTimeout, or its own Timeout
package lifetime

import "context"

type key struct{}

// Lifetime says when a controller must drain, how long its work may last, and from when on this replica
// leads.
type Lifetime struct {
	Run     context.Context // when it ends, the controller must drain
	Work    context.Context // when it ends, reconciles are cut off
	Leading <-chan struct{} // closed when this replica begins to lead
}

// NewContext returns a copy of ctx for Run of a controller. When ctx ends, the controller must drain; when
// work ends, the contexts of its reconciles end too. The fence stops writes to the API server. The contexts
// stop the rest, such as a request to another service. leading is closed when this replica begins to lead.
func NewContext(ctx, work context.Context, leading <-chan struct{}) context.Context {
	return Lifetime{Run: ctx, Work: work, Leading: leading}.AddTo(ctx)
}

// AddTo returns a copy of ctx from which FromContext returns l.
func (l Lifetime) AddTo(ctx context.Context) context.Context { return context.WithValue(ctx, key{}, l) }

// FromContext returns what NewContext has put into ctx. For a ctx without a Lifetime, Run is ctx, Work does
// not end and the replica leads.
func FromContext(ctx context.Context) Lifetime {
	if l, ok := ctx.Value(key{}).(Lifetime); ok {
		return l
	}
	leads := make(chan struct{})
	close(leads)
	return Lifetime{Run: ctx, Work: context.WithoutCancel(ctx), Leading: leads}
}
