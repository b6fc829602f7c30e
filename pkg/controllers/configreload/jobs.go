// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

const (
	// activeJobPoll is how often a CronJob that must not run twice at once is
	// looked at again while it runs; its end usually brings an event before.
	activeJobPoll = 10 * time.Second
	// terminatingPoll is how often the creation of a Job is tried while the old
	// one of its name terminates.
	terminatingPoll = time.Second
	// maxCronJobName leaves room for the suffix of a Job's name (63).
	maxCronJobName = 52

	instantiateAnnotation = "cronjob.kubernetes.io/instantiate"
)

// errOutdated makes the reconcile decide again on the live object.
func errOutdated(w *workload) error {
	return apierrors.NewConflict(batchv1.Resource(w.kind), w.Name, fmt.Errorf("is not at version %s any more", w.version))
}

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
	name := runName(live, f, p)
	// A reload of which the Job was created and the state not written is here again.
	busy, ran := false, f.window.ran == name
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
		// The name tells this version of the sources, so one that is there is ours.
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return outcome{}, err
		}
		// The Job may be gone before the state is written: its user may have asked for that.
		c.memory.update(w.workloadKey, w.uid, f.now, func(e *entry) { e.window.ran = name })
	}
	patch := metadataPatch(w, p.state)
	if c.inMemory(w) {
		patch = metadataPatch(w, nil) // a leftover would count again under another configuration
	}
	if len(patch["metadata"].(object)["annotations"].(object)) > 0 {
		out.version, err = c.patch(ctx, k, w, k.merge, patch)
	}
	return out, err
}

// byName says that a reload needs no reference.
func (p *plan) byName() bool {
	return slices.ContainsFunc(p.reloads, func(r reload) bool { return r.match == named })
}

// skipsCronJob tells why a CronJob is not run, if that shows without a live read.
func (p *plan) skipsCronJob(w *workload) string {
	if w.kind == "CronJob" && w.Suspended && !p.byName() {
		return "Suspended"
	}
	return ""
}

// runs says that a Job of a CronJob has not finished, and whether there is the
// one of that name. The CronJob's status tells only of those that its controller
// created, and those of ours may be newer than the cache.
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
		return false, false, fmt.Errorf("look whether a Job is active: %w", err)
	}
	return busy, ran, nil
}

// runName is made of the CronJob and what its Job runs for, so that a repetition
// creates the Job only once. The versions are in it because a source may go back
// to data that a Job ran for before, and that Job may still be there.
func runName(cj *batchv1.CronJob, f *facts, p *plan) string {
	s := state{}
	for _, r := range p.reloads {
		s[r.key] = r.hash + "@" + f.sources[r.key].version
	}
	sum := sha256.Sum256([]byte(string(cj.UID) + s.String()))
	return cutName(cj.Name) + "-" + hex.EncodeToString(sum[:4])
}

// cutName leaves room for a suffix, and no end that a suffix may not follow.
func cutName(name string) string {
	return strings.TrimRight(name[:min(len(name), maxCronJobName)], "-.")
}

// cronJobRun is the Job of one reload.
func (c *Controller) cronJobRun(cj *batchv1.CronJob, name string, f *facts, p *plan) *batchv1.Job {
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Namespace:   cj.Namespace,
			Labels:      maps.Clone(cj.Spec.JobTemplate.Labels),
			Annotations: maps.Clone(cj.Spec.JobTemplate.Annotations),
			OwnerReferences: []metav1.OwnerReference{{
				// Without blockOwnerDeletion, which would ask for more rights.
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

// apply sets the marks in a template that is to be created.
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

// replaceJob deletes a Job and creates it again. A process that is killed
// between the two loses the Job; nothing else does, see recreateJob.
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

	// What admission refuses must be known before the Job is deleted.
	trial := job.DeepCopy()
	trial.Name, trial.GenerateName = "", cutName(job.Name)+"-"
	if _, err := jobs.Create(ctx, trial, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldManager: fieldManager}); err != nil {
		return outcome{}, fmt.Errorf("try the new Job: %w", err)
	}
	r := &replacement{facts: f, plan: p, job: job, old: metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}}
	// Remembered first: the deletion may stand though its answer is lost.
	c.memory.update(w.workloadKey, w.uid, c.clock.Now(), func(e *entry) { e.recreate = r })
	if err := c.deleteOld(ctx, w.workloadKey, r); err != nil {
		return outcome{}, err
	}
	after, _, err := c.recreateJob(ctx, w.workloadKey)
	if err != nil {
		// The deletion stands, so this is not to be decided on again: the queue
		// comes back to recreateJob, which tells of an error that lasts.
		klog.FromContext(ctx).Info("Job was deleted and could not be created yet", "reason", err.Error())
		after = terminatingPoll
	}
	return outcome{after: after, replaced: true}, nil
}

