// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// earlyLimit is less than the time after which a Lease of the default duration, 15 s, can have expired,
// since it was renewed at most 2 s before, and much more than a takeover on evidence takes.
const earlyLimit = 10 * time.Second

// TestStandbyTakesOverOnEvidence ends a leader, or lets it seem to have ended, with the default timings and
// checks by the Lease that another holds it before it has expired, and that it works.
func TestStandbyTakesOverOnEvidence(t *testing.T) {
	for name, prepare := range map[string]func(context.Context, *testing.T, *cluster.Manager) (end func()){
		"the leader is killed": func(_ context.Context, _ *testing.T, leader *cluster.Manager) func() { return leader.Kill },
		"a proxy makes it look as if it had ended": func(ctx context.Context, t *testing.T, _ *cluster.Manager) func() {
			t.Helper()
			return shared.NewLeaderProxy(ctx, t).CloseCleanly
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			s := shared.NewSample(ctx, t)
			old := shared.RunLeader(ctx, t)
			end := prepare(ctx, t, old)
			next := shared.RunStandby(ctx, t)
			s.WaitUntilKnown(ctx, t, "web")
			waitForEvidence(ctx, t, next, "Answers", apifence.Enforced)

			ended := time.Now()
			end()
			shared.WaitForLeader(ctx, t, next)
			expectEarly(ctx, t, ended)
			expectProof(ctx, t, next)
			s.Paint(ctx, t, "red")
			s.WaitForReplicaSets(ctx, t, "web", 2)
		})
	}
}

// TestContainerIsRestartedInItsPod kills the only replica and starts the next life of its Pod, at the
// same port as a kubelet does.
func TestContainerIsRestartedInItsPod(t *testing.T) {
	ctx := fleet.Context(t)
	s := shared.NewSample(ctx, t)
	pod := shared.NewReplica(ctx, t)
	first := shared.Run(t, pod, cluster.ManagerOptions{})
	shared.WaitForLeader(ctx, t, first)
	s.WaitUntilKnown(ctx, t, "web")
	holder := *shared.Lease(ctx, t).Spec.HolderIdentity
	waitForEvidence(ctx, t, first, "Unknown", apifence.Enforced)

	ended := time.Now()
	first.Kill()
	port := first.SecureURL[strings.LastIndex(first.SecureURL, ":")+1:]
	shared.Run(t, pod, cluster.ManagerOptions{Args: []string{"--secure-port=" + port}})
	fleet.Eventually(ctx, t, func() error {
		if now := *shared.Lease(ctx, t).Spec.HolderIdentity; now == holder {
			return fmt.Errorf("the Lease is still held by %s", now)
		}
		return nil
	})
	expectEarly(ctx, t, ended)
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)
}

// TestPartitionOfReplicasMovesNothing cuts the connection between replicas, which both still
// reach the API server.
func TestPartitionOfReplicasMovesNothing(t *testing.T) {
	for name, cut := range map[string]func(*fleet.LeaderProxy){
		"packets are lost":                        (*fleet.LeaderProxy).Stall,
		"connections are reset, as by a firewall": (*fleet.LeaderProxy).Reset,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			leader := shared.RunLeader(ctx, t)
			proxy := shared.NewLeaderProxy(ctx, t)
			standby := shared.RunStandby(ctx, t)
			waitForEvidence(ctx, t, standby, "Answers", apifence.Enforced)

			cut(proxy)
			renewed := shared.Lease(ctx, t).Spec.RenewTime
			for range 4 {
				fleet.Eventually(ctx, t, func() error {
					if now := shared.Lease(ctx, t).Spec.RenewTime; !now.After(renewed.Time) {
						return fmt.Errorf("renewed at %s", now)
					}
					return nil
				})
				renewed = shared.Lease(ctx, t).Spec.RenewTime
			}
			if holder := shared.HolderPod(ctx, t); holder != leader.Pod {
				t.Errorf("%s holds the Lease", holder)
			}
		})
	}
}

// waitForEvidence waits until a manager sees this state of the leader's process and of the fence.
func waitForEvidence(ctx context.Context, t *testing.T, m *cluster.Manager, process protocol.LeaderState, fence apifence.State) {
	t.Helper()
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error {
		code, body, err := fleet.Get(m.SecureURL+"/debug/leader?format=json", token)
		var got struct {
			ServerFence   apifence.State
			LeaderProcess protocol.LeaderState
		}
		if err == nil {
			err = json.Unmarshal([]byte(body), &got)
		}
		if err == nil && (got.ServerFence != fence || got.LeaderProcess != process) {
			err = fmt.Errorf("%s: %d, %+v", m.Pod, code, got)
		}
		return err
	})
}

// expectEarly expects that the Lease was taken before it could expire.
func expectEarly(ctx context.Context, t *testing.T, ended time.Time) {
	t.Helper()
	took := shared.Lease(ctx, t).Spec.AcquireTime.Sub(ended)
	t.Logf("the Lease was taken after %s", took)
	if took > earlyLimit {
		t.Errorf("the Lease was taken after %s, when it had expired", took)
	}
}

// expectProof expects that a leader that took the Lease early has started since the API server refuses its
// predecessor, and not when the claim had ended.
func expectProof(ctx context.Context, t *testing.T, m *cluster.Manager) {
	t.Helper()
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error {
		_, body, err := fleet.Get(m.SecureURL+"/debug/leader?format=json", token)
		var got struct {
			Start struct{ After, Why string }
		}
		if err == nil {
			err = json.Unmarshal([]byte(body), &got)
		}
		if err == nil && got.Start.After != "Proved" {
			err = fmt.Errorf("it has started after %q: %s", got.Start.After, got.Start.Why)
		}
		return err
	})
}
