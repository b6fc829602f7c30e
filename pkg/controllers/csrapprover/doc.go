// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package csrapprover approves the requests of kubelets for serving certificates.
//
// A request is a key in the turn of its node. Its reconcile reads the request and the Node live, decides in
// package policy, which is pure, and approves exactly the version that it has read. A request that fails a
// check waits: for a change of its Node, or of a Node that shares a name or an address with it, and where the
// reason is not in a Node, for a few minutes.
//
//	cache.go       what the cache keeps, and which events concern which requests
//	memory.go      what a run remembers
//	controller.go  a reconcile
//	write.go       the approval, the Events, refusals
//
// The state, besides the cache:
//
//	state           what it is                         set by              cleared by
//	waitStates      why a request waits, its refusals  a failed check, or  the request is decided or gone
//	                                                   a refusal
//	sentApprovals   approvals that the cache may lack  an approval         the request is decided or gone
//	apiServerNames  the API server's addresses         a read              its age
//	notices         when refusals were told            an Event            its age
package csrapprover
