// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// fans are the numbers of namespaces that get copies of one Secret. The namespaces of the smaller
// ones are among those of the largest.
var fans = []int{200, 2000}

// inOrder is the number of copies that a new leader finds in order.
const inOrder = 1000

// replication measures the controller of that name.
func (b *bench) replication(ctx context.Context) error {
	s := managerSubject(b, ours, b.binaries.manager, "--controllers=*,replication", "--compat=reflector,replicator", "--replication-push-namespaces=*")
	if !b.opts.wants(s.name) {
		return nil
	}
	if err := b.install(ctx, "replication", "replication-compat"); err != nil {
		return err
	}
	if err := b.replicationMemory(ctx); err != nil {
		return err
	}
	if err := b.fansOut(ctx, s); err != nil {
		return err
	}
	return b.cleanFans(ctx)
}

// install applies the default installation with components of deploy/components.
func (b *bench) install(ctx context.Context, components ...string) error {
	dir, err := os.MkdirTemp(b.box.Dir, "overlay-")
	if err != nil {
		return err
	}
	// Kustomize does not accept absolute paths.
	deploy, err := filepath.Rel(dir, filepath.Join(b.root, "deploy"))
	if err != nil {
		return err
	}
	text := "resources:\n- " + deploy + "\ncomponents:\n"
	for _, name := range components {
		text += "- " + filepath.Join(deploy, "components", name) + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		return err
	}
	return b.c.ApplyDir(ctx, dir, "Deployment")
}

// fansOut measures a leader beside a standby.
func (b *bench) fansOut(ctx context.Context, s subject) (err error) {
	other, err := b.otherUser(ctx)
	if err != nil {
		return err
	}
	if err := b.ensureConfigMap(ctx, plain); err != nil {
		return err
	}
	err = parallel(ctx, 32, fans[len(fans)-1], func(ctx context.Context, i int) error { return b.createFan(ctx, i) })
	if err != nil {
		return err
	}
	b.progress("%s: starting a leader and a standby", s.name)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	for _, n := range fans {
		if err := b.fanOut(ctx, n, other); err != nil {
			return err
		}
	}
	if err := b.pulls(ctx); err != nil {
		return err
	}
	return b.restart(ctx, p)
}

// createFan creates a namespace with a label for each of the fans that it belongs to.
func (b *bench) createFan(ctx context.Context, i int) error {
	labels := map[string]string{"bench-fan": "all"}
	for _, n := range fans {
		if i < n {
			labels[fanLabel(n)] = "yes"
		}
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("fan-%04d", i), Labels: labels}}
	_, err := b.admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	return ignoreExists(err)
}

func fanLabel(n int) string { return fmt.Sprintf("bench-fan-%d", n) }

// fanOut creates and changes a Secret that is pushed to n namespaces, several times, while another
// user sends patches.
func (b *bench) fanOut(ctx context.Context, n int, other *kubernetes.Clientset) error {
	var create, update, before, during []float64
	for i := range b.opts.bursts {
		if err := sleep(ctx, quiescence); err != nil {
			return err
		}
		name := fmt.Sprintf("fan-%d-%d", n, i)
		copies, err := b.admin.CoreV1().Secrets("").Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			return err
		}
		stop := b.patchAsOther(ctx, other)
		if err := sleep(ctx, otherAlone); err != nil {
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
		create = append(create, time.Since(begin).Seconds())
		half := time.Now()
		if err := b.changeSecret(ctx, namespace, name, "b"); err != nil {
			return err
		}
		if err := awaitCopies(ctx, copies, n, "b"); err != nil {
			return err
		}
		end := time.Now()
		update = append(update, end.Sub(half).Seconds())
		copies.Stop()
		patches, err := stop()
		if err != nil {
			return err
		}
		for _, patch := range patches {
			switch {
			case patch.sent.Before(begin):
				before = append(before, milliseconds(patch.took))
			case patch.sent.Before(end):
				during = append(during, milliseconds(patch.took))
			}
		}
	}
	rows := fmt.Sprintf("replication/one Secret to %d namespaces, ", n)
	b.add(rows+"all created", ours, "s", create...)
	b.add(rows+"all updated", ours, "s", update...)
	b.add(rows+"PATCH by another user before", ours, "ms", before...)
	b.add(rows+"PATCH by another user meanwhile", ours, "ms", during...)
	return nil
}

