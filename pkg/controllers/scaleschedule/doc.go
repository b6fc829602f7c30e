// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package scaleschedule scales workloads down outside working hours, and back.
//
// A change of a workload, of its Namespace or of what else scales it enqueues the workload. Its reconcile
// decides in package policy, which is pure, whether the workload is to be up or down now and when that may
// change next, and runs again then. One patch writes the number of replicas and, in an annotation, the number
// to return to, so that neither a crash nor another writer can part the two.
//
//	controller.go  a reconcile
//	write.go       requests, what becomes of their answers, Events
//	memory.go      what a run remembers
//	kinds.go       the kinds of workloads
//
// The state (only the notices outlive a run):
//
//	state            what it is                                  set by                   cleared by
//	History          who raises a workload that is to be down,   a decision; a record     a decision other than
//	                 and a record that somebody has removed      that is removed          down
//	failures         refusals in a row                           a write that fails       a write that succeeds
//	dryRunAction     what a dry run has told                     a dry run                another decision
//	clockCheckedAt   when the clocks were compared               a comparison             its age, a minute
//	writesAfter      until when nothing is written               clocks that differ       expiry
//	onceNotices      what owners are told once                   a Warning                newer notices
//	repeatedNotices  what they are told again after an hour      a refusal                expiry, newer notices
package scaleschedule
