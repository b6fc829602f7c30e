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

// injection is one fault being injected.
type injection struct {
	*rand.Rand
	replicas        replicas
	leader, standby *replica // when it began
}

// fault is one kind of fault. inject injects it and undoes it; processes may have ended afterwards.
type fault struct {
	name   string
	inject func(ctx context.Context, i *injection) error
	// exclusive is set if it is not combined with others.
	exclusive bool
	// pauses is set if it pauses the leader: it is not combined with another such fault, which
	// would wake the leader.
	pauses bool
}

// With fleet.ShortTimings the Lease is 3 s and the renew deadline 2 s. Times are chosen from ranges
// around these.
var faults = []fault{
	{name: "leader killed", inject: func(_ context.Context, i *injection) error { i.leader.life().Kill(); return nil }},
	{name: "standby killed", inject: func(_ context.Context, i *injection) error { i.standby.life().Kill(); return nil }},
	{name: "leader stopped in good order", inject: stopGracefully},
	{name: "leader paused, shorter than the Lease", pauses: true, inject: func(ctx context.Context, i *injection) error {
		return pause(ctx, i.leader, i.randomDuration(100, 1800))
	}},
	{name: "leader paused, about as long as the Lease", pauses: true, inject: func(ctx context.Context, i *injection) error {
		return pause(ctx, i.leader, i.randomDuration(1800, 3800))
	}},
	{name: "leader paused until another leads", pauses: true, inject: pauseUntilReplaced},
	{name: "leader paused until another leads, with writes queued", pauses: true, inject: pauseWithWritesQueued},
	{name: "standby paused", inject: func(ctx context.Context, i *injection) error {
		return pause(ctx, i.standby, i.randomDuration(100, 5000))
	}},
	{name: "leader partitioned, connections hang", inject: partition(faultproxy.Hang, pickLeader)},
	{name: "leader partitioned, connections reset", inject: partition(faultproxy.Reset, pickLeader)},
	{name: "standby partitioned, connections hang", inject: partition(faultproxy.Hang, pickStandby)},
	{name: "standby partitioned, connections reset", inject: partition(faultproxy.Reset, pickStandby)},
	{name: "lease writes delayed", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.randomReplicas(), i.randomDuration(1000, 6000), faultproxy.Rule{Match: isLeaseWrite, Delay: i.randomDuration(100, 3000)})
	}},
	{name: "responses to lease writes lost", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.randomReplicas(), i.randomDuration(500, 6000), faultproxy.Rule{Match: isLeaseWrite, DropResponse: true})
	}},
	{name: "responses to work lost", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.replicas, i.randomDuration(500, 3000), faultproxy.Rule{Match: isWork, DropResponse: true})
	}},
	{name: "work delayed", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.replicas, i.randomDuration(500, 4000), faultproxy.Rule{Match: isWork, Delay: i.randomDuration(100, 3000)})
	}},
	{name: "storm of 429", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.randomReplicas(), i.randomDuration(500, 5000), faultproxy.Rule{Match: i.randomMatch(), Status: http.StatusTooManyRequests, RetryAfter: time.Second})
	}},
	{name: "storm of 500", inject: func(ctx context.Context, i *injection) error {
		return i.applyRule(ctx, i.randomReplicas(), i.randomDuration(500, 5000), faultproxy.Rule{Match: i.randomMatch(), Status: http.StatusInternalServerError})
	}},
	{name: "API server restarted", exclusive: true, inject: func(ctx context.Context, _ *injection) error { return shared.RestartAPIServer(ctx) }},
	{name: "API server killed", exclusive: true, inject: func(ctx context.Context, i *injection) error {
		shared.KillAPIServer()
		fleet.Wait(ctx, i.randomDuration(0, 4000))
		return shared.StartAPIServer(ctx)
	}},
	{name: "API server paused", exclusive: true, inject: func(ctx context.Context, i *injection) error {
		if err := shared.SignalAPIServer(syscall.SIGSTOP); err != nil {
			return err
		}
		fleet.Wait(ctx, i.randomDuration(500, 5000))
		return shared.SignalAPIServer(syscall.SIGCONT)
	}},
	{name: "lease deleted", inject: func(ctx context.Context, _ *injection) error {
		err := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Delete(ctx, fleet.LeaseName, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) { // somebody else was faster
			return nil
		}
		return err
	}},
	{name: "lease taken by a stranger", inject: func(ctx context.Context, i *injection) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity = ptr.To("stranger_0")
			l.Spec.LeaseDurationSeconds = ptr.To(1 + i.Int32N(3))
			l.Spec.RenewTime = ptr.To(metav1.NowMicro())
			l.Spec.LeaseTransitions = ptr.To(ptr.Deref(l.Spec.LeaseTransitions, 0) + i.Int32N(2))
		})
		return err
	}},
	{name: "lease's holder cleared by hand", inject: func(ctx context.Context, _ *injection) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil })
		return err
	}},
	{name: "lease's duration changed by hand", inject: func(ctx context.Context, i *injection) error {
		_, err := editLease(ctx, func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(1 + 5*i.Int32N(2)) })
		if err == nil && i.IntN(2) == 0 {
			i.leader.life().Kill() // perhaps before it has repaired it
		}
		return err
	}},
}