// awaitCopies waits until n copies hold the value.
func awaitCopies(ctx context.Context, copies watch.Interface, n int, value string) error {
	timeout := time.After(patience)
	seen := map[string]bool{}
	for len(seen) < n {
		select {
		case e, ok := <-copies.ResultChan():
			if !ok {
				return errors.New("the watch of the copies ended")
			}
			if s, ok := e.Object.(*corev1.Secret); ok && s.Namespace != namespace && e.Type != watch.Deleted && string(s.Data["value"]) == value {
				seen[s.Namespace] = true
			}
		case <-timeout:
			return fmt.Errorf("%d of %d copies after %s", len(seen), n, patience)
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

// pulls changes a source again and again and waits each time for the pull target of the replicator's
// dialect. For comparison, two copiers of the benchmark's own do the least that a tool can do, and it
// changes a Secret itself, each in turn.
func (b *bench) pulls(ctx context.Context) (err error) {
	const target, changed = "fan-0000", "replication/pull, source updated to target updated as a watch sees it"
	pulls := []struct {
		name, row, subject string
		live, keeps        bool // a copier of the benchmark's own that reads, or that keeps values
		took               []float64
	}{
		{name: "pulled", row: changed, subject: ours},
		{name: "read", row: "replication/for comparison: a copier that reads both and writes", subject: apiserver, live: true},
		{name: "kept", row: "replication/for comparison: a copier that keeps both and writes", subject: apiserver, keeps: true},
		{name: "plain", row: "replication/for comparison: one write of a Secret as a watch sees it", subject: apiserver},
	}
	targets, err := b.admin.CoreV1().Secrets(target).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	defer targets.Stop()
	for _, p := range pulls {
		source := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: p.name}}
		copied := source.DeepCopy()
		if p.subject == ours {
			source.Annotations = map[string]string{"replicator.v1.mittwald.de/replication-allowed": "true",
				"replicator.v1.mittwald.de/replication-allowed-namespaces": target}
			copied.Annotations = map[string]string{"replicator.v1.mittwald.de/replicate-from": namespace + "/" + p.name}
		}
		for ns, secret := range map[string]*corev1.Secret{namespace: source, target: copied} {
			if _, err := b.admin.CoreV1().Secrets(ns).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
				return err
			}
		}
		if p.live || p.keeps {
			stop, startErr := b.startCopier(ctx, p.name, target, p.live)
			if startErr != nil {
				return startErr
			}
			defer func() { err = errors.Join(err, stop()) }()
		}
	}
	for i := range b.opts.changes {
		for j := range pulls {
			p := &pulls[j]
			in, value := namespace, fmt.Sprint(p.name, " ", i)
			if p.name == "plain" {
				in = target
			}
			begin := time.Now()
			if err := b.changeSecret(ctx, in, p.name, value); err != nil {
				return err
			}
			if in == namespace {
				begin = time.Now() // the source is updated
			}
			if err := awaitCopies(ctx, targets, 1, value); err != nil {
				return err
			}
			p.took = append(p.took, milliseconds(time.Since(begin)))
			if err := sleep(ctx, changePause); err != nil {
				return err
			}
		}
	}
	for _, p := range pulls {
		b.add(p.row, p.subject, "ms", p.took...)
	}
	return nil
}

