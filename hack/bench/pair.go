// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// stopGrace is longer than any subject takes to end after SIGTERM.
const stopGrace = 40 * time.Second

// pair is a leader and a standby of one subject.
type pair struct {
	b       *bench
	subject subject
	lease   *history

	leader, standby *process
	holder          string // the leader's identity in the Lease
	takeovers       int
}

// startPair starts a leader, and a standby once it leads.
func (b *bench) startPair(ctx context.Context, s subject) (*pair, error) {
	p := &pair{b: b, subject: s, lease: b.watchLease(ctx, s.lease)}
	var err error
	if p.leader, err = p.startLeader(ctx, "a"); err != nil {
		return p, errors.Join(err, p.stop())
	}
	if p.standby, err = p.startStandby(ctx, "b"); err != nil {
		return p, errors.Join(err, p.stop())
	}
	return p, nil
}

func (p *pair) startLeader(ctx context.Context, slot string) (*process, error) {
	old, mark := p.lease.lastName(), p.lease.position()
	leader, err := p.b.run(ctx, p.subject, slot)
	if err != nil {
		return nil, err
	}
	holder, err := p.lease.awaitHolder(ctx, mark, old)
	if err != nil {
		return leader, fmt.Errorf("%w; the last lines of %s:\n%s", err, leader.Name, leader.Tail(15))
	}
	p.holder = holder.name
	_, err = leader.waitReady(ctx)
	return leader, err
}

func (p *pair) startStandby(ctx context.Context, slot string, args ...string) (*process, error) {
	standby, err := p.b.run(ctx, p.subject, slot, args...)
	if err != nil {
		return nil, err
	}
	_, err = standby.waitReady(ctx)
	return standby, err
}

// stop ends both, the standby first, so that nobody takes over.
func (p *pair) stop() error {
	var errs []error
	for _, process := range []*process{p.standby, p.leader} {
		if process != nil {
			errs = append(errs, process.Stop(context.Background(), stopGrace))
		}
	}
	return errors.Join(errs...)
}

// takeover is what was measured of one take-over. Durations count from the signal to the old leader.
type takeover struct {
	observed time.Duration // until the watch of the benchmark's client delivered the new holder
	written  time.Duration // until kube-apiserver had written it, according to the audit log
	wonLease time.Time     // when kube-apiserver had written the new holder
	created  time.Duration // until kube-apiserver had created what createTrigger creates
	// firstReconcile lasts until the first write of the new leader's controller arrived at kube-apiserver,
	// see createTrigger. It is zero if the old leader did that work before it ended.
	firstReconcile time.Duration
	// refusedWrites is how many writes of the new leader's controller kube-apiserver refused before.
	refusedWrites int
	staleWrites   int // writes of the old leader's controller that succeeded after SIGCONT
}

