// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// early is less than the time after which a lease of the default duration, 15 s, can have expired,
// since it was renewed at most 2 s before, and much more than a take-over on evidence takes.
const early = 10 * time.Second

// TestTakeOverOnEvidence ends leaders with the default timings and checks by the Lease that another
// holds it before it has expired, and that it works.
func TestTakeOverOnEvidence(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{
		"the leader is killed":  syscall.SIGKILL,
		"the leader is stopped": syscall.SIGSTOP,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			s := shared.NewShop(ctx, t)
			old := shared.RunLeader(ctx, t)
			next := shared.RunStandby(ctx, t)
			s.WaitUntilKnown(ctx, t, "web")
			waitForEvidence(ctx, t, next, "Answers", apifence.Enforced)

			ended := time.Now()
			if err := old.Signal(signal); err != nil {
				t.Fatal(err)
			}
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
	s := shared.NewShop(ctx, t)
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
			return fmt.Errorf("the lease is still held by %s", now)
		}
		return nil
	})
	expectEarly(ctx, t, ended)
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)
}

// TestLongPartitionBetweenReplicasMovesNothing cuts the connection between replicas, which both still
// reach the API server.
func TestLongPartitionBetweenReplicasMovesNothing(t *testing.T) {
	for name, cut := range map[string]func(*detour){
		"packets are lost":                        (*detour).hang,
		"connections are reset, as by a firewall": (*detour).reset,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			leader := shared.RunLeader(ctx, t)
			way := newDetour(ctx, t)
			standby := shared.RunStandby(ctx, t)
			waitForEvidence(ctx, t, standby, "Answers", apifence.Enforced)

			cut(way)
			waitForEvidence(ctx, t, standby, "Silent", apifence.Enforced)
			renewed := shared.Lease(ctx, t).Spec.RenewTime
			for range 3 {
				fleet.Eventually(ctx, t, func() error {
					if now := shared.Lease(ctx, t).Spec.RenewTime; !now.After(renewed.Time) {
						return fmt.Errorf("renewed at %s", now)
					}
					return nil
				})
				renewed = shared.Lease(ctx, t).Spec.RenewTime
			}
			if holder := shared.HolderPod(ctx, t); holder != leader.Pod {
				t.Errorf("%s holds the lease", holder)
			}
		})
	}
}

// waitForEvidence waits until a manager sees that of the leader, and knows that of the fence.
func waitForEvidence(ctx context.Context, t *testing.T, m *cluster.Manager, process protocol.LeaderState, fence apifence.State) {
	t.Helper()
	token, err := shared.AdminToken(ctx)
	if err != nil {
		t.Fatal(err)
	}
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
	t.Logf("the lease was taken after %s", took)
	if took > early {
		t.Errorf("the lease was taken after %s, when it had expired", took)
	}
}

// expectProof expects that a leader that took the Lease early has started since the API server refuses its
// predecessor, and not when the claim had ended.
func expectProof(ctx context.Context, t *testing.T, m *cluster.Manager) {
	t.Helper()
	token, err := shared.AdminToken(ctx)
	if err != nil {
		t.Fatal(err)
	}
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

// detour is a way from standbys to the leader that can be cut. The Lease leads there.
type detour struct {
	net.Listener
	mu    sync.Mutex // held while nothing passes
	conns []*net.TCPConn
}

func newDetour(ctx context.Context, t *testing.T) *detour {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &detour{Listener: listener}
	t.Cleanup(func() { _ = listener.Close() })
	var note map[string]any
	fleet.Eventually(ctx, t, func() error {
		return json.Unmarshal([]byte(shared.Lease(ctx, t).Annotations[protocol.ProcessAnnotation]), &note)
	})
	leader := note["address"].(string)
	go d.serve(leader)
	note["address"] = listener.Addr().String()
	value, err := json.Marshal(note)
	if err != nil {
		t.Fatal(err)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{protocol.ProcessAnnotation: string(value)}}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Patch(ctx, fleet.LeaseName, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *detour) serve(leader string) {
	for {
		in, err := d.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", leader)
		if err != nil {
			_ = in.Close()
			return
		}
		d.mu.Lock()
		d.conns = append(d.conns, in.(*net.TCPConn))
		d.mu.Unlock()
		go d.pass(out, in)
		go d.pass(in, out)
	}
}

func (d *detour) pass(to io.WriteCloser, from io.ReadCloser) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		d.mu.Lock()
		d.mu.Unlock() //nolint:staticcheck // it waits while nothing passes
		if err == nil {
			_, err = to.Write(buf[:n])
		}
		if err != nil {
			_ = to.Close()
			_ = from.Close()
			return
		}
	}
}

// hang lets nothing pass any more.
func (d *detour) hang() { d.mu.Lock() }

// reset ends the connections like a firewall, and refuses others.
func (d *detour) reset() {
	_ = d.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.conns {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
}
