// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"syscall"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// drill is one fault being injected.
type drill struct {
	*rand.Rand
	replicas        replicas
	leader, standby *replica // when it began
}

// fault is one kind of fault. inject injects it and undoes it; processes may have ended afterwards.
type fault struct {
	name   string
	inject func(ctx context.Context, d *drill) error
	// exclusive is set if it is not combined with others.
	exclusive bool
	// pauses is set if it pauses the leader: it is not combined with another such fault, which
	// would wake the leader.
	pauses bool
}

// With fleet.ShortTimings the Lease is 3 s and the renew deadline 2 s. Times are chosen from ranges
// around these.
var faults = []fault{
	{name: "leader killed", inject: func(_ context.Context, d *drill) error { d.leader.life().Kill(); return nil }},
	{name: "standby killed", inject: func(_ context.Context, d *drill) error { d.standby.life().Kill(); return nil }},
	{name: "leader stopped in good order", inject: stopGracefully},
	{name: "leader paused, shorter than the Lease", pauses: true, inject: func(ctx context.Context, d *drill) error {
		return pause(ctx, d.leader, d.randomDuration(100, 1800))
	}},
	{name: "leader paused, about as long as the Lease", pauses: true, inject: func(ctx context.Context, d *drill) error {
		return pause(ctx, d.leader, d.randomDuration(1800, 3800))
	}},
	{name: "leader paused until another leads", pauses: true, inject: pauseUntilReplaced},
	{name: "leader paused until another leads, with writes queued", pauses: true, inject: pauseWithWritesQueued},
	{name: "standby paused", inject: func(ctx context.Context, d *drill) error {
		return pause(ctx, d.standby, d.randomDuration(100, 5000))
	}},
	{name: "leader partitioned, connections hang", inject: partition(faultproxy.Hang, pickLeader)},
	{name: "leader partitioned, connections reset", inject: partition(faultproxy.Reset, pickLeader)},
	{name: "standby partitioned, connections hang", inject: partition(faultproxy.Hang, pickStandby)},
	{name: "standby partitioned, connections reset", inject: partition(faultproxy.Reset, pickStandby)},
	{name: "lease writes delayed", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.randomReplicas(), d.randomDuration(1000, 6000), faultproxy.Rule{Match: isLeaseWrite, Delay: d.randomDuration(100, 3000)})
	}},
	{name: "responses to lease writes lost", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.randomReplicas(), d.randomDuration(500, 6000), faultproxy.Rule{Match: isLeaseWrite, DropResponse: true})
	}},
	{name: "responses to work lost", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.replicas, d.randomDuration(500, 3000), faultproxy.Rule{Match: isWork, DropResponse: true})
	}},
	{name: "work delayed", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.replicas, d.randomDuration(500, 4000), faultproxy.Rule{Match: isWork, Delay: d.randomDuration(100, 3000)})
	}},
	{name: "storm of 429", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.randomReplicas(), d.randomDuration(500, 5000), faultproxy.Rule{Match: d.randomMatch(), Status: http.StatusTooManyRequests, RetryAfter: time.Second})
	}},
	{name: "storm of 500", inject: func(ctx context.Context, d *drill) error {
		return d.rule(ctx, d.randomReplicas(), d.randomDuration(500, 5000), faultproxy.Rule{Match: d.randomMatch(), Status: http.StatusInternalServerError})
	}},
	{name: "API server restarted", exclusive: true, inject: func(ctx context.Context, _ *drill) error { return shared.RestartAPIServer(ctx) }},
	{name: "API server killed", exclusive: true, inject: func(ctx context.Context, d *drill) error {
		shared.KillAPIServer()
		fleet.Wait(ctx, d.randomDuration(0, 4000))
		return shared.StartAPIServer(ctx)
	}},
	{name: "API server paused", exclusive: true, inject: func(ctx context.Context, d *drill) error {
		if err := shared.SignalAPIServer(syscall.SIGSTOP); err != nil {
			return err
		}
		fleet.Wait(ctx, d.randomDuration(500, 5000))
		return shared.SignalAPIServer(syscall.SIGCONT)
	}},
	{name: "lease deleted", inject: func(ctx context.Context, _ *drill) error {
		err := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Delete(ctx, fleet.LeaseName, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) { // somebody else was faster
			return nil
		}
		return err
	}},
	{name: "lease taken by a stranger", inject: func(ctx context.Context, d *drill) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity = ptr.To("stranger_0")
			l.Spec.LeaseDurationSeconds = ptr.To(1 + d.Int32N(3))
			l.Spec.RenewTime = ptr.To(metav1.NowMicro())
			l.Spec.LeaseTransitions = ptr.To(ptr.Deref(l.Spec.LeaseTransitions, 0) + d.Int32N(2))
		})
		return err
	}},
	{name: "lease's holder cleared by hand", inject: func(ctx context.Context, _ *drill) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil })
		return err
	}},
	{name: "lease's duration changed by hand", inject: func(ctx context.Context, d *drill) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(1 + 5*d.Int32N(2)) })
		if err == nil && d.IntN(2) == 0 {
			d.leader.life().Kill() // perhaps before it has repaired it
		}
		return err
	}},
}