// replacement is a Job that takes the place of one that is deleted for it.
type replacement struct {
	facts   *facts // of the reload
	plan    *plan
	job     *batchv1.Job
	old     metav1.Preconditions
	unsure  bool // a deletion was sent and not answered, so the reload is not told of yet
	deleted bool
	created *batchv1.Job // as it was answered; until the cache has it
}

// deleteOld deletes the Job that r replaces. Where the answer is lost the deletion
// is tried again, which by its preconditions harms nothing else; a Job that is gone
// then counts as deleted by us. Where the Job surely stays r is forgotten, and the
// reload decided on again.
func (c *Controller) deleteOld(ctx context.Context, key workloadKey, r *replacement) error {
	jobs := c.client.BatchV1().Jobs(key.Namespace)
	err := jobs.Delete(ctx, key.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
		Preconditions:     &r.old,
	})
	if r.unsure && apierrors.IsConflict(err) {
		// Also a deletion that waits for finalizers changes the version.
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

// refused says that a request surely changed nothing.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return controllers.IsNotLeading(err) // not sent; others may be broken connections
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}

// jobCopy is the Job as it was asked for, without what the API server and the
// job controller added.
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

// recreateJob creates a Job that replaceJob has deleted, if there is one. busy
// tells that there was, so that the key has nothing else to do for now.
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
		return c.recreated(ctx, key, r, existing) // the answer to the creation was lost
	case err == nil && existing.UID != *r.old.UID:
		c.giveUpJob(ctx, key, "somebody else created one of that name")
		return 0, true, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, true, fmt.Errorf("get %s: %w", key, err)
	}
	return terminatingPoll, true, nil // the old one terminates
}

func (c *Controller) recreated(ctx context.Context, key workloadKey, r *replacement, job *batchv1.Job) (time.Duration, bool, error) {
	if r.unsure {
		c.announce(ctx, c.kinds[key.kind], r.facts, r.plan, reasonReloaded, "Reloaded for ", resultSuccess)
	}
	r.created = job
	return settle, true, nil // its event comes sooner
}

// succeedJob hands what is recorded of a Job over to the one that was created
// again, as soon as the cache has that. A change until then is noted with the
// old one, if at all, and is found by the difference.
func (c *Controller) succeedJob(ctx context.Context, key workloadKey, r *replacement) (after time.Duration, busy bool, err error) {
	if c.cachedUID(key) == r.created.UID {
		c.memory.succeed(key, r.created.UID, c.readBy(r))
		return 0, false, nil
	}
	live, err := c.client.BatchV1().Jobs(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), err == nil && live.UID != r.created.UID:
		c.memory.forget(key) // gone again before the cache had it
		return 0, false, nil
	case err != nil:
		return 0, true, fmt.Errorf("get %s: %w", key, err)
	}
	return settle, true, nil
}

// readBy is what the pods of the new Job have read: of a source that changed
// between the decision and the creation, the new data.
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

// isAboutNamespace tells a 404 of a namespace from one that admission asked for.
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

// giveUpJobs is for the end of a run.
func (c *Controller) giveUpJobs(ctx context.Context) {
	for key, r := range c.memory.replacements() {
		switch {
		case r.created != nil:
		case r.deleted:
			c.giveUpJob(ctx, key, "the controller stops")
		default:
			klog.FromContext(ctx).Error(nil, "Job may have been deleted for a reload, as the deletion was not answered before the controller stops", "job", key.ObjectName)
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
