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
//	controller.go    a reconcile
//	objects.go       live reads and deletions, with the server's clock
//	delete.go        requests, what becomes of their answers, Events
//	followedtype.go  what a run remembers of a type and its objects
//	rules.go         the rules for the objects of a type
//	horizon.go       which objects are recorded
//	command.go       the command that shows what a file of rules would delete
//	types.go         discovery
//
// The state (the breakers, the notices and the faults outlive a run):
//
//	state            what it is                            set by                  cleared by
//	types            the types that are followed           discovery               discovery
//	records          the objects due within an hour        a change, a look twice  a later deadline, the end of
//	                                                       an hour                 the type
//	firstSeen        since when a record is as it is       a new record            a change that matters
//	objectCount,     the objects that may expire; those    an object that comes    an object that goes, the end
//	ruleCounts       of them that expire by a rule                                 of the type
//	failures         refusals in a row                     a failed request        the end of the record
//	onceNotices      what owners are told once             a problem               newer notices
//	repeatedNotices  what owners are told again after an   a failed request        expiry, newer notices
//	                 hour
//	faultNotices     the rules whose faults were told      a rule that fails       expiry, a minute
//	faults           the last object a rule failed for     a rule that fails       nothing
//	breakers         the deletions of the last minute,     a deletion              expiry
//	                 and until when nothing is deleted     too many due objects    expiry
//	pausedUntil      until when a type is left alone       a slow request, clocks  expiry, the end of the type
//	                                                       that differ
package ttl
