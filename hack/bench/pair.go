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
	lease   *leaseWatch

	leader, standby *process
	holder          string // the leader's identity in the Lease
	count           int
}

// startPair starts a leader, and a standby when that one leads.
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
	before, _ := p.lease.last()
	old := ""
	if before.lease != nil {
		old = before.holder()
	}
	mark := p.lease.mark()
	leader, err := p.b.run(ctx, p.subject, slot)
	if err != nil {
		return nil, err
	}
	view, err := p.lease.newHolder(ctx, mark, old)
	if err != nil {
		return leader, fmt.Errorf("%w; the last lines of %s:\n%s", err, leader.Name, leader.Tail(15))
	}
	p.holder = view.holder()
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

// takeover is how long things took from the signal to the old leader.
type takeover struct {
	seen    time.Duration // until the watch of the benchmark's client brought the new holder
	written time.Duration // until kube-apiserver had written it, by the audit log
	expired time.Duration // from the end of the old holder's claim until seen
	// first is until the first write of the new leader's controller arrived at kube-apiserver, see trigger; zero if
	// the old leader was still quick enough to do that work.
	first time.Duration
	// refused are writes of the new leader's controller that kube-apiserver has refused before.
	refused int
}

// takeOver ends the leader by a signal and measures how the standby takes over. The standby is the leader then, and
// there is none until respawn.
func (p *pair) takeOver(ctx context.Context, sig syscall.Signal) (t takeover, err error) {
	audit, err := p.b.tailAudit()
	if err != nil {
		return t, err
	}
	defer audit.close()
	p.count++
	work := fmt.Sprintf("trigger-%d", p.count)
	// At any point of the period in which leaders renew and standbys poll. Not before the standby has seen a renewal: the
	// claim of a Lease that it has only found counts for it from then.
	pause := 500*time.Millisecond + rand.N(2500*time.Millisecond)
	if sig == syscall.SIGKILL {
		pause += 2 * time.Second
	}
	if err := sleep(ctx, pause); err != nil {
		return t, err
	}

	mark, old, next := p.lease.mark(), p.leader, p.standby
	begin := time.Now()
	if err := old.Signal(sig); err != nil {
		return t, err
	}
	if err := p.b.trigger(ctx, namespace, work); err != nil {
		return t, err
	}
	view, err := p.lease.newHolder(ctx, mark, p.holder)
	if err != nil {
		return t, fmt.Errorf("%w; the last lines of %s:\n%s", err, next.Name, next.Tail(15))
	}
	t.seen = view.at.Sub(begin)
	if last, ok := p.lease.lastOf(p.holder); ok {
		t.expired = view.at.Sub(last.expiry())
	}
	p.holder, p.leader, p.standby = view.holder(), next, nil

	write, err := audit.first(ctx, "the new holder's write", func(e auditv1.Event) bool {
		return next.did(e) && isLease(e) && cluster.AuditWrite(e) && e.ObjectRef.Name == p.subject.lease
	})
	if err != nil {
		return t, err
	}
	t.written = write.StageTimestamp.Sub(begin)
	if write.RequestReceivedTimestamp.Sub(begin) > t.seen {
		return t, fmt.Errorf("the watch brought the new holder after %s, but the write arrived after %s", t.seen, write.RequestReceivedTimestamp.Sub(begin))
	}
	done, err := audit.first(ctx, "work on "+work, func(e auditv1.Event) bool {
		return (next.did(e) || old.did(e)) && isWorkOn(e, namespace, work)
	})
	if err != nil {
		return t, fmt.Errorf("%w; the last lines of %s:\n%s", err, next.Name, next.Tail(15))
	}
	if t.refused, err = audit.count(func(e auditv1.Event) bool {
		return next.did(e) && e.ResponseStatus != nil && e.ResponseStatus.Code >= 400 && isAbout(e, "deployments")
	}); err != nil {
		return t, err
	}
	if next.did(done) {
		t.first = done.RequestReceivedTimestamp.Sub(begin)
	}
	if err := old.Wait(ctx); sig == syscall.SIGTERM && old.ExitCode() == -1 {
		return t, err
	}
	return t, p.b.cleanTriggers(ctx)
}

// respawn starts a standby in the slot of the old leader.
func (p *pair) respawn(ctx context.Context, args ...string) (err error) {
	slot := "a"
	if p.leader.slot == slot {
		slot = "b"
	}
	p.standby, err = p.startStandby(ctx, slot, args...)
	return err
}

// trigger creates a Deployment on which every subject's controller has one thing to write: ours records the state of
// the ConfigMap that it uses, controller-runtime's adds an annotation, kube-controller-manager makes its ReplicaSet.
func (b *bench) trigger(ctx context.Context, namespace, name string) error {
	_, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, newDeployment(name, "trigger"), metav1.CreateOptions{})
	return err
}

// cleanTriggers deletes what trigger has created in the benchmarks' namespace.
func (b *bench) cleanTriggers(ctx context.Context) error {
	all := metav1.ListOptions{}
	now := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
	err := b.admin.AppsV1().Deployments(namespace).DeleteCollection(ctx, now, all)
	return errors.Join(err, b.admin.AppsV1().ReplicaSets(namespace).DeleteCollection(ctx, now, all))
}

// newDeployment takes its environment from a ConfigMap, asks to be rolled when that changes, and has no Pods.
func newDeployment(name, configMap string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"quartermaster.dev/reload": "auto"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](0),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{
					Name: "web", Image: "web",
					EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
						LocalObjectReference: corev1.LocalObjectReference{Name: configMap}}}},
				}}},
			},
		},
	}
}

// ensureConfigMap creates a ConfigMap unless it is there.
func (b *bench) ensureConfigMap(ctx context.Context, name string) error {
	_, err := b.admin.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Data:       map[string]string{"value": "0"},
	}, metav1.CreateOptions{})
	return ignoreExists(err)
}
