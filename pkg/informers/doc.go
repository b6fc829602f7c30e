// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package informers keeps the one cache of the process. Controllers share watches, and the cache holds
// no more of an object than some controller has declared that it needs.
//
// Every controller declares its [Need] of a resource in its entry. [Caches.AddCluster] unites the needs that
// go together into a plan. An informer serves a plan: it keeps an [Object] for each object of the API server,
// with the declared metadata and digests, and with the whole object if some controller needs that. [For]
// returns it with the type of its objects.
//
// Who has what:
//
//	Caches           the caches of the process, one per cluster; their metrics and /debug/informers
//	ClusterCache     the informers for one cluster
//	Cache            a ClusterCache as one controller gets it, in its Host or of another cluster
//	Informer[T]      one resource as one controller gets it, with the type of its objects
//	Following[T]     one resource that a controller asked for at run time
//
// For the manager, not for authors of controllers, are [Caches], [NewCaches], [CacheConfig] and
// [ClusterCache]. They may change in any release.
//
// An event passes, in this order: a feed, which reads one namespace or all by client-go's reflector;
// reduce, which makes an Object of the decoded object; the store of the informer, where the Object learns
// from its predecessor; a listener for each handler.
//
// Where to look:
//
//	need.go, plan.go                                 what controllers need, and what one informer serves
//	clustercache.go, follow.go, view.go              the informers of a cluster, and how controllers get them
//	source.go, decode.go, anyversion.go              how a resource is asked for and decoded
//	feed.go, attempt.go, requests.go, firstlists.go  lists and watches of one informer
//	reduce.go, object.go, history.go                 what is kept of an object
//	informer.go, store.go, badobjects.go             the cached objects, and the calls for each change
//	state.go, failures.go, status.go, metrics.go     what the requests came to
//
// The informers run on the leader and on a warm standby.
package informers
