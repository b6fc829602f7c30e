// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// replica is a Pod behind its own proxy. One manager after the other runs in it, as a kubelet would
// start them.
type replica struct {
	*cluster.Replica
	proxy *faultproxy.Proxy
	setup setup

	mu      sync.Mutex
	lives   int
	manager *cluster.Manager // the current life; nil before the first
}

// setup says what the replicas of a test run.
type setup struct {
	program string // path; empty: the manager
	args    []string
}

// replicas are the replicas of a test.
type replicas []*replica

// newReplicas starts n replicas and waits until they are ready. They end with the test.
func newReplicas(ctx context.Context, t testing.TB, n int, s setup) replicas {
	t.Helper()
	var all replicas
	for range n {
		pod, proxy := shared.NewReplicaBehindProxy(ctx, t)
		r := &replica{Replica: pod, proxy: proxy, setup: s}
		t.Cleanup(func() { r.cleanUp(t) })
		all = append(all, r)
		assert.NoError(t, r.start())
	}
	for _, r := range all {
		fleet.Eventually(ctx, t, r.checkReady)
	}
	return all
}

// start begins a life.
func (r *replica) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lives++
	args := append([]string{"--config-reload-quiet-period=0", "--kube-api-qps=500", "--kube-api-burst=1000"}, fleet.ShortTimings...)
	m, err := shared.StartLife(r.Replica, r.lives, cluster.ManagerOptions{Binary: r.setup.program, Args: append(args, r.setup.args...)})
	if err == nil {
		r.manager = m
	}
	return err
}

// life returns the current or last life.
func (r *replica) life() *cluster.Manager {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.manager
}

func (r *replica) hasEnded() bool { return r.life().ExitCode() != -1 }

func (r *replica) checkReady() error {
	if m := r.life(); r.hasEnded() {
		return fmt.Errorf("%s ended with %d; its last lines:\n%s", m.Pod, m.ExitCode(), m.Tail(20))
	}
	return fleet.Ready(r.life())
}

func (r *replica) cleanUp(t testing.TB) {
	t.Helper()
	m := r.life()
	if t.Failed() {
		t.Logf("log of %s:\n%s", m.Pod, m.Tail(40))
	}
	// A request that a test still holds would delay the end as well.
	_ = r.proxy.Close()
	_ = m.Signal(syscall.SIGCONT)
	m.Kill()
	shared.FreeLease(t, m)
}

// leader returns the replica whose Pod holds the Lease.
func (all replicas) leader(ctx context.Context) (*replica, error) {
	lease, err := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	holder := ptr.Deref(lease.Spec.HolderIdentity, "")
	for _, r := range all {
		if protocol.PodOf(holder) == r.Pod {
			return r, nil
		}
	}
	return nil, fmt.Errorf("the Lease is held by %q", holder)
}

// waitForLeader waits until a replica that is not in except holds the Lease.
func (all replicas) waitForLeader(ctx context.Context, except ...*replica) (leader *replica, err error) {
	err = fleet.Poll(ctx, func() (err error) {
		if leader, err = all.leader(ctx); err != nil {
			return err
		}
		for _, r := range except {
			if r == leader {
				return errors.New("the Lease is still held by " + r.Pod)
			}
		}
		return nil
	})
	return leader, err
}

// others returns all replicas but r.
func (all replicas) others(r *replica) replicas {
	var others replicas
	for _, o := range all {
		if o != r {
			others = append(others, o)
		}
	}
	return others
}

// isWork reports whether a request is part of a manager's work.
func isWork(r *http.Request) bool {
	return r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/deployments/")
}

// isLeaseWrite reports whether a request takes, renews or releases the Lease.
func isLeaseWrite(r *http.Request) bool {
	return r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/leases/")
}

// holdWork holds a replica's work at its proxy until the returned function is called. It waits
// until minHits requests are held, at most for the limit.
func (r *replica) holdWork(ctx context.Context, minHits int, limit time.Duration) (held *faultproxy.ActiveRule, release func()) {
	gate := make(chan struct{})
	held = r.proxy.Add(faultproxy.Rule{Match: isWork, Hold: gate})
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_ = held.WaitHits(ctx, minHits)
	return held, sync.OnceFunc(func() {
		held.Remove()
		close(gate)
	})
}
