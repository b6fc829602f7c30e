// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package informers keeps the one cache of the process: one watch per resource, shared by all
// controllers, holding no more of an object than a controller has declared that it needs.
//
// Every controller states its [Need] of a resource beside its registry entry. [New] unites the needs
// of a resource into one plan, which decides the form of what is cached:
//
//   - metadata: the server sends metadata only, the cache holds an [Object];
//   - content digest: the server sends the object, the cache holds an [Object] with what the declared
//     digests make of it: a hash of a Secret's data, the references of a pod template. The rest is
//     dropped before client-go's informer sees it;
//   - typed: the usual API type;
//   - unstructured: the same for custom resources.
//
// Objects are reduced between the client's decoder and client-go's reflector, not by a transform of the
// informer: so no list, temporary store or queue ever holds a full object for longer than its own
// decoding, on the streaming and on the paged path alike.
//
// The informers run on the leader and on a warm standby. Event handlers belong to the controllers, who
// register them when they run: a standby has none.
package informers