// startCopier starts a copier from the benchmark's namespace to another, which decides nothing. With
// live it reads source and target at once before it writes, as who keeps no values has to. Otherwise it
// writes what its watch has brought.
func (b *bench) startCopier(ctx context.Context, name, to string, live bool) (stop func() error, err error) {
	client := b.admin.CoreV1()
	copied, err := client.Secrets(to).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	changes, err := client.Secrets(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil {
		return nil, err
	}
	var failed error
	var running sync.WaitGroup
	running.Go(func() {
		for e := range changes.ResultChan() {
			source, ok := e.Object.(*corev1.Secret)
			if !ok || e.Type != watch.Modified {
				continue
			}
			if live {
				both, fetch := errgroup.WithContext(ctx)
				both.Go(func() (err error) {
					source, err = client.Secrets(namespace).Get(fetch, name, metav1.GetOptions{})
					return err
				})
				both.Go(func() (err error) {
					copied, err = client.Secrets(to).Get(fetch, name, metav1.GetOptions{})
					return err
				})
				if failed = both.Wait(); failed != nil {
					return
				}
			}
			copied.Data = source.Data
			if copied, failed = client.Secrets(to).Update(ctx, copied, metav1.UpdateOptions{}); failed != nil {
				return
			}
		}
	})
	return func() error {
		changes.Stop()
		running.Wait()
		return failed
	}, nil
}

// restart starts the leader again among more than inOrder copies that are right, and counts what it
// requests of Secrets beside lists and watches.
func (b *bench) restart(ctx context.Context, p *pair) error {
	if err := p.stop(); err != nil {
		return err
	}
	p.leader, p.standby = nil, nil
	for _, n := range fans {
		if n < inOrder {
			continue
		}
		audit, err := b.tailAudit()
		if err != nil {
			return err
		}
		defer audit.close()
		if p.leader, err = p.startLeader(ctx, "a"); err != nil {
			return err
		}
		if err := sleep(ctx, 2*quiescence); err != nil {
			return err
		}
		requests, err := audit.count(func(e auditv1.Event) bool {
			return p.leader.did(e) && isAbout(e, "secrets") && (cluster.AuditWrite(e) || e.Verb == "get")
		})
		if err != nil {
			return err
		}
		b.add(fmt.Sprintf("replication/a new leader among %d copies in order, requests", n*b.opts.bursts), ours, "requests", float64(requests))
	}
	return nil
}

// replicationMemory measures how much 5,000 Secrets and 5,000 ConfigMaps of 4 KiB, none of which takes
// part, let a manager grow, with replication and without.
func (b *bench) replicationMemory(ctx context.Context) error {
	if err := b.allowNeeds(ctx); err != nil {
		return err
	}
	for i := range dataNamespaces {
		if err := b.createNamespace(ctx, dataNamespace(i)); err != nil {
			return err
		}
	}
	// Each leads on a Lease of its own.
	with := managerSubject(b, oursReplication, b.binaries.manager, "--controllers=*,replication", "--compat=reflector,replicator", "--replication-push-namespaces=*")
	without := managerSubject(b, ours, b.binaries.manager, "--leader-elect-resource-namespace="+namespace)
	before := map[string]float64{}
	for _, d := range dataSets(b.opts.scale)[:2] {
		d.deployments = 0
		if err := b.fill(ctx, d); err != nil {
			return err
		}
		if err := b.residents(ctx, d, before, map[string]subject{"a": with, "b": without}); err != nil {
			return err
		}
	}
	return b.empty(ctx)
}

// residents starts subjects in slots and measures them when they are steady. Those on the empty
// cluster are put into before.
func (b *bench) residents(ctx context.Context, d dataSet, before map[string]float64, subjects map[string]subject) (err error) {
	running := map[string]*process{}
	defer func() {
		for _, p := range running {
			err = errors.Join(err, p.Stop(context.Background(), stopGrace))
		}
	}()
	for slot, s := range subjects {
		p, err := b.run(ctx, s, slot)
		if err != nil {
			return err
		}
		running[s.name] = p
		if _, err := p.waitReady(ctx); err != nil {
			return err
		}
	}
	if err := sleep(ctx, b.opts.settle); err != nil {
		return err
	}
	for name, p := range running {
		r, err := readResidence(p.PID())
		if err != nil {
			return err
		}
		if d.objects() == 0 {
			before[name] = r.now
			continue
		}
		b.add(fmt.Sprintf("replication/RSS growth by %d Secrets and %d ConfigMaps of 4 KiB", d.secrets, d.configMaps), name, "MiB", r.now-before[name])
	}
	return nil
}

// cleanFans deletes the sources and their copies, since later parts begin on an empty cluster.
func (b *bench) cleanFans(ctx context.Context) error {
	all := metav1.ListOptions{}
	err := parallel(ctx, 32, fans[len(fans)-1], func(ctx context.Context, i int) error {
		return b.admin.CoreV1().Secrets(fmt.Sprintf("fan-%04d", i)).DeleteCollection(ctx, metav1.DeleteOptions{}, all)
	})
	return errors.Join(err, b.admin.CoreV1().Secrets(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, all))
}
