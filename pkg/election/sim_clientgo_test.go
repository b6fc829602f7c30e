// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"math/rand/v2"
	"net/http"
	"testing"

	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/component-base/metrics"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// simLeases makes the simulated client a client of client-go.
type simLeases struct {
	coordinationv1client.LeaseInterface // nil: the elector calls only the methods below
	client                              LeaseClient
}

func (l simLeases) Leases(string) coordinationv1client.LeaseInterface { return l }

func (l simLeases) Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error) {
	return own(l.client.Get(ctx, name, opts))
}

func (l simLeases) Create(ctx context.Context, lease *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return own(l.client.Create(ctx, lease, opts))
}

func (l simLeases) Update(ctx context.Context, lease *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return own(l.client.Update(ctx, lease, opts))
}

// own returns a copy, because client-go's elector changes the objects it gets.
func own(lease *coordinationv1.Lease, err error) (*coordinationv1.Lease, error) {
	return lease.DeepCopy(), err
}

// theirs is client-go's elector.
var theirs = simElector{run: runTheirs, faulty: true}

// runTheirs runs client-go's elector, with its release. Its only fence is the context that it passes
// to the leader.
func runTheirs(ctx context.Context, p *simProc) error {
	led := make(chan struct{})
	started := false
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "lease"},
			Client:     simLeases{client: &simClient{proc: p}},
			LockConfig: resourcelock.ResourceLockConfig{Identity: p.identity},
		},
		LeaseDuration:   p.sim.cfg.LeaseDuration.Duration,
		RenewDeadline:   p.sim.cfg.RenewDeadline.Duration,
		RetryPeriod:     p.sim.cfg.RetryPeriod.Duration,
		ReleaseOnCancel: true,
		Name:            "lease",
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				defer close(led)
				p.mu.Lock()
				started = true
				p.passes = func() bool { return ctx.Err() == nil }
				p.mu.Unlock()
				_ = p.lead(ctx, &http.Client{Transport: contextFence{ctx, p}})
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	elector.Run(ctx)
	p.mu.Lock()
	join := started
	p.mu.Unlock()
	if join {
		<-led
	}
	// The drain rule is checked at the release.
	return &LostError{Reason: protocol.ReasonReleased}
}

// contextFence refuses writes after the leader's context has ended.
type contextFence struct {
	ctx  context.Context
	next http.RoundTripper
}

func (f contextFence) RoundTrip(req *http.Request) (*http.Response, error) {
	if f.ctx.Err() != nil {
		return nil, writefence.ErrNotLeading
	}
	return f.next.RoundTrip(req)
}

// TestSimulationFindsFaultsOfClientGo is the control: the simulation must find the known faults of
// client-go's elector, or it would be too weak.
func TestSimulationFindsFaultsOfClientGo(t *testing.T) {
	m, err := display.NewMetrics(metrics.NewKubeRegistry())
	assert.NoError(t, err)
	const enough = 100
	found := runSeeds(t, 1, enough, theirs, m, clientFence).found
	for rule, fault := range map[string]string{
		ruleNoEarlySteal: "a short lease is stolen from a live leader",
		ruleOwnRelease:   "the release erases another holder",
		ruleDrainFirst:   "the release precedes the drain",
		ruleAfterPause:   "a leader writes after a pause",
		ruleOneLeader:    "two lead at the same instant",
	} {
		t.Logf("%d of %d seeds: %s", found[rule], enough, fault)
		if found[rule] == 0 {
			t.Errorf("the simulation did not find that %s", fault)
		}
	}
}

func clientFence(*rand.Rand) simFences { return simFences{client: true} }
