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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

const (
	// activeJobPollInterval is how often the controller checks whether the Job of a CronJob that forbids
	// concurrency has ended. Usually the Job's event comes earlier.
	activeJobPollInterval = 10 * time.Second
	// maxCronJobName leaves room for the suffix of a Job's name (63).
	maxCronJobName = 52

	instantiateAnnotation = "cronjob.kubernetes.io/instantiate"
)

// cronJobRun is the Job that a CronJob was last run as.
type cronJobRun struct {
	name string
	// hashes are the hashes that the Job was created for, until they are recorded.
	hashes policy.State
}

const suspended = "Suspended"

// runCronJob runs a CronJob once, outside of its schedule.
func (c *controller) runCronJob(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, e *entry) (reloadOutcome, error) {
	workload := facts.Workload
	name, hashes := runName(facts, plan), plan.Hashes()
	// If the same reload is decided on again, its Job was created but the state was not written. The
	// name contains the versions of the sources, so a Job of that name is ours.
	ran := maps.Equal(e.lastRun.hashes, hashes) || c.cachedJob(workload.Namespace, name) != nil
	if workload.ForbidsConcurrent && !ran && plan.HasNamedSource() && c.cacheHasActiveJob(workload.UID) {
		return reloadOutcome{retryAfter: activeJobPollInterval}, nil // without a request, for as long as the Job runs
	}
	obj, err := k.get(ctx, workload.ObjectName)
	if err != nil {
		return reloadOutcome{}, err
	}
	live := obj.(*batchv1.CronJob)
	if live.ResourceVersion != workload.Version {
		return reloadOutcome{}, errOutdated(workload)
	}
	var isActive bool
	if workload.ForbidsConcurrent && !ran {
		if isActive, err = c.hasActiveJob(ctx, live, e); err != nil {
			return reloadOutcome{}, err
		}
	}
	var out reloadOutcome
	switch {
	case ran:
	case workload.Suspended && !plan.HasNamedSource():
		out.skipReason = suspended
	case isActive && !plan.HasNamedSource():
		out.skipReason = "A Job is active"
	case isActive:
		return reloadOutcome{retryAfter: activeJobPollInterval}, nil
	default:
		job := c.newRunJob(live, name, facts, plan)
		_, err := c.client.BatchV1().Jobs(workload.Namespace).Create(ctx, job, metav1.CreateOptions{FieldManager: fieldManager})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return reloadOutcome{}, err
		}
		// The Job may be deleted before the state is written, for instance because it finished and
		// has a TTL.
		c.memory.update(workload.QueueKey, workload.UID, facts.Now, func(current *entry) { current.lastRun = cronJobRun{name: name, hashes: hashes} })
	}
	if patch, changes := policy.MetadataPatch(workload, plan.State); changes {
		out.version, err = c.sendPatch(ctx, k, workload, k.mergeType, patch)
	}
	return out, err
}

// hasActiveJob reports whether a Job of the CronJob has not finished. The CronJob's status lists only the
// Jobs that its controller created, and the cache may not have ours yet.
func (c *controller) hasActiveJob(ctx context.Context, cj *batchv1.CronJob, e *entry) (bool, error) {
	if len(cj.Status.Active) > 0 || c.cacheHasActiveJob(cj.UID) {
		return true, nil
	}
	if e.lastRun.name == "" || c.cachedJob(cj.Namespace, e.lastRun.name) != nil {
		return false, nil
	}
	job, err := c.client.BatchV1().Jobs(cj.Namespace).Get(ctx, e.lastRun.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("check whether the previous reload's Job is active: %w", err)
	}
	return !policy.JobFinished(job), nil
}

// cacheHasActiveJob reports whether the cache has a Job of the CronJob that has not finished.
func (c *controller) cacheHasActiveJob(cronJob types.UID) bool {
	return slices.ContainsFunc(c.informers.Jobs.ByIndex(cronJobIndex, string(cronJob)), func(obj metav1.Object) bool {
		workload, err := policy.NewWorkload(&jobKind, obj, Name)
		return err == nil && !workload.Finished
	})
}

// cachedJob returns a Job of the cache; nil if the cache does not have it.
func (c *controller) cachedJob(namespace, name string) metav1.Object {
	obj, _ := c.informers.Jobs.Get(cache.NewObjectName(namespace, name))
	return obj
}

// runName derives the Job's name from the CronJob and the versions of the sources that it runs for,
// so that a retry does not create a second Job. The versions matter because a source may go back to
// data for which a Job still exists.
func runName(facts *policy.Facts, plan *policy.Plan) string {
	workload, s := facts.Workload, plan.Hashes()
	for key, hash := range s {
		s[key] = hash + "@" + facts.Sources[key].Version
	}
	sum := sha256.Sum256([]byte(string(workload.UID) + s.Text(workload.QueueKey, "")))
	return cutName(workload.Name) + "-" + hex.EncodeToString(sum[:4])
}

// cutName shortens a name to leave room for a suffix, and cuts characters that must not precede a suffix.
func cutName(name string) string {
	return strings.TrimRight(name[:min(len(name), maxCronJobName)], "-.")
}

// newRunJob returns the Job of one reload.
func (c *controller) newRunJob(cj *batchv1.CronJob, name string, facts *policy.Facts, plan *policy.Plan) *batchv1.Job {
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
	c.cfg.Mark(facts, plan, &job.Spec.Template)
	return job
}
