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
	// activeJobPoll is how often the controller checks a running CronJob that must not run twice at
	// once. Usually an event reports the end earlier.
	activeJobPoll = 10 * time.Second
	// maxCronJobName leaves room for the suffix of a Job's name (63).
	maxCronJobName = 52

	instantiateAnnotation = "cronjob.kubernetes.io/instantiate"
)

// cronJobRun is the Job that a CronJob was last run as.
type cronJobRun struct {
	name string
	// ranFor are the hashes that the Job was created for, until they are recorded.
	ranFor policy.State
}

const suspended = "Suspended"

// runCronJob runs a CronJob once, outside of its schedule.
func (c *controller) runCronJob(ctx context.Context, k *kind, f *policy.Facts, p *policy.Plan, e *entry) (outcome, error) {
	w := f.Workload
	name, hashes := runName(f, p), p.Hashes()
	// If the same reload is decided on again, its Job was created but the state was not written. The
	// name contains the versions of the sources, so a Job of that name is ours.
	ran := maps.Equal(e.job.ranFor, hashes) || c.cachedJob(w.Namespace, name) != nil
	if w.Forbids && !ran && p.ByName() && c.hasActiveJob(w.UID) {
		return outcome{wait: activeJobPoll}, nil // without a request, for as long as it takes
	}
	obj, err := k.get(ctx, w.ObjectName)
	if err != nil {
		return outcome{}, err
	}
	live := obj.(*batchv1.CronJob)
	if live.ResourceVersion != w.Version {
		return outcome{}, errOutdated(w)
	}
	var busy bool
	if w.Forbids && !ran {
		if busy, err = c.runs(ctx, live, e); err != nil {
			return outcome{}, err
		}
	}
	var out outcome
	switch {
	case ran:
	case w.Suspended && !p.ByName():
		out.skipped = suspended
	case busy && !p.ByName():
		out.skipped = "A Job is active"
	case busy:
		return outcome{wait: activeJobPoll}, nil
	default:
		job := c.cronJobRun(live, name, f, p)
		_, err := c.client.BatchV1().Jobs(w.Namespace).Create(ctx, job, metav1.CreateOptions{FieldManager: fieldManager})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return outcome{}, err
		}
		// The Job may be deleted before the state is written, for instance because it finished and
		// has a TTL.
		c.memory.update(w.QueueKey, w.UID, f.Now, func(live *entry) { live.job = cronJobRun{name: name, ranFor: hashes} })
	}
	if patch, changes := policy.MetadataPatch(w, p.State); changes {
		out.version, err = c.patch(ctx, k, w, k.merge, patch)
	}
	return out, err
}

// runs reports whether a Job of the CronJob has not finished. The CronJob's status lists only the
// Jobs that its controller created, and the cache may not have ours yet.
func (c *controller) runs(ctx context.Context, cj *batchv1.CronJob, e *entry) (bool, error) {
	if len(cj.Status.Active) > 0 || c.hasActiveJob(cj.UID) {
		return true, nil
	}
	if e.job.name == "" || c.cachedJob(cj.Namespace, e.job.name) != nil {
		return false, nil
	}
	job, err := c.client.BatchV1().Jobs(cj.Namespace).Get(ctx, e.job.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("check whether the previous reload's Job is active: %w", err)
	}
	return !policy.JobFinished(job), nil
}

// hasActiveJob reports whether the cache has a Job of the CronJob that has not finished.
func (c *controller) hasActiveJob(cronJob types.UID) bool {
	return slices.ContainsFunc(c.in.Jobs.ByIndex(byCronJob, string(cronJob)), func(obj metav1.Object) bool {
		w, err := policy.NewWorkload(&jobKind, obj, Name)
		return err == nil && !w.Finished
	})
}

// cachedJob returns a Job of the cache; nil if the cache does not have it.
func (c *controller) cachedJob(namespace, name string) metav1.Object {
	obj, _ := c.in.Jobs.Get(cache.NewObjectName(namespace, name))
	return obj
}

// runName derives the Job's name from the CronJob and the versions of the sources that it runs for,
// so that a retry does not create a second Job. The versions matter because a source may go back to
// data for which a Job still exists.
func runName(f *policy.Facts, p *policy.Plan) string {
	w, s := f.Workload, p.Hashes()
	for key, hash := range s {
		s[key] = hash + "@" + f.Sources[key].Version
	}
	sum := sha256.Sum256([]byte(string(w.UID) + s.Text(w.QueueKey, "")))
	return cutName(w.Name) + "-" + hex.EncodeToString(sum[:4])
}

// cutName shortens a name to leave room for a suffix, and cuts characters that must not precede a suffix.
func cutName(name string) string {
	return strings.TrimRight(name[:min(len(name), maxCronJobName)], "-.")
}

// cronJobRun returns the Job of one reload.
func (c *controller) cronJobRun(cj *batchv1.CronJob, name string, f *policy.Facts, p *policy.Plan) *batchv1.Job {
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
	c.cfg.Mark(f, p, &job.Spec.Template)
	return job
}
