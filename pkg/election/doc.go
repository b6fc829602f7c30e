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
// The package protocol has the rules: what to do next, and what changes when something has happened. run.go
// asks it and does what it says, from standing by to the release; requests.go makes the requests. The
// packages writefence and apifence refuse writes, in the client and in the API server, debug shows the
// state, and witness looks for a hint that the Lease may be taken before it has expired.
//
// docs/adr/0003-leader-election.md explains why two replicas cannot pass the fence at the same
// time.
package election
