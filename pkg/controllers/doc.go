// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllers has what an author needs to write a controller, and the interface by which the manager
// runs it.
//
// An [Entry] describes a controller to the manager: its flags, what it needs in the cache, what it may do,
// and New, which builds the [Controller]. New gets the [Host]: the cache, clients with fenced writes,
// server-side [Host.Apply], and other clusters ([Cluster]).
//
// Most controllers are a [Loop] around a reconcile function. A [Watch] maps the events of an informer to the
// keys that are to be reconciled:
//
//	c.Loop, err = controllers.NewLoop(host.LoopOptions, c.reconcile, controllers.WatchSelf(informer))
//
// # Which keys come first
//
// The queue of a loop has two lanes. Changes, requeues and the keys of [Loop.Enqueue] come before objects
// that are in the cache when a new leader starts. For every four keys of the first lane one of the second is
// taken, so that a tenant who writes all the time does not keep a new leader from the objects that it has to
// look at.
//
// In each lane the tenants of the keys take turns, one key each. So a change of one tenant does not wait
// for the hundreds of keys that another has due. The tenant of a [cache.ObjectName] is its namespace; the
// tenant of another type of key is what its method Tenant() string returns. Other keys have one tenant
// together. A reconcile that makes other keys due names the tenant whose object asked for that, see
// [Loop.EnqueueFor].
package controllers