// takeover sends the leader SIGTERM, SIGKILL or SIGSTOP and measures how the standby takes over. Then the
// standby is the leader, and there is no standby until startNewStandby.
func (p *pair) takeover(ctx context.Context, sig syscall.Signal) (t takeover, err error) {
	audit, err := p.b.tailAudit()
	if err != nil {
		return t, err
	}
	p.takeovers++
	triggerName := fmt.Sprintf("trigger-%d", p.takeovers)
	// The leader ends at a random point of the period in which leaders renew and standbys poll, but only after
	// the standby has seen a renewal: until then, the standby counts the claim from the moment at which it found
	// the Lease.
	pause := 500*time.Millisecond + rand.N(2500*time.Millisecond)
	if sig != syscall.SIGTERM {
		pause += 2 * time.Second
		if err := p.standby.awaitFence(ctx); err != nil {
			return t, err
		}
	}
	if err := cluster.Sleep(ctx, pause); err != nil {
		return t, err
	}

	mark, old, next := p.lease.position(), p.leader, p.standby
	begin := time.Now()
	if err := old.Signal(sig); err != nil {
		return t, err
	}
	if err := p.b.createTrigger(ctx, namespace, triggerName); err != nil {
		return t, err
	}
	holder, err := p.lease.awaitHolder(ctx, mark, p.holder)
	if err != nil {
		return t, fmt.Errorf("%w; the last lines of %s:\n%s", err, next.Name, next.Tail(15))
	}
	t.observed = holder.at.Sub(begin)
	p.holder, p.leader, p.standby = holder.name, next, nil

	leaseWrite, err := audit.awaitEvent(ctx, "the new holder's write", func(e auditv1.Event) bool {
		return next.madeRequest(e) && isLeaseRequest(e) && cluster.AuditWrite(e) && e.ObjectRef.Name == p.subject.lease
	})
	if err != nil {
		return t, err
	}
	t.wonLease = leaseWrite.StageTimestamp.Time
	t.written = t.wonLease.Sub(begin)
	if leaseWrite.RequestReceivedTimestamp.Sub(begin) > t.observed {
		return t, fmt.Errorf("the watch brought the new holder after %s, but the write arrived after %s", t.observed, leaseWrite.RequestReceivedTimestamp.Sub(begin))
	}
	created, err := audit.awaitEvent(ctx, "the creation of "+triggerName, func(e auditv1.Event) bool {
		return e.Verb == "create" && isWriteOf(e, namespace, triggerName)
	})
	if err != nil {
		return t, err
	}
	t.created = created.StageTimestamp.Sub(begin)
	firstWrite, err := audit.awaitEvent(ctx, "work on "+triggerName, func(e auditv1.Event) bool {
		return (next.madeRequest(e) || old.madeRequest(e)) && isWriteOf(e, namespace, triggerName)
	})
	if err != nil {
		return t, fmt.Errorf("%w; the last lines of %s:\n%s", err, next.Name, next.Tail(15))
	}
	if t.refusedWrites, err = audit.count(func(e auditv1.Event) bool {
		return next.madeRequest(e) && e.ResponseStatus != nil && e.ResponseStatus.Code >= 400 && hasResource(e, "deployments")
	}); err != nil {
		return t, err
	}
	if next.madeRequest(firstWrite) {
		t.firstReconcile = firstWrite.RequestReceivedTimestamp.Sub(begin)
	}
	if sig == syscall.SIGSTOP {
		if t.staleWrites, err = resume(ctx, old, audit); err != nil {
			return t, err
		}
	}
	if err := old.Wait(ctx); sig == syscall.SIGTERM && old.ExitCode() == -1 {
		return t, err
	}
	return t, p.b.deleteTriggers(ctx)
}

// awaitFence waits until a replica of ours knows that the fence is in force.
func (p *process) awaitFence(ctx context.Context) error {
	if p.manager == nil {
		return nil
	}
	_, err := p.manager.WaitForLine(ctx, "The API server refuses writes of replicas that do not lead")
	return err
}

// resume lets a stopped leader go on until it ends, and returns how many writes of its controller
// succeeded.
func resume(ctx context.Context, old *process, audit *auditTail) (int, error) {
	begin := time.Now()
	if err := old.Signal(syscall.SIGCONT); err != nil {
		return 0, err
	}
	if err := old.Wait(ctx); old.ExitCode() == -1 {
		return 0, err
	}
	return audit.count(func(e auditv1.Event) bool {
		return old.madeRequest(e) && hasResource(e, "deployments") && cluster.AuditWrite(e) && e.RequestReceivedTimestamp.After(begin) &&
			e.ResponseStatus != nil && e.ResponseStatus.Code < 400
	})
}

// startNewStandby starts a standby in the slot of the old leader.
func (p *pair) startNewStandby(ctx context.Context, args ...string) (err error) {
	slot := "a"
	if p.leader.slot == slot {
		slot = "b"
	}
	p.standby, err = p.startStandby(ctx, slot, args...)
	return err
}

// createTrigger creates a Deployment for which every subject's controller has one thing to write: ours
// records the state of the ConfigMap that it uses, controller-runtime's adds an annotation,
// and kube-controller-manager creates its ReplicaSet.
func (b *bench) createTrigger(ctx context.Context, namespace, name string) error {
	_, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, newDeployment(name, "trigger"), metav1.CreateOptions{})
	return err
}

// deleteTriggers deletes what createTrigger has created in the benchmarks' namespace.
func (b *bench) deleteTriggers(ctx context.Context) error {
	everything := metav1.ListOptions{}
	background := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
	err := b.admin.AppsV1().Deployments(namespace).DeleteCollection(ctx, background, everything)
	return errors.Join(err, b.admin.AppsV1().ReplicaSets(namespace).DeleteCollection(ctx, background, everything))
}

// newDeployment returns a Deployment without Pods that is rolled when its ConfigMap changes.
func newDeployment(name, configMap string) *appsv1.Deployment {
	d := cluster.NewDeployment(name, configMap, map[string]string{"quartermaster.dev/reload": "auto"})
	d.Spec.Replicas = ptr.To[int32](0)
	return d
}

// ensureConfigMap creates a ConfigMap unless it exists.
func (b *bench) ensureConfigMap(ctx context.Context, name string) error {
	_, err := b.admin.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Data:       map[string]string{"value": "0"},
	}, metav1.CreateOptions{})
	return ignoreExists(err)
}
