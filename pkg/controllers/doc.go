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
// for the hundreds of keys that another has due. The tenant of a [cache.ObjectName], or of a key that embeds
// one, is its namespace; the tenant of another type of key is what its method Tenant() string returns. Other
// keys have one tenant together. A reconcile that makes other keys due names the tenant whose object asked
// for that, see [Loop.EnqueueFor]. With --namespaces, the tenant also says which namespace must have been
// listed before the key is taken: a tenant that is none of them waits for all.
//
// # What drops a key
//
// A key that has to be reconciled is dropped only where something else makes it due again:
//
//   - the queue, while the loop does not run: Run begins with the objects of the cache. The queue of a loop
//     for another cluster, or of one of Loops, opens earlier;
//   - the gate of a mapper (mapping.go), until the informers have synced: Run then lists the cache;
//   - a mapper that was removed, and a loop that was closed;
//   - an addition of the first list of a cache: Run, or Watch, shows the objects of the cache;
//   - a mapping that has panicked: the next event of its object.
//
// One loss is for good: the key of an object that is deleted while Run is about to be started again, after it
// has ended unexpectedly. What a controller remembers of objects it forgets when Run begins.
//
// Locks are taken in this order: in package informers Caches, ClusterCache, and informer, listener; here
// Loop, mapper, queue. A mapping is called under the lock of its mapper, an index function under that of
// its informer, and no other function of a controller under a lock.
package controllers
