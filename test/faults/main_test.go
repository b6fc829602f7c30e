// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faults breaks everything around managers that have work all the time, and judges by the audit log whether
// anybody has written who did not lead.
//
// # What is promised
//
// Three managers run with leases of 3 s (L), renewed every 0.5 s, and a renew deadline (D) of 2 s. Let R be the revision
// of etcd at which another replica acquires the Lease. No write of the former leader is executed after R, but for this:
//
// The API server asks the fence before it executes a write, by the Lease as its own watch has shown it. So a write of the
// former leader passes if its turn comes between R and the moment at which this API server sees R: milliseconds, see
// TestHowSoonTheFenceFollowsTheLease. The first write of the next leader that passes there proves that the moment is
// over, since it would be refused before. What keeps the former leader from writing in these milliseconds is the fence in
// the client:
//
//   - After a release nothing is left: it is sent when all work has returned.
//   - Before an expiry, the fence of a leader that runs has closed, and what was under way is cancelled, for at least
//     L - D less what clocks may err: 0.94 s here, never less than 0.25 s (docs/adr/0003-leader-election.md).
//   - So a write in these milliseconds has been on its way for longer than that, because its sender, the network or the
//     API server stood still, and came through just then. Nothing but the API server could refuse it.
//
// A Lease that is changed or deleted by hand has no such margin. Until its leader and the API server have seen that,
// again milliseconds, its writes pass; to nobody's harm, as other replicas wait for a whole lease duration. The judge
// counts these apart.
//
// With the fence in the client alone, whatever was sent before a pause is executed, however late; nothing is sent after
// it. TestLongPausedLeaderWithoutTheFenceInTheAPIServer shows this, and that without both fences the judge sees what must not be.
package faults

import (
	"os"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the control plane of all tests of the package, without kube-controller-manager, whose own writes would only
// make noise.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Cluster: cluster.Options{WithoutControllerManager: true}}))
}
