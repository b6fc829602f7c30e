// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package election elects one leader among the replicas of a process through a
// coordination.k8s.io/v1 Lease, and keeps whoever does not lead from writing.
//
// The record on the wire is the one of k8s.io/client-go/tools/leaderelection,
// so electors of both kinds can compete for one Lease and kubectl shows the
// holder of either. The behaviour differs:
//
//   - A standby watches the Lease. It answers a release with one Update at once,
//     and takes an expired Lease at the moment it expires.
//   - Run calls lead, joins it, and releases the Lease only then.
//   - A term is valid until the renew deadline has passed since before the last
//     acknowledged write was sent. Lock.Fence refuses writes outside of it.
//
// The files: decide.go is the protocol, a pure function of what is known and of
// the time, and events.go what changes when something has happened. loop.go and
// requests.go do its I/O, run.go is the life of one replica from standing by to
// the release. fence.go is the write fence of the client, serverfence.go finds out
// whether the API server has one too.
//
// Why two replicas cannot pass the fence at the same time is argued in
// docs/adr/0003-leader-election.md.
package election
