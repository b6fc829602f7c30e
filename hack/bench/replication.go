// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// fanSizes are the numbers of namespaces that get copies of one Secret. The namespaces of a smaller
// fan are among the largest's.
var fanSizes = []int{200, 2000}

// copiesInOrder is the number of copies that a new leader finds in order.
const copiesInOrder = 1000

// replicationFlags switch the controller replication on.
var replicationFlags = []string{"--controllers=*,replication", "--compat=reflector,replicator", "--replication-push-namespaces=*"}

// benchmarkReplication measures the controller replication.
func (b *bench) benchmarkReplication(ctx context.Context) error {
	s := managerSubject(b, b.binaries.manager, replicationFlags...)
	if !b.opts.wants(s.name) {
		return nil
	}
	if err := b.cluster.InstallComponents(ctx, "replication", "replication-compat"); err != nil {
		return err
	}
	if err := b.measureFans(ctx, s); err != nil {
		return err
	}
	return b.deleteFans(ctx)
}

// measureFans measures a leader beside a standby.
func (b *bench) measureFans(ctx context.Context, s subject) (err error) {
	err = parallel(ctx, 32, fanSizes[len(fanSizes)-1], func(ctx context.Context, i int) error { return b.createFanNamespace(ctx, i) })
	if err != nil {
		return err
	}
	b.logProgress("%s: starting a leader and a standby", s.name)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	for _, n := range fanSizes {
		if err := b.measureFan(ctx, n); err != nil {
			return err
		}
	}
	if err := b.measurePulls(ctx); err != nil {
		return err
	}
	return b.measureRestart(ctx, p)
}

// createFanNamespace creates a namespace with a label for each of the fans that it belongs to.
func (b *bench) createFanNamespace(ctx context.Context, i int) error {
	labels := map[string]string{"bench-fan": "all"}
	for _, n := range fanSizes {
		if i < n {
			labels[fanLabel(n)] = "yes"
		}
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("fan-%04d", i), Labels: labels}}
	_, err := b.admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	return ignoreExists(err)
}

func fanLabel(n int) string { return fmt.Sprintf("bench-fan-%d", n) }

// measureFan creates and changes a Secret that is pushed to n namespaces, several times.
func (b *bench) measureFan(ctx context.Context, n int) error {
	var createTimes, updateTimes []float64
	for i := range b.opts.scaled(5) {
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		name := fmt.Sprintf("fan-%d-%d", n, i)
		copies, err := b.admin.CoreV1().Secrets("").Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			return err
		}
		begin := time.Now()
		source := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"quartermaster.dev/push-to": "labels: " + fanLabel(n)}},
			StringData: map[string]string{"value": "a"},
		}
		if _, err := b.admin.CoreV1().Secrets(namespace).Create(ctx, source, metav1.CreateOptions{}); err != nil {
			return err
		}
		if err := awaitCopies(ctx, copies, n, "a"); err != nil {
			return err
		}
		createTimes = append(createTimes, time.Since(begin).Seconds())
		updateBegin := time.Now()
		if err := b.changeSecret(ctx, namespace, name, "b"); err != nil {
			return err
		}
		if err := awaitCopies(ctx, copies, n, "b"); err != nil {
			return err
		}
		updateTimes = append(updateTimes, time.Since(updateBegin).Seconds())
		copies.Stop()
	}
	prefix := fmt.Sprintf("replication/one Secret to %d namespaces, ", n)
	b.addRow(prefix+"all created", quartermaster, "s", createTimes...)
	b.addRow(prefix+"all updated", quartermaster, "s", updateTimes...)
	return nil
}

// awaitCopies waits until n copies hold the value.
func awaitCopies(ctx context.Context, copies watch.Interface, n int, value string) error {
	timeout := time.After(waitTimeout)
	current := map[string]bool{}
	for len(current) < n {
		select {
		case e, ok := <-copies.ResultChan():
			if !ok {
				return errors.New("the watch of the copies ended")
			}
			if s, ok := e.Object.(*corev1.Secret); ok && s.Namespace != namespace && e.Type != watch.Deleted && string(s.Data["value"]) == value {
				current[s.Namespace] = true
			}
		case <-timeout:
			return fmt.Errorf("%d of %d copies after %s", len(current), n, waitTimeout)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (b *bench) changeSecret(ctx context.Context, namespace, name, value string) error {
	_, err := b.admin.CoreV1().Secrets(namespace).Patch(ctx, name, types.MergePatchType,
		fmt.Appendf(nil, `{"stringData":{"value":%q}}`, value), metav1.PatchOptions{})
	return err
}

// measurePulls changes a source again and again and waits each time for the pull target of the replicator's
// dialect.
func (b *bench) measurePulls(ctx context.Context) error {
	const target, name = "fan-0000", "pulled"
	targets, err := b.admin.CoreV1().Secrets(target).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	defer targets.Stop()
	for ns, annotations := range map[string]map[string]string{
		namespace: {"replicator.v1.mittwald.de/replication-allowed": "true", "replicator.v1.mittwald.de/replication-allowed-namespaces": target},
		target:    {"replicator.v1.mittwald.de/replicate-from": namespace + "/" + name},
	} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
		if _, err := b.admin.CoreV1().Secrets(ns).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	var pullTimes []float64
	for i := range b.opts.scaled(200) {
		value := fmt.Sprint("value ", i)
		if err := b.changeSecret(ctx, namespace, name, value); err != nil {
			return err
		}
		begin := time.Now() // the source is updated
		if err := awaitCopies(ctx, targets, 1, value); err != nil {
			return err
		}
		pullTimes = append(pullTimes, milliseconds(time.Since(begin)))
		if err := cluster.Sleep(ctx, changePause); err != nil {
			return err
		}
	}
	b.addRow("replication/pull, source updated to target updated as a watch sees it", quartermaster, "ms", pullTimes...)
	return nil
}

// measureRestart starts the leader again among more than copiesInOrder copies that are right, and counts what
// it requests of Secrets beside lists and watches.
func (b *bench) measureRestart(ctx context.Context, p *pair) error {
	if err := p.stop(); err != nil {
		return err
	}
	p.leader, p.standby = nil, nil
	for _, n := range fanSizes {
		if n < copiesInOrder {
			continue
		}
		audit, err := b.tailAudit()
		if err != nil {
			return err
		}
		if p.leader, err = p.startLeader(ctx, "a"); err != nil {
			return err
		}
		if err := cluster.Sleep(ctx, 2*quiescence); err != nil {
			return err
		}
		requests, err := audit.count(func(e auditv1.Event) bool {
			return p.leader.madeRequest(e) && hasResource(e, "secrets") && (cluster.AuditWrite(e) || e.Verb == "get")
		})
		if err != nil {
			return err
		}
		b.addRow(fmt.Sprintf("replication/a new leader among %d copies in order, requests", n*b.opts.scaled(5)), quartermaster, "requests", float64(requests))
	}
	return nil
}

// deleteFans deletes the sources and their copies, since later parts begin on an empty cluster.
func (b *bench) deleteFans(ctx context.Context) error {
	everything := metav1.ListOptions{}
	err := parallel(ctx, 32, fanSizes[len(fanSizes)-1], func(ctx context.Context, i int) error {
		return b.admin.CoreV1().Secrets(fmt.Sprintf("fan-%04d", i)).DeleteCollection(ctx, metav1.DeleteOptions{}, everything)
	})
	return errors.Join(err, b.admin.CoreV1().Secrets(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, everything))
}
