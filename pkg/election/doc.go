// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package election elects one leader among the replicas of a process through a
// coordination.k8s.io/v1 Lease, and refuses the writes of replicas that do not lead.
//
// The record on the wire is that of k8s.io/client-go/tools/leaderelection, so electors of both
// kinds can compete for one Lease, and kubectl shows the holder of either. The behaviour differs:
//
//   - A standby watches the Lease. After a release it sends one Update at once, and it takes an
//     expired Lease at the moment it expires.
//   - Lock.Run calls lead, waits until it returns, and only then releases the Lease.
//   - A term ends when the renew deadline has passed since the moment before the last acknowledged
//     write was sent. Lock.Fence refuses writes outside of the term.
//
// protocol.go has the rules: what to do next, and what changes when something has happened, without
// I/O and clock. run.go asks it and does what it says, from standing by to the release; requests.go
// makes the requests. display.go and metrics.go show the state. fence.go is the write fence of the
// client; serverfence.go finds out whether the API server has one too. evidence.go says when a standby
// may take the Lease before it has expired, and the package witness looks for that evidence.
//
// docs/adr/0003-leader-election.md explains why two replicas cannot pass the fence at the same
// time.
package election
