// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// terminatingPoll is how often the controller tries to create a Job while the old one of its name
// terminates.
const terminatingPoll = time.Second

// errOutdated makes reconcile decide again on the live object.
func errOutdated(w *workload) error {
	return apierrors.NewConflict(batchv1.Resource(w.kind), w.Name, fmt.Errorf("is not at version %s any more", w.version))
}

// apply sets the marks in the template of an object that is to be created.
func (m *marks) apply(template *corev1.PodTemplateSpec) {
	if m.key != "" {
		if template.Annotations == nil {
			template.Annotations = map[string]string{}
		}
		template.Annotations[m.key] = m.value
	}
	for _, e := range m.env {
		ctr := &template.Spec.Containers[e.container]
		ctr.Env = slices.DeleteFunc(ctr.Env, func(v corev1.EnvVar) bool { return v.Name == e.name })
		if e.value != "" {
			ctr.Env = append(ctr.Env, corev1.EnvVar{Name: e.name, Value: e.value})
		}
	}
}

// replaceJob deletes a Job and creates it again. The Job is lost only if the process is killed
// between the two, see recreateJob.
func (c *Controller) replaceJob(ctx context.Context, f *facts, p *plan) (outcome, error) {
	w := f.workload
	jobs := c.client.BatchV1().Jobs(w.Namespace)
	live, err := jobs.Get(ctx, w.Name, metav1.GetOptions{})
	if err != nil {
		return outcome{}, err
	}
	if live.ResourceVersion != w.version || live.UID != w.uid {
		return outcome{}, errOutdated(w)
	}
	if live.DeletionTimestamp != nil {
		return outcome{skipped: "Terminating"}, nil
	}
	if ptr.Deref(live.Spec.ManualSelector, false) {
		return outcome{skipped: "The selector is manual"}, nil
	}
	job := jobCopy(live)
	m := c.cfg.marks(f, p.reloads)
	m.apply(&job.Spec.Template)

	// A refusal by admission must be known before the Job is deleted.
	trial := job.DeepCopy()
	trial.Name, trial.GenerateName = "", cutName(job.Name)+"-"
	if _, err := jobs.Create(ctx, trial, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldManager: fieldManager}); err != nil {
		return outcome{}, fmt.Errorf("try the new Job: %w", err)
	}
	r := &replacement{facts: f, plan: p, job: job, old: metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}}
	// This is noted first, because the deletion may take effect although its response is lost.
	c.memory.update(w.workloadKey, w.uid, c.clock.Now(), func(e *entry) { e.recreate = r })
	if err := c.deleteOld(ctx, w.workloadKey, r); err != nil {
		return outcome{}, err
	}
	after, _, err := c.recreateJob(ctx, w.workloadKey)
	if err != nil {
		// The Job is deleted, so the reload must not be decided on again. The queue returns to
		// recreateJob, which reports an error that lasts.
		klog.FromContext(ctx).Info("Job was deleted and could not be created yet", "reason", err.Error())
		after = terminatingPoll
	}
	return outcome{after: after, replaced: true}, nil
}

// replacement is a Job to be created in place of one that was deleted.
type replacement struct {
	facts   *facts // of the reload
	plan    *plan
	job     *batchv1.Job
	old     metav1.Preconditions
	unsure  bool // the outcome of the deletion is unknown, so the reload is not announced yet
	deleted bool
	created *batchv1.Job // the created Job as the API server returned it, until the cache has it
}

// deleteOld deletes the Job that r replaces. If the response is lost, it tries again; the
// preconditions keep the second deletion from hitting another object, and a Job that is gone counts
// as deleted by us. If the Job was certainly not deleted, r is forgotten and the reload is decided
// on again.
func (c *Controller) deleteOld(ctx context.Context, key workloadKey, r *replacement) error {
	jobs := c.client.BatchV1().Jobs(key.Namespace)
	err := jobs.Delete(ctx, key.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
		Preconditions:     &r.old,
	})
	if r.unsure && apierrors.IsConflict(err) {
		// A deletion that waits for finalizers changes the version as well.
		live, getErr := jobs.Get(ctx, key.Name, metav1.GetOptions{})
		if getErr != nil && !apierrors.IsNotFound(getErr) {
			return fmt.Errorf("get %s: %w", key, getErr)
		}
		if getErr != nil || live.UID == *r.old.UID && live.DeletionTimestamp != nil {
			err = nil
		}
	}
	switch {
	case err == nil, r.unsure && apierrors.IsNotFound(err):
		r.deleted = true
		return nil
	case apierrors.IsConflict(err), refused(err) && !r.unsure:
		c.memory.update(key, *r.old.UID, c.clock.Now(), func(e *entry) { e.recreate = nil })
	default:
		r.unsure = true
	}
	return err
}