// combinesWith reports whether two faults may be injected together.
func (f fault) combinesWith(other fault) bool {
	return !f.exclusive && !other.exclusive && (!f.pauses || !other.pauses)
}

func pickLeader(d *drill) *replica  { return d.leader }
func pickStandby(d *drill) *replica { return d.standby }

// randomDuration returns a time between two numbers of milliseconds.
func (d *drill) randomDuration(least, most int) time.Duration {
	return time.Duration(least+d.IntN(most-least+1)) * time.Millisecond
}

// randomReplicas returns the leader alone, or all replicas.
func (d *drill) randomReplicas() replicas {
	if d.IntN(3) == 0 {
		return d.replicas
	}
	return replicas{d.leader}
}

// randomMatch returns a matcher of all requests, of those for the Lease, or of the work.
func (d *drill) randomMatch() func(*http.Request) bool {
	return []func(*http.Request) bool{nil, isLeaseWrite, isWork}[d.IntN(3)]
}

// applyRule applies a rule at the replicas' proxies for a while.
func (d *drill) rule(ctx context.Context, targets replicas, duration time.Duration, rule faultproxy.Rule) error {
	for _, r := range targets {
		defer r.proxy.Add(rule).Remove()
	}
	fleet.Wait(ctx, duration)
	return nil
}

func partition(mode faultproxy.Mode, pick func(*drill) *replica) func(context.Context, *drill) error {
	return func(ctx context.Context, d *drill) error {
		proxy := pick(d).proxy
		proxy.Partition(mode)
		defer proxy.Heal()
		fleet.Wait(ctx, d.randomDuration(100, 6000))
		return nil
	}
}

// stopGracefully stops the leader, half of the time during work that takes long.
func stopGracefully(ctx context.Context, d *drill) error {
	if d.IntN(2) == 0 {
		defer d.leader.proxy.Add(faultproxy.Rule{Match: isWork, Delay: d.randomDuration(100, 2000)}).Remove()
	}
	if err := d.leader.life().Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-d.leader.life().Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s does not end: %w", d.leader.Pod, context.Cause(ctx))
	}
}

func pause(ctx context.Context, r *replica, duration time.Duration) error {
	m := r.life()
	if err := m.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	fleet.Wait(ctx, duration)
	return m.Signal(syscall.SIGCONT)
}

func pauseUntilReplaced(ctx context.Context, d *drill) error {
	m := d.leader.life()
	if err := m.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_, err := d.replicas.waitForLeader(ctx, d.leader)
	fleet.Wait(ctx, d.randomDuration(0, 500))
	if err := m.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return err
}

// pauseWithWritesQueued releases the writes that the former leader has in flight, before or after
// it wakes.
func pauseWithWritesQueued(ctx context.Context, d *drill) error {
	_, release := d.leader.holdWork(ctx, 1+d.IntN(3), 2*time.Second)
	defer release()
	m := d.leader.life()
	if err := m.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_, err := d.replicas.waitForLeader(ctx, d.leader)
	fleet.Wait(ctx, d.randomDuration(0, 500))
	if d.IntN(2) == 0 {
		release()
		fleet.Wait(ctx, d.randomDuration(0, 50))
	}
	if err := m.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return err
}

// editLease changes the Lease like a user of kubectl, and returns it. If there is none, it waits
// for one.
func editLease(ctx context.Context, edit func(*coordinationv1.Lease)) (edited *coordinationv1.Lease, err error) {
	leases := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem)
	err = fleet.Poll(ctx, func() error {
		lease, err := leases.Get(ctx, fleet.LeaseName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		edit(lease)
		edited, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	})
	return edited, err
}
