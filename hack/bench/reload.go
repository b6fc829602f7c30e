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
	// changePause is the time between two single changes. It keeps the rate below --kube-api-qps,
	// so that the limit has no effect.
	changePause = 100 * time.Millisecond
	// floorRow is what a change takes without a controller.
	floorRow = "for comparison: a change and a patch by the benchmark itself"
	// quiescence is long enough for Events to be sent, and for a second patch if there were one.
	quiescence = 5 * time.Second
)

// reload measures config-reload with --config-reload-quiet-period=0.
func (b *bench) reload(ctx context.Context) (err error) {
	s := managerSubject(b, ours, b.binaries.manager, "--config-reload-quiet-period=0")
	if !b.opts.wants(s.name) {
		return nil
	}
	b.progress("%s: starting a leader and a standby, then %d Deployments", s.name, workloads)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	w, err := b.createWorkloads(ctx, workloads)
	if err != nil {
		return err
	}
	for _, measure := range []func(context.Context, *pair, *templateWatch) error{b.oneAtATime, b.burst, b.whileDown} {
		// Lets the buckets of the clients' rate limits fill up.
		if err := sleep(ctx, quiescence); err != nil {
			return err
		}
		if err := measure(ctx, p, w); err != nil {
			return err
		}
	}
	return b.cleanWorkloads(ctx)
}

func workloadName(i int) string { return fmt.Sprintf("web-%03d", i) }

// createWorkloads creates n Deployments and waits until a manager has recorded the state of all.
func (b *bench) createWorkloads(ctx context.Context, n int) (*templateWatch, error) {
	unwatched := newDeployment(plain, "none")
	unwatched.Annotations = nil
	if _, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, unwatched, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if err := b.ensureConfigMap(ctx, plain); err != nil {
		return nil, err
	}
	err := parallel(ctx, 8, n, func(ctx context.Context, i int) error {
		if err := b.ensureConfigMap(ctx, workloadName(i)); err != nil {
			return err
		}
		_, err := b.admin.AppsV1().Deployments(namespace).Create(ctx, newDeployment(workloadName(i), workloadName(i)), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	w := b.watchTemplates(ctx, namespace)
	return w, eventually(ctx, 100*time.Millisecond, "the state of every Deployment", func(context.Context) error { return w.allRecorded(n) })
}

// cleanWorkloads deletes what createWorkloads has created, since later parts begin on an empty
// cluster.
func (b *bench) cleanWorkloads(ctx context.Context) error {
	return errors.Join(b.cleanTriggers(ctx),
		b.admin.CoreV1().ConfigMaps(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
}

// change gives a ConfigMap another value.
func (b *bench) change(ctx context.Context, namespace, name string) error {
	patch := fmt.Appendf(nil, `{"data":{"value":"%x"}}`, rand.Uint64())
	_, err := b.admin.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// oneAtATime changes one ConfigMap after the other and waits for its Deployment.
func (b *bench) oneAtATime(ctx context.Context, p *pair, w *templateWatch) error {
	audit, err := b.tailAudit()
	if err != nil {
		return err
	}
	defer audit.close()
	var seen, logged, floor []float64
	for i := range b.opts.changes {
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
			return e.RequestReceivedTimestamp.After(begin) && p.leader.did(e) && isPatch(e, name)
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
		if err := sleep(ctx, changePause); err != nil {
			return err
		}
		took, err := b.roundTrip(ctx, w)
		if err != nil {
			return err
		}
		floor = append(floor, milliseconds(took))
		if err := sleep(ctx, changePause); err != nil {
			return err
		}
	}
	if err := sleep(ctx, quiescence); err != nil {
		return err
	}
	requests, err := audit.count(func(e auditv1.Event) bool { return p.leader.did(e) && isRequest(e) && !isLease(e) })
	if err != nil {
		return err
	}
	b.add("reload/one change, sent to patch seen by a watch", ours, "ms", seen...)
	b.add("reload/"+floorRow, apiserver, "ms", floor...)
	b.add("reload/one change, update received to patch written, by the audit log", ours, "ms", logged...)
	b.add("reload/one change, API requests", ours, "per change", float64(requests)/float64(b.opts.changes))
	return nil
}

// roundTrip does by itself the least that a controller has to do: it changes a ConfigMap that no
// workload uses, patches the template of a Deployment that uses none, and waits until its watch
// delivers the patch. The result is the API server's and the machine's share of a reload.
func (b *bench) roundTrip(ctx context.Context, w *templateWatch) (time.Duration, error) {
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

// burst changes all ConfigMaps at once.
func (b *bench) burst(ctx context.Context, p *pair, w *templateWatch) error {
	var all burstFigures
	for range b.opts.bursts {
		if err := b.oneBurst(ctx, p, w, workloads, &all); err != nil {
			return err
		}
	}
	b.add("reload/burst of 100 ConfigMaps of 100 Deployments, all patched", ours, "s", all.seconds...)
	b.add("reload/burst, patches of a Deployment", ours, "patches", all.patches...)
	b.add("reload/burst, API requests", ours, "requests", all.requests...)
	return nil
}

// burstFigures are the figures of several bursts.
type burstFigures struct {
	seconds  []float64 // from the first change until the last Deployment was patched
	patches  []float64 // of each Deployment
	requests []float64 // of the leader
}

// oneBurst lets 16 clients change the ConfigMaps of n Deployments, and adds its figures to those of
// other bursts.
func (b *bench) oneBurst(ctx context.Context, p *pair, w *templateWatch, n int, to *burstFigures) error {
	audit, err := b.tailAudit()
	if err != nil {
		return err
	}
	defer audit.close()
	mark := w.mark()
	begin := time.Now()
	err = parallel(ctx, 16, n, func(ctx context.Context, i int) error { return b.change(ctx, namespace, workloadName(i)) })
	if err != nil {
		return err
	}
	var last time.Time
	for i := range n {
		at, err := w.rolled(ctx, mark, workloadName(i))
		if err != nil {
			return err
		}
		if at.After(last) {
			last = at
		}
	}
	to.seconds = append(to.seconds, last.Sub(begin).Seconds())
	if err := sleep(ctx, quiescence); err != nil {
		return err
	}
	patches := map[string]int{}
	requests, err := audit.count(func(e auditv1.Event) bool {
		if p.leader.did(e) && isPatch(e, "") {
			patches[e.ObjectRef.Name]++
		}
		return p.leader.did(e) && isRequest(e) && !isLease(e)
	})
	if err != nil {
		return err
	}
	for i := range n {
		to.patches = append(to.patches, float64(patches[workloadName(i)]))
	}
	to.requests = append(to.requests, float64(requests))
	return nil
}

// whileDown changes ConfigMaps while no manager runs, and then starts one twice. The first start
// must find the changes, the second nothing.
func (b *bench) whileDown(ctx context.Context, p *pair, w *templateWatch) error {
	const changed = workloads / 10
	var seconds, ofChanged, ofOthers, later []float64
	for range b.opts.downs {
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
		defer audit.close()
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
		if err := sleep(ctx, quiescence); err != nil {
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
		if err := sleep(ctx, quiescence); err != nil {
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
