// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
	"k8s.io/utils/ptr"
)

const (
	// activeJobPoll is how often the controller checks a running CronJob that must not run twice at
	// once. Usually an event reports the end earlier.
	activeJobPoll = 10 * time.Second
	// maxCronJobName leaves room for the suffix of a Job's name (63).
	maxCronJobName = 52

	instantiateAnnotation = "cronjob.kubernetes.io/instantiate"
)

// runCronJob runs a CronJob once, outside of its schedule.
func (c *Controller) runCronJob(ctx context.Context, k *kind, f *facts, p *plan) (outcome, error) {
	w := f.workload
	obj, err := k.get(ctx, w.ObjectName)
	if err != nil {
		return outcome{}, err
	}
	live := obj.(*batchv1.CronJob)
	if live.ResourceVersion != w.version {
		return outcome{}, errOutdated(w)
	}
	name, hashes := runName(live, f, p), p.hashes()
	// If the same reload is decided on again, its Job was created but the state was not written.
	busy, ran := false, maps.Equal(f.window.ran, hashes)
	if live.Spec.ConcurrencyPolicy == batchv1.ForbidConcurrent && !ran {
		if busy, ran, err = c.runs(ctx, live, name); err != nil {
			return outcome{}, err
		}
	}
	var out outcome
	if !ran {
		out.skipped = p.skipsCronJob(w)
	}
	switch {
	case ran, out.skipped != "":
	case busy && !p.byName():
		out.skipped = "A Job is active"
	case busy:
		return outcome{wait: activeJobPoll}, nil
	default:
		job := c.cronJobRun(live, name, f, p)
		_, err := c.client.BatchV1().Jobs(w.Namespace).Create(ctx, job, metav1.CreateOptions{FieldManager: fieldManager})
		// The name contains the versions of the sources, so an existing Job is ours.
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return outcome{}, err
		}
		// The Job may be deleted before the state is written, for instance because it finished and
		// has a TTL.
		c.memory.update(w.workloadKey, w.uid, f.now, func(e *entry) { e.window.ran = hashes })
	}
	patch := metadataPatch(w, p.state)
	if c.inMemory(w) {
		// A leftover state would count again under another configuration.
		patch = metadataPatch(w, nil)
	}
	if len(patch["metadata"].(object)["annotations"].(object)) > 0 {
		out.version, err = c.patch(ctx, k, w, k.merge, patch)
	}
	return out, err
}

// hashes returns the hashes of the sources that cause the reloads.
func (p *plan) hashes() state {
	s := state{}
	for _, r := range p.reloads {
		s[r.key] = r.hash
	}
	return s
}

// byName reports whether a reload is for a source named by an annotation, so that it needs no
// reference.
func (p *plan) byName() bool {
	return slices.ContainsFunc(p.reloads, func(r reload) bool { return r.match == named })
}

// skipsCronJob returns why a CronJob is not run, as far as the cache shows it; empty if it is run.
func (p *plan) skipsCronJob(w *workload) string {
	if w.kind == "CronJob" && w.Suspended && !p.byName() {
		return "Suspended"
	}
	return ""
}

// runs reports whether a Job of the CronJob has not finished (busy) and whether the Job of that
// name exists (ran). The CronJob's status lists only the Jobs that its controller created, and the
// cache may not have ours yet.
func (c *Controller) runs(ctx context.Context, cj *batchv1.CronJob, name string) (busy, ran bool, err error) {
	finished := func(c batchv1.JobCondition) bool {
		return (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue
	}
	jobs := c.client.BatchV1().Jobs(cj.Namespace)
	busy = len(cj.Status.Active) > 0
	err = pager.New(pager.SimplePageFunc(func(opts metav1.ListOptions) (runtime.Object, error) { return jobs.List(ctx, opts) })).
		EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
			if job, ok := obj.(*batchv1.Job); ok && metav1.IsControlledBy(job, cj) {
				busy = busy || !slices.ContainsFunc(job.Status.Conditions, finished)
				ran = ran || job.Name == name
			}
			return nil
		})
	if err != nil {
		return false, false, fmt.Errorf("check whether a Job is active: %w", err)
	}
	return busy, ran, nil
}

// runName derives the Job's name from the CronJob and the versions of the sources that it runs for,
// so that a retry does not create a second Job. The versions matter because a source may go back to
// data for which a Job still exists.
func runName(cj *batchv1.CronJob, f *facts, p *plan) string {
	s := p.hashes()
	for key, hash := range s {
		s[key] = hash + "@" + f.sources[key].version
	}
	sum := sha256.Sum256([]byte(string(cj.UID) + s.String()))
	return cutName(cj.Name) + "-" + hex.EncodeToString(sum[:4])
}

// cutName shortens a name to leave room for a suffix, and cuts characters that must not precede
// one.
func cutName(name string) string {
	return strings.TrimRight(name[:min(len(name), maxCronJobName)], "-.")
}

// cronJobRun returns the Job of one reload.
func (c *Controller) cronJobRun(cj *batchv1.CronJob, name string, f *facts, p *plan) *batchv1.Job {
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Namespace:   cj.Namespace,
			Labels:      maps.Clone(cj.Spec.JobTemplate.Labels),
			Annotations: maps.Clone(cj.Spec.JobTemplate.Annotations),
			OwnerReferences: []metav1.OwnerReference{{
				// blockOwnerDeletion is not set; it would require more permissions.
				APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "CronJob",
				Name: cj.Name, UID: cj.UID, Controller: ptr.To(true),
			}},
		},
		Spec: *cj.Spec.JobTemplate.Spec.DeepCopy(),
	}
	if job.Annotations == nil {
		job.Annotations = map[string]string{}
	}
	job.Annotations[instantiateAnnotation] = "manual"
	m := c.cfg.marks(f, p.reloads)
	m.apply(&job.Spec.Template)
	return job
}
