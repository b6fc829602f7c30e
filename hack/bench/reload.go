// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	// plainName names a Deployment that does not ask to be rolled and a ConfigMap that nobody uses.
	plainName = "plain"
	// workloadCount is the number of Deployments of reload, each with a ConfigMap of its own.
	workloadCount = 100
	// changePause is the time between two single changes, so that each is a reload of its own.
	changePause = 100 * time.Millisecond
	// floorRow is what a change takes without a controller.
	floorRow = "for comparison: a change and a patch by the benchmark itself"
	// quiescence is long enough for Events to be sent, and for a second patch if there were one.
	quiescence = 5 * time.Second
)

// benchmarkReload measures config-reload with --config-reload-quiet-period=0.
func (b *bench) benchmarkReload(ctx context.Context) (err error) {
	s := managerSubject(b, b.binaries.manager, "--config-reload-quiet-period=0")
	if !b.opts.wants(s.name) {
		return nil
	}
	b.logProgress("%s: starting a leader and a standby, then %d Deployments", s.name, workloadCount)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	templates, err := b.createWorkloads(ctx)
	if err != nil {
		return err
	}
	for _, measure := range []func(context.Context, *pair, *history) error{b.measureSingles, b.measureBursts, b.measureDowntime} {
		// The Events of the previous measurement are sent meanwhile.
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		if err := measure(ctx, p, templates); err != nil {
			return err
		}
	}
	// Later parts begin on an empty cluster.
	return errors.Join(b.deleteTriggers(ctx),
		b.admin.CoreV1().ConfigMaps(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
}

func workloadName(i int) string { return fmt.Sprintf("web-%03d", i) }

// createWorkloads creates the Deployments and waits until a manager has recorded the state of all.
func (b *bench) createWorkloads(ctx context.Context) (*history, error) {
	templates := b.watchTemplates(ctx, namespace)
	plainDeployment := newDeployment(plainName, "none")
	plainDeployment.Annotations = nil
	if _, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, plainDeployment, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if err := b.ensureConfigMap(ctx, plainName); err != nil {
		return nil, err
	}
	err := parallel(ctx, 8, workloadCount, func(ctx context.Context, i int) error {
		if err := b.ensureConfigMap(ctx, workloadName(i)); err != nil {
			return err
		}
		_, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, newDeployment(workloadName(i), workloadName(i)), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	return templates, eventually(ctx, 100*time.Millisecond, "the state of every Deployment", func(ctx context.Context) error {
		all, err := b.admin.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		recorded := 0
		for _, d := range all.Items {
			if d.Annotations["quartermaster.dev/reload-state"] != "" {
				recorded++
			}
		}
		if recorded < workloadCount {
			return fmt.Errorf("%d of %d have it", recorded, workloadCount)
		}
		return nil
	})
}

// changeConfigMap gives a ConfigMap another value.
func (b *bench) changeConfigMap(ctx context.Context, namespace, name string) error {
	patch := fmt.Appendf(nil, `{"data":{"value":"%x"}}`, rand.Uint64())
	_, err := b.admin.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// measureSingles changes one ConfigMap after the other and waits for its Deployment.
func (b *bench) measureSingles(ctx context.Context, p *pair, templates *history) error {
	audit, err := b.tailAudit()
	if err != nil {
		return err
	}
	var observed, logged, floor []float64
	changes := b.opts.scaled(200)
	for i := range changes {
		name := workloadName(i % workloadCount)
		mark := templates.position()
		begin := time.Now()
		if err := b.changeConfigMap(ctx, namespace, name); err != nil {
			return err
		}
		at, err := templates.awaitRoll(ctx, mark, name)
		if err != nil {
			return err
		}
		observed = append(observed, milliseconds(at.Sub(begin)))
		patch, err := audit.awaitEvent(ctx, "the patch of "+name, func(e auditv1.Event) bool {
			return e.RequestReceivedTimestamp.After(begin) && p.leader.madeRequest(e) && isPatch(e, name)
		})
		if err != nil {
			return err
		}
		update, err := audit.awaitEvent(ctx, "the change of "+name, func(e auditv1.Event) bool {
			return e.RequestReceivedTimestamp.After(begin) && e.Verb == "patch" && hasResource(e, "configmaps") && e.ObjectRef.Name == name
		})
		if err != nil {
			return err
		}
		logged = append(logged, milliseconds(patch.StageTimestamp.Sub(update.RequestReceivedTimestamp.Time)))
		if err := cluster.Sleep(ctx, changePause); err != nil {
			return err
		}
		took, err := b.roundTrip(ctx, templates)
		if err != nil {
			return err
		}
		floor = append(floor, milliseconds(took))
		if err := cluster.Sleep(ctx, changePause); err != nil {
			return err
		}
	}
	if err := cluster.Sleep(ctx, quiescence); err != nil {
		return err
	}
	requests, err := audit.count(func(e auditv1.Event) bool { return p.leader.madeRequest(e) && isRequest(e) && !isLeaseRequest(e) })
	if err != nil {
		return err
	}
	b.addRow("reload/one change, sent to patch seen by a watch", quartermaster, "ms", observed...)
	b.addRow("reload/"+floorRow, apiserver, "ms", floor...)
	b.addRow("reload/one change, update received to patch written, by the audit log", quartermaster, "ms", logged...)
	b.addRow("reload/one change, API requests", quartermaster, "per change", float64(requests)/float64(changes))
	return nil
}

// roundTrip does by itself the least that a controller has to do: it changes a ConfigMap that no
// workload uses, patches the template of a Deployment that uses none, and waits until its watch
// delivers the patch. The result is the API server's and the machine's share of a reload.
func (b *bench) roundTrip(ctx context.Context, templates *history) (time.Duration, error) {
	mark := templates.position()
	begin := time.Now()
	if err := b.changeConfigMap(ctx, namespace, plainName); err != nil {
		return 0, err
	}
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"value":"%x"}}}}}`, rand.Uint64())
	if _, err := b.admin.AppsV1().Deployments(namespace).Patch(ctx, plainName, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return 0, err
	}
	at, err := templates.awaitRoll(ctx, mark, plainName)
	return at.Sub(begin), err
}

// isPatch reports whether the event is a patch of a Deployment, by anybody.
func isPatch(e auditv1.Event, name string) bool {
	return cluster.AuditWrite(e) && e.Verb == "patch" && hasResource(e, "deployments") &&
		e.ObjectRef.Namespace == namespace && (name == "" || e.ObjectRef.Name == name)
}

// measureBursts lets 16 clients change all ConfigMaps at once, several times.
func (b *bench) measureBursts(ctx context.Context, p *pair, templates *history) error {
	var seconds, patchCounts, requests []float64
	for range b.opts.scaled(5) {
		took, patches, n, err := b.runBurst(ctx, p, templates)
		if err != nil {
			return err
		}
		seconds, requests = append(seconds, took.Seconds()), append(requests, float64(n))
		for i := range workloadCount {
			patchCounts = append(patchCounts, float64(patches[workloadName(i)]))
		}
	}
	b.addRow("reload/burst of 100 ConfigMaps of 100 Deployments, all patched", quartermaster, "s", seconds...)
	b.addRow("reload/burst, patches of a Deployment", quartermaster, "patches", patchCounts...)
	b.addRow("reload/burst, API requests", quartermaster, "requests", requests...)
	return nil
}

// runBurst returns the time from the first change until the last Deployment was patched, the patches
// of each Deployment and the requests of the leader.
func (b *bench) runBurst(ctx context.Context, p *pair, templates *history) (took time.Duration, patches map[string]int, requests int, err error) {
	audit, err := b.tailAudit()
	if err != nil {
		return 0, nil, 0, err
	}
	mark := templates.position()
	begin := time.Now()
	err = parallel(ctx, 16, workloadCount, func(ctx context.Context, i int) error {
		return b.changeConfigMap(ctx, namespace, workloadName(i))
	})
	if err != nil {
		return 0, nil, 0, err
	}
	for i := range workloadCount {
		at, err := templates.awaitRoll(ctx, mark, workloadName(i))
		if err != nil {
			return 0, nil, 0, err
		}
		took = max(took, at.Sub(begin))
	}
	if err := cluster.Sleep(ctx, quiescence); err != nil {
		return 0, nil, 0, err
	}
	patches = map[string]int{}
	requests, err = audit.count(func(e auditv1.Event) bool {
		if p.leader.madeRequest(e) && isPatch(e, "") {
			patches[e.ObjectRef.Name]++
		}
		return p.leader.madeRequest(e) && isRequest(e) && !isLeaseRequest(e)
	})
	return took, patches, requests, err
}

// measureDowntime changes ConfigMaps while no manager runs, and then starts one twice. The first start
// must find the changes, the second nothing.
func (b *bench) measureDowntime(ctx context.Context, p *pair, templates *history) error {
	const changed = workloadCount / 10
	var seconds, changedCounts, otherCounts, laterCounts []float64
	for range b.opts.scaled(5) {
		if err := p.stop(); err != nil {
			return err
		}
		p.leader, p.standby = nil, nil
		if err := parallel(ctx, 4, changed, func(ctx context.Context, i int) error {
			return b.changeConfigMap(ctx, namespace, workloadName(i))
		}); err != nil {
			return err
		}
		audit, err := b.tailAudit()
		if err != nil {
			return err
		}
		mark := templates.position()
		if p.leader, err = p.startLeader(ctx, "a"); err != nil {
			return err
		}
		for i := range changed {
			at, err := templates.awaitRoll(ctx, mark, workloadName(i))
			if err != nil {
				return err
			}
			seconds = append(seconds, at.Sub(p.leader.started).Seconds())
		}
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		for i := range workloadCount {
			n, err := audit.count(func(e auditv1.Event) bool { return isPatch(e, workloadName(i)) })
			if err != nil {
				return err
			}
			if i < changed {
				changedCounts = append(changedCounts, float64(n))
			} else {
				otherCounts = append(otherCounts, float64(n))
			}
		}
		before, err := audit.count(func(e auditv1.Event) bool { return isPatch(e, "") })
		if err != nil {
			return err
		}
		if err := p.leader.Stop(ctx, stopGrace); err != nil {
			return err
		}
		if p.leader, err = p.startLeader(ctx, "a"); err != nil {
			return err
		}
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		after, err := audit.count(func(e auditv1.Event) bool { return isPatch(e, "") })
		if err != nil {
			return err
		}
		laterCounts = append(laterCounts, float64(after-before))
	}
	b.addRow("reload/changed while down, start to patched", quartermaster, "s", seconds...)
	b.addRow("reload/changed while down, patches of a Deployment concerned", quartermaster, "patches", changedCounts...)
	b.addRow("reload/changed while down, patches of another Deployment", quartermaster, "patches", otherCounts...)
	b.addRow("reload/changed while down, patches after a second start", quartermaster, "patches", laterCounts...)
	return nil
}
