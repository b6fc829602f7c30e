// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faults injects faults everywhere around managers that always have work, and checks by the
// audit log that nobody wrote without leading.
//
// # What is promised
//
// Three managers run with leases of 3 s (L), renewed every 0.5 s, and a renew deadline (D) of 2 s.
// Let R be the revision of etcd at which another replica acquires the Lease. No write of the former
// leader is executed after R, with this exception:
//
// Before the API server executes a write, it asks the fence, which judges by the name in the
// Namespace quartermaster-leader as seen by that API server's own watch. So a write of the former
// leader passes if it is executed between R and the moment at which the next leader has named
// itself and this API server sees that: milliseconds, see TestFenceFollowsTheName.
// Once the first write of the next leader has passed, these milliseconds are over, since the fence would have
// refused that write before. Meanwhile the fence in the client keeps the former leader from writing:
//
//   - After a release no write is left: the release is sent when all work has returned.
//   - Before an expiry, the fence of a running leader has been closed, and its writes in flight
//     cancelled, for at least L - D less the clock error: 0.94 s here, never less than 0.25 s
//     (docs/adr/0003-leader-election.md).
//   - So a write in these milliseconds has been in flight for longer than that, because its sender,
//     the network or the API server stood still, and arrived just then. Only the API server could
//     refuse it.
//
// A Lease that is changed or deleted by hand has no such margin. Until its leader and the API
// server have seen the change, again milliseconds, the leader's writes pass. They do no harm, since
// other replicas wait for a whole lease duration. The judge counts them separately.
//
// With the fence in the client alone, everything sent before a pause is executed, however late;
// nothing is sent after the pause. TestLongPausedLeaderWithoutTheFence shows this,
// and that the judge sees forbidden writes when both fences are off.
package faults

import (
	"os"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the control plane of all tests of the package. It has no kube-controller-manager, whose
// own writes would only disturb.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Cluster: cluster.Options{WithoutControllerManager: true}}))
}
