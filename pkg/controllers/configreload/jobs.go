// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"fmt"
	"maps"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// The controller tries to create a Job while the old Job of its name terminates, at first after
// terminatingPoll and then more and more rarely: somebody's finalizer may keep the old Job for good.
// When the old Job is gone, its event causes an attempt at once.
const (
	terminatingPoll    = time.Second
	terminatingPollMax = time.Minute
)

// replacement is a Job to be created in place of a Job that is deleted for it.
type replacement struct {
	workload *policy.Workload
	names    string // of the sources
	job      *batchv1.Job
	deleted  bool          // if not set, the outcome of the deletion is unknown
	wait     time.Duration // before the next attempt to create the Job while the old Job terminates
}

// replaceJob deletes a Job and creates it again. The Job is lost only if the process is killed or
// its term ends between the two, see recreateJob.
func (c *controller) replaceJob(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, _ *entry) (reloadOutcome, error) {
	workload := facts.Workload
	jobs := c.client.BatchV1().Jobs(workload.Namespace)
	live, err := jobs.Get(ctx, workload.Name, metav1.GetOptions{})
	if err != nil {
		return reloadOutcome{}, err
	}
	if live.ResourceVersion != workload.Version || live.UID != workload.UID {
		return reloadOutcome{}, errOutdated(workload)
	}
	if ptr.Deref(live.Spec.ManualSelector, false) {
		return reloadOutcome{skipReason: "The selector is manual"}, nil
	}
	job := jobCopy(live)
	c.cfg.Mark(facts, plan, &job.Spec.Template)

	// A refusal by admission must be known before the Job is deleted.
	trial := job.DeepCopy()
	trial.Name, trial.GenerateName = "", cutName(job.Name)+"-"
	if _, err := jobs.Create(ctx, trial, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldManager: fieldManager}); err != nil {
		return reloadOutcome{}, fmt.Errorf("try the new Job: %w", err)
	}
	r := &replacement{workload: workload, names: namesOf(workload, plan), job: job}
	// The replacement is noted first, because the deletion may take effect although its response is lost.
	c.memory.update(workload.QueueKey, workload.UID, time.Now(), func(e *entry) { e.replacement = r })
	err = c.deleteJob(ctx, workload.QueueKey, metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion})
	if err != nil {
		if isRefusal(err) {
			c.memory.update(workload.QueueKey, workload.UID, time.Now(), func(e *entry) { e.replacement = nil })
		}
		return reloadOutcome{}, err
	}
	r.deleted = true
	if _, err := c.recreateJob(ctx, k, workload.QueueKey, r); err != nil {
		// The next reconcile of the key calls recreateJob again, which reports an error that lasts.
		klog.FromContext(ctx).Info("Cannot yet create the Job that replaces a deleted Job", "err", err)
	}
	return reloadOutcome{handedOn: true}, nil
}

func (c *controller) deleteJob(ctx context.Context, key policy.QueueKey, preconditions metav1.Preconditions) error {
	return c.client.BatchV1().Jobs(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), Preconditions: &preconditions,
	})
}

// jobCopy returns the Job as its user created it, without what the API server and the job
// controller added.
func jobCopy(live *batchv1.Job) *batchv1.Job {
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name: live.Name, Namespace: live.Namespace,
			Labels: maps.Clone(live.Labels), Annotations: maps.Clone(live.Annotations),
			OwnerReferences: live.OwnerReferences, Finalizers: live.Finalizers,
		},
		Spec: *live.Spec.DeepCopy(),
	}
	job.Spec.Selector = nil
	for _, label := range []string{
		"controller-uid", "job-name", batchv1.ControllerUidLabel, batchv1.JobNameLabel,
	} {
		delete(job.Spec.Template.Labels, label)
		delete(job.Labels, label)
	}
	return job
}

// recreateJob creates the Job that replaceJob has deleted. The new Job is then a new workload: a source
// that changes after its creation rolls it.
func (c *controller) recreateJob(ctx context.Context, k *kind, key policy.QueueKey, r *replacement) (time.Duration, error) {
	if !r.deleted {
		// The first deletion may have taken effect. The UID keeps this deletion from another Job.
		err := c.deleteJob(ctx, key, metav1.Preconditions{UID: &r.workload.UID})
		if apierrors.IsConflict(err) {
			c.memory.forget(key) // somebody else has replaced the Job
			return 0, nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return 0, fmt.Errorf("delete %s: %w", key, err)
		}
		r.deleted = true
	}
	jobs := c.client.BatchV1().Jobs(key.Namespace)
	_, err := jobs.Create(ctx, r.job, metav1.CreateOptions{FieldManager: fieldManager})
	if apierrors.IsAlreadyExists(err) {
		existing, getErr := jobs.Get(ctx, key.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(getErr), getErr == nil && existing.UID == r.workload.UID:
			r.wait = min(max(2*r.wait, terminatingPoll), terminatingPollMax)
			return r.wait, nil
		case getErr != nil:
			return 0, fmt.Errorf("get %s: %w", key, getErr)
		}
		err = nil // the answer to the creation was lost, or somebody else was faster
	}
	switch {
	case controllers.IsNamespaceMissing(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		c.giveUpJob(ctx, key, "the namespace is gone or terminates")
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("create %s again: %w", key, err)
	}
	c.announceReload(ctx, k, r.workload, reasonReloaded, "Reloaded for "+r.names, resultSuccess)
	c.memory.forget(key)
	return settleDelay, nil // the event of the new Job arrives sooner
}

func (c *controller) giveUpJob(ctx context.Context, key policy.QueueKey, reason string) {
	klog.FromContext(ctx).Error(nil, "Job was deleted for a reload and is not created again", "job", key.ObjectName, "reason", reason)
	c.metrics.lostJobs.Inc()
	c.memory.forget(key)
}

// giveUpJobs gives up, at the end of a run, the Jobs that are not created again yet.
func (c *controller) giveUpJobs(ctx context.Context) {
	for key, r := range c.memory.replacements() {
		if r.deleted {
			c.giveUpJob(ctx, key, "the controller stops")
			continue
		}
		klog.FromContext(ctx).Error(nil, "Job may have been deleted for a reload: the controller stops before the deletion was answered", "job", key.ObjectName)
	}
}
