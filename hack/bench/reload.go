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
	// plain names a Deployment that does not ask to be rolled and a ConfigMap that nobody uses.
	plain = "plain"
	// workloads is the number of Deployments of reload, each with a ConfigMap of its own.
	workloads = 100
	// changePause is the time between two single changes, so that each is a reload of its own.
	changePause = 100 * time.Millisecond
	// floorRow is what a change takes without a controller.
	floorRow = "for comparison: a change and a patch by the benchmark itself"
	// quiescence is long enough for Events to be sent, and for a second patch if there were one.
	quiescence = 5 * time.Second
)

// reload measures config-reload with --config-reload-quiet-period=0.
func (b *bench) reload(ctx context.Context) (err error) {
	s := managerSubject(b, b.binaries.manager, "--config-reload-quiet-period=0")
	if !b.opts.wants(s.name) {
		return nil
	}
	b.progress("%s: starting a leader and a standby, then %d Deployments", s.name, workloads)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	w, err := b.createWorkloads(ctx)
	if err != nil {
		return err
	}
	for _, measure := range []func(context.Context, *pair, *history) error{b.oneAtATime, b.burst, b.whileDown} {
		// The Events of the previous measurement are sent meanwhile.
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		if err := measure(ctx, p, w); err != nil {
			return err
		}
	}
	// Later parts begin on an empty cluster.
	return errors.Join(b.cleanTriggers(ctx),
		b.admin.CoreV1().ConfigMaps(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
}

func workloadName(i int) string { return fmt.Sprintf("web-%03d", i) }

// createWorkloads creates the Deployments and waits until a manager has recorded the state of all.
func (b *bench) createWorkloads(ctx context.Context) (*history, error) {
	w := b.watchTemplates(ctx, namespace)
	unwatched := newDeployment(plain, "none")
	unwatched.Annotations = nil
	if _, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, unwatched, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if err := b.ensureConfigMap(ctx, plain); err != nil {
		return nil, err
	}
	err := parallel(ctx, 8, workloads, func(ctx context.Context, i int) error {
		if err := b.ensureConfigMap(ctx, workloadName(i)); err != nil {
			return err
		}
		_, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, newDeployment(workloadName(i), workloadName(i)), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	return w, eventually(ctx, 100*time.Millisecond, "the state of every Deployment", func(ctx context.Context) error {
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
		if recorded < workloads {
			return fmt.Errorf("%d of %d have it", recorded, workloads)
		}
		return nil
	})
}

// change gives a ConfigMap another value.
func (b *bench) change(ctx context.Context, namespace, name string) error {
	patch := fmt.Appendf(nil, `{"data":{"value":"%x"}}`, rand.Uint64())
	_, err := b.admin.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// oneAtATime changes one ConfigMap after the other and waits for its Deployment.
func (b *bench) oneAtATime(ctx context.Context, p *pair, w *history) error {
	audit, err := b.tailAudit()
	if err != nil {
		return err
	}
	var seen, logged, floor []float64
	changes := b.opts.times(200)
	for i := range changes {
		name := workloadName(i % workloads)
		mark := w.mark()
		begin := time.Now()
		if err := b.change(ctx, namespace, name); err != nil {
			return err
		}
		at, err := w.rolled(ctx, mark, name)
		if err != nil {
			return err
		}
		seen = append(seen, milliseconds(at.Sub(begin)))
		patch, err := audit.first(ctx, "the patch of "+name, func(e auditv1.Event) bool {
			return e.RequestReceivedTimestamp.After(begin) && p.leader.madeRequest(e) && isPatch(e, name)
		})
		if err != nil {
			return err
		}
		update, err := audit.first(ctx, "the change of "+name, func(e auditv1.Event) bool {
			return e.RequestReceivedTimestamp.After(begin) && e.Verb == "patch" && isAbout(e, "configmaps") && e.ObjectRef.Name == name
		})
		if err != nil {
			return err
		}
		logged = append(logged, milliseconds(patch.StageTimestamp.Sub(update.RequestReceivedTimestamp.Time)))
		if err := cluster.Sleep(ctx, changePause); err != nil {
			return err
		}
		took, err := b.roundTrip(ctx, w)
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
	requests, err := audit.count(func(e auditv1.Event) bool { return p.leader.madeRequest(e) && isRequest(e) && !isLease(e) })
	if err != nil {
		return err
	}
	b.add("reload/one change, sent to patch seen by a watch", ours, "ms", seen...)
	b.add("reload/"+floorRow, apiserver, "ms", floor...)
	b.add("reload/one change, update received to patch written, by the audit log", ours, "ms", logged...)
	b.add("reload/one change, API requests", ours, "per change", float64(requests)/float64(changes))
	return nil
}

// roundTrip does by itself the least that a controller has to do: it changes a ConfigMap that no
// workload uses, patches the template of a Deployment that uses none, and waits until its watch
// delivers the patch. The result is the API server's and the machine's share of a reload.
func (b *bench) roundTrip(ctx context.Context, w *history) (time.Duration, error) {
	mark := w.mark()
	begin := time.Now()
	if err := b.change(ctx, namespace, plain); err != nil {
		return 0, err
	}
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"value":"%x"}}}}}`, rand.Uint64())
	if _, err := b.admin.AppsV1().Deployments(namespace).Patch(ctx, plain, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return 0, err
	}
	at, err := w.rolled(ctx, mark, plain)
	return at.Sub(begin), err
}

// isPatch reports whether the event is a patch of a Deployment, by anybody.
func isPatch(e auditv1.Event, name string) bool {
	return cluster.AuditWrite(e) && e.Verb == "patch" && isAbout(e, "deployments") &&
		e.ObjectRef.Namespace == namespace && (name == "" || e.ObjectRef.Name == name)
}

// burst lets 16 clients change all ConfigMaps at once, several times.
func (b *bench) burst(ctx context.Context, p *pair, w *history) error {
	var seconds, ofEach, requests []float64
	for range b.opts.times(5) {
		took, patches, n, err := b.oneBurst(ctx, p, w)
		if err != nil {
			return err
		}
		seconds, requests = append(seconds, took.Seconds()), append(requests, float64(n))
		for i := range workloads {
			ofEach = append(ofEach, float64(patches[workloadName(i)]))
		}
	}
	b.add("reload/burst of 100 ConfigMaps of 100 Deployments, all patched", ours, "s", seconds...)
	b.add("reload/burst, patches of a Deployment", ours, "patches", ofEach...)
	b.add("reload/burst, API requests", ours, "requests", requests...)
	return nil
}

// oneBurst returns the time from the first change until the last Deployment was patched, the patches
// of each Deployment and the requests of the leader.
func (b *bench) oneBurst(ctx context.Context, p *pair, w *history) (took time.Duration, patches map[string]int, requests int, err error) {
	audit, err := b.tailAudit()
	if err != nil {
		return 0, nil, 0, err
	}
	mark := w.mark()
	begin := time.Now()
	err = parallel(ctx, 16, workloads, func(ctx context.Context, i int) error { return b.change(ctx, namespace, workloadName(i)) })
	if err != nil {
		return 0, nil, 0, err
	}
	for i := range workloads {
		at, err := w.rolled(ctx, mark, workloadName(i))
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
		return p.leader.madeRequest(e) && isRequest(e) && !isLease(e)
	})
	return took, patches, requests, err
}

// whileDown changes ConfigMaps while no manager runs, and then starts one twice. The first start
// must find the changes, the second nothing.
func (b *bench) whileDown(ctx context.Context, p *pair, w *history) error {
	const changed = workloads / 10
	var seconds, ofChanged, ofOthers, later []float64
	for range b.opts.times(5) {
		if err := p.stop(); err != nil {
			return err
		}
		p.leader, p.standby = nil, nil
		if err := parallel(ctx, 4, changed, func(ctx context.Context, i int) error { return b.change(ctx, namespace, workloadName(i)) }); err != nil {
			return err
		}
		audit, err := b.tailAudit()
		if err != nil {
			return err
		}
		mark := w.mark()
		if p.leader, err = p.startLeader(ctx, "a"); err != nil {
			return err
		}
		for i := range changed {
			at, err := w.rolled(ctx, mark, workloadName(i))
			if err != nil {
				return err
			}
			seconds = append(seconds, at.Sub(p.leader.started).Seconds())
		}
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		for i := range workloads {
			n, err := audit.count(func(e auditv1.Event) bool { return isPatch(e, workloadName(i)) })
			if err != nil {
				return err
			}
			if i < changed {
				ofChanged = append(ofChanged, float64(n))
			} else {
				ofOthers = append(ofOthers, float64(n))
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
		later = append(later, float64(after-before))
	}
	b.add("reload/changed while down, start to patched", ours, "s", seconds...)
	b.add("reload/changed while down, patches of a Deployment concerned", ours, "patches", ofChanged...)
	b.add("reload/changed while down, patches of another Deployment", ours, "patches", ofOthers...)
	b.add("reload/changed while down, patches after a second start", ours, "patches", later...)
	return nil
}
