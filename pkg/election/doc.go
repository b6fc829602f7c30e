// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package election elects one leader among the replicas of a process through a
// coordination.k8s.io/v1 Lease, and refuses the writes of replicas that do not lead.
//
// The record on the wire is the same as in k8s.io/client-go/tools/leaderelection, so electors of both
// kinds can compete for one Lease, and kubectl shows the holder of either kind. No elector on the Lease may
// use a lease duration longer than protocol.MaxLease.
// docs/adr/0003-leader-election.md has the rules, which comments cite by their numbers, and why two
// replicas cannot write at the same time.
//
// The package protocol decides what to do next. run.go follows these decisions, from standing by to
// the release, and requests.go makes the requests. writefence and apifence refuse writes, in the
// client and in the API server, witness looks for a hint that the Lease may be taken before it has
// expired, and display shows the state.
package election