// combinesWith reports whether two faults may be injected together.
func (f fault) combinesWith(other fault) bool {
	return !f.exclusive && !other.exclusive && (!f.pauses || !other.pauses)
}

func pickLeader(i *injection) *replica  { return i.leader }
func pickStandby(i *injection) *replica { return i.standby }

// randomDuration returns a time between two numbers of milliseconds.
func (i *injection) randomDuration(least, most int) time.Duration {
	return time.Duration(least+i.IntN(most-least+1)) * time.Millisecond
}

// randomReplicas returns the leader alone, or all replicas.
func (i *injection) randomReplicas() replicas {
	if i.IntN(3) == 0 {
		return i.replicas
	}
	return replicas{i.leader}
}

// randomMatch returns a matcher of all requests, of those for the Lease, or of the work.
func (i *injection) randomMatch() func(*http.Request) bool {
	return []func(*http.Request) bool{nil, isLeaseWrite, isWork}[i.IntN(3)]
}

// applyRule applies a rule at the replicas' proxies for a while.
func (i *injection) applyRule(ctx context.Context, targets replicas, duration time.Duration, rule faultproxy.Rule) error {
	for _, r := range targets {
		defer r.proxy.Add(rule).Remove()
	}
	fleet.Wait(ctx, duration)
	return nil
}

func partition(mode faultproxy.Mode, pick func(*injection) *replica) func(context.Context, *injection) error {
	return func(ctx context.Context, i *injection) error {
		proxy := pick(i).proxy
		proxy.Partition(mode)
		defer proxy.Heal()
		fleet.Wait(ctx, i.randomDuration(100, 6000))
		return nil
	}
}

// stopGracefully stops the leader, half of the time during work that takes long.
func stopGracefully(ctx context.Context, i *injection) error {
	if i.IntN(2) == 0 {
		defer i.leader.proxy.Add(faultproxy.Rule{Match: isWork, Delay: i.randomDuration(100, 2000)}).Remove()
	}
	if err := i.leader.life().Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-i.leader.life().Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s does not end: %w", i.leader.Pod, context.Cause(ctx))
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

func pauseUntilReplaced(ctx context.Context, i *injection) error {
	m := i.leader.life()
	if err := m.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_, err := i.replicas.waitForLeader(ctx, i.leader)
	fleet.Wait(ctx, i.randomDuration(0, 500))
	if err := m.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return err
}

// pauseWithWritesQueued releases the writes that the former leader has in flight, before or after
// it wakes.
func pauseWithWritesQueued(ctx context.Context, i *injection) error {
	_, release := i.leader.holdWork(ctx, 1+i.IntN(3), 2*time.Second)
	defer release()
	m := i.leader.life()
	if err := m.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_, err := i.replicas.waitForLeader(ctx, i.leader)
	fleet.Wait(ctx, i.randomDuration(0, 500))
	if i.IntN(2) == 0 {
		release()
		fleet.Wait(ctx, i.randomDuration(0, 50))
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
