// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ttl deletes objects whose time has passed, by their annotations or by rules of a file.
//
// types.go follows every type of objects that the flags and the API server permit. The cache keeps
// the objects that have an annotation or that a rule chooses, and nothing of others. The rules are
// evaluated where the cache decodes an object, and their verdict is the digest that the cache keeps.
// horizon.go records the objects that are due within an hour, and enqueues them: when they change, and
// twice an hour, when it looks through the caches. Other objects have no record and no timer. The
// reconcile of an object decides in package policy, which is pure, when the object is due, and runs
// again then. It reads a due object live, decides again, and deletes the object with the UID and the
// version that it has read.
//
//	controller.go  a reconcile
//	objects.go     live reads and deletions, with the server's clock
//	delete.go      requests, what becomes of their answers, Events
//	kinds.go       what a run remembers
//	rules.go       the rules for the objects of a type
//	horizon.go     which objects are recorded
//	command.go     the command that shows what a file of rules would delete
//	types.go       discovery
//
// The state (the breakers, the notices and the faults outlive a run):
//
//	state            what it is                            set by              cleared by
//	kinds            the types that are followed           types.go            types.go
//	records          the objects due within an hour        horizon.go          horizon.go, the end of the type
//	firstSeen        since when a record is as it is       horizon.go          a change that matters
//	tracked          the objects that may expire; those    the type's handler  the handler, the end of the type
//	and expiring     of them that expire by a rule
//	failures         refusals in a row                     a worker            a worker
//	onceNotices      what owners are told once             a worker            newer notices
//	repeatedNotices  what they are told again              a worker            time, newer notices
//	faultNotices     the rules whose faults were told      the type's handler  a minute
//	faults           the last object a rule failed for     the type's handler  nobody
//	breakers         the deletions of the last minute      a worker            time
//	                 until when nothing is deleted         a worker            time
//	pausedUntil      until when a type is left alone       a worker            time, the end of the type
package ttl
