// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package replication copies Secrets and ConfigMaps to other namespaces. A push source says where
// its copies go; a pull target names its source, which must permit that.
//
// An event enqueues the object and does nothing else, because finding the dependants of an object may be
// expensive. Reconciling a source enqueues its targets. Reconciling a target decides in package policy,
// which is pure, on what the cache has: hashes in place of values. Only if a write is due, source and
// target are read live, the decision is made again, and one request is sent. No value is kept after the
// request. A target that a push makes due is reconciled in the turn of the source's namespace, so that a
// source with many targets takes turns with others.
//
//	events.go      events, and which keys each of them concerns
//	controller.go  a reconcile of a target
//	write.go       requests, Events
//	memory.go      what a run remembers of a target
//
// Each copy names its source, in our marker or in what the original wrote. So a new leader finds
// everything that is left to do. A run also remembers, in memory.go:
//
//	field    what it is                                  set by                cleared by
//	targets  how each target stands, since when nobody   each decision, each   the decision that the
//	         wants it, how often a drift was repaired    write                 object is no target
//	sources  for how many namespaces each source counts  its reconcile         its reconcile
//	notices  the Events of the last ten minutes          each Event            age
package replication