// refused reports whether a request certainly changed nothing.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return controllers.IsNotLeading(err) // not sent; other errors may be broken connections
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
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

// recreateJob creates the Job that replaceJob has deleted, if there is one. busy reports that there
// was one, so that nothing else is to be done for the key now.
func (c *Controller) recreateJob(ctx context.Context, key workloadKey) (after time.Duration, busy bool, err error) {
	r := c.memory.replacement(key)
	if r == nil {
		return 0, false, nil
	}
	if r.created != nil {
		return c.succeedJob(ctx, key, r)
	}
	if !r.deleted {
		if err := c.deleteOld(ctx, key, r); err != nil {
			return 0, true, err
		}
	}
	jobs := c.client.BatchV1().Jobs(key.Namespace)
	created, err := jobs.Create(ctx, r.job, metav1.CreateOptions{FieldManager: fieldManager})
	switch {
	case err == nil:
		return c.recreated(ctx, key, r, created)
	case apierrors.IsNotFound(err) && isAboutNamespace(err):
		c.giveUpJob(ctx, key, "the namespace is gone")
		return 0, true, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		c.giveUpJob(ctx, key, "the namespace terminates")
		return 0, true, nil
	case !apierrors.IsAlreadyExists(err):
		return 0, true, fmt.Errorf("create %s again: %w", key, err)
	}
	existing, err := jobs.Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case err == nil && existing.UID != *r.old.UID && createdByUs(existing):
		return c.recreated(ctx, key, r, existing) // the response to the creation was lost
	case err == nil && existing.UID != *r.old.UID:
		c.giveUpJob(ctx, key, "somebody else created one of that name")
		return 0, true, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, true, fmt.Errorf("get %s: %w", key, err)
	}
	return terminatingPoll, true, nil // the old one is still terminating
}

func (c *Controller) recreated(ctx context.Context, key workloadKey, r *replacement, job *batchv1.Job) (time.Duration, bool, error) {
	if r.unsure {
		c.announce(ctx, c.kinds[key.kind], r.facts, r.plan, reasonReloaded, "Reloaded for ", resultSuccess)
	}
	r.created = job
	return settle, true, nil // its event arrives sooner
}

// succeedJob hands the recorded state of a Job to the new Job as soon as the cache has it. A change
// before that is at most noted for the old one; the comparison finds it.
func (c *Controller) succeedJob(ctx context.Context, key workloadKey, r *replacement) (after time.Duration, busy bool, err error) {
	if c.cachedUID(key) == r.created.UID {
		c.memory.succeed(key, r.created.UID, c.readBy(r))
		return 0, false, nil
	}
	live, err := c.client.BatchV1().Jobs(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), err == nil && live.UID != r.created.UID:
		c.memory.forget(key) // deleted before the cache had it
		return 0, false, nil
	case err != nil:
		return 0, true, fmt.Errorf("get %s: %w", key, err)
	}
	return settle, true, nil
}

// readBy returns what the pods of the new Job have read. If a source changed between the decision
// and the creation, that is the new data.
func (c *Controller) readBy(r *replacement) state {
	s := maps.Clone(r.plan.state)
	for key, current := range c.lookUp(r.facts.workload, &r.facts.rules, s) {
		order, err := resourceversion.CompareResourceVersion(current.version, r.created.ResourceVersion)
		if _, recorded := s[key]; recorded && err == nil && order < 0 {
			s[key] = current.short()
		}
	}
	return s
}

// isAboutNamespace distinguishes a 404 for the namespace from one that admission returned.
func isAboutNamespace(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

func createdByUs(job *batchv1.Job) bool {
	return slices.ContainsFunc(job.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == fieldManager })
}

func (c *Controller) giveUpJob(ctx context.Context, key workloadKey, why string) {
	klog.FromContext(ctx).Error(nil, "Job was deleted for a reload and is not created again", "job", key.ObjectName, "reason", why)
	c.metrics.lostJobs.Inc()
	c.memory.forget(key)
}

// giveUpJobs is called at the end of a run.
func (c *Controller) giveUpJobs(ctx context.Context) {
	for key, r := range c.memory.replacements() {
		switch {
		case r.created != nil:
		case r.deleted:
			c.giveUpJob(ctx, key, "the controller stops")
		default:
			klog.FromContext(ctx).Error(nil, "Job may have been deleted for a reload: the controller stops before the deletion was answered", "job", key.ObjectName)
		}
	}
}

// replacement returns the Job to create again, if there is one.
func (m *memory) replacement(key workloadKey) *replacement {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e, ok := m.entries[key]; ok {
		return e.recreate
	}
	return nil
}
