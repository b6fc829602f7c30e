// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package informers keeps the one cache of the process. All controllers share one watch per
// resource, and the cache holds no more of an object than some controller has declared that it
// needs.
//
// Every controller declares its [Need] of a resource beside its registry entry. [New] unites the
// needs of a resource into one plan, which decides the form of the cached objects:
//
//   - metadata: the server sends metadata only, and the cache holds an [Object];
//   - content digest: the server sends the object, and the cache holds an [Object] with the declared
//     digests, such as a hash of a Secret's data or the references of a pod template. The rest is
//     dropped before it reaches client-go's informer;
//   - typed: the usual API type;
//   - unstructured: an object of any type, as its JSON has it.
//
// Objects are reduced between the client's decoder and client-go's reflector, not by a transform of
// the informer. So no list, temporary store or queue holds a full object for longer than its
// decoding takes, whether the list is streamed or paged.
//
// The informers run on the leader and on a warm standby. Controllers register their event handlers when
// they are built, on every replica; on a standby they drop the events.
package informers
