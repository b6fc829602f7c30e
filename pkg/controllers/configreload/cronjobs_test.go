// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// cronJob returns the CronJob web, whose pods read app-config.
func cronJob(change func(*batchv1.CronJob), annotations ...string) *batchv1.CronJob {
	cj := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "cj-1"}}
	cj.Spec.JobTemplate.Labels = map[string]string{"app": "web"}
	// kAuto is not read here.
	cj.Spec.JobTemplate.Annotations = map[string]string{"team": "shop", kAuto: "true"}
	cj.Spec.JobTemplate.Spec.Template = pod(reads("app-config"))
	annotated(cj, annotations...)
	if change != nil {
		change(cj)
	}
	return cj
}

// asCreated ignores the fields that stand in for those set by the API server.
var asCreated = cmp.Options{
	cmpopts.IgnoreTypes(metav1.TypeMeta{}),
	cmpopts.IgnoreFields(metav1.ObjectMeta{}, "UID", "ResourceVersion", "Generation", "CreationTimestamp", "ManagedFields"),
}

func TestReconcileCronJobs(t *testing.T) {
	stateOf := func(pairs ...string) string { return stateOn("CronJob/shop/web", pairs...) }
	recorded := func(pairs ...string) string {
		return "patch cronjobs/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: stateOf(pairs...)}}})
	}
	const (
		create  = "create jobs/web-RUN"
		refused = failed + "Internal error occurred: try again"
		skipped = "Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"
		waits   = "Normal ReloadWaits A Job is active and concurrencyPolicy is Forbid, waits to reload for ConfigMap shop/app-config"
	)
	state := recorded(cmKey, h2)
	ran := []string{create, state}

	type option = func(*batchv1.CronJob)
	byAuto := func(change option) *batchv1.CronJob {
		return cronJob(change, kAuto, "true", nativeState, stateOf(cmKey, h1))
	}
	byName := func(change option) *batchv1.CronJob {
		return cronJob(change, kCM, "app-config", nativeState, stateOf(cmKey, h1))
	}
	suspended := func(cj *batchv1.CronJob) { cj.Spec.Suspend = ptr.To(true) }
	forbid := func(cj *batchv1.CronJob) { cj.Spec.ConcurrencyPolicy = batchv1.ForbidConcurrent }
	busy := func(cj *batchv1.CronJob) { forbid(cj); cj.Status.Active = []corev1.ObjectReference{{Name: "web-1"}} }
	alsoReadsDB := func(cj *batchv1.CronJob) { readsSecret("db")(&cj.Spec.JobTemplate.Spec.Template) }
	// run returns a Job of the CronJob.
	run := func(name string, conditions ...batchv1.JobConditionType) *batchv1.Job {
		return job(func(j *batchv1.Job) {
			j.Name, j.UID, j.Annotations, j.Status = name, types.UID(name), nil, batchv1.JobStatus{}
			j.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(cronJob(nil), batchv1.SchemeGroupVersion.WithKind("CronJob"))}
			for _, condition := range conditions {
				j.Status.Conditions = append(j.Status.Conditions, batchv1.JobCondition{Type: condition, Status: corev1.ConditionTrue})
			}
		})
	}
	ofAnother := run("run-1")
	ofAnother.OwnerReferences[0].UID = "cj-0"
	// unrecorded changes the ConfigMap, so that a Job is created, and refuses the next n patches of its CronJob.
	unrecorded := func(n int, then func(f *fixture)) func(f *fixture) {
		return func(f *fixture) {
			f.refuse(n, "patch", "cronjobs", errTryAgain)
			changeCM(f)
			f.pass(1500 * time.Millisecond)
			then(f)
		}
	}

	runCases(t, map[string]reconcileCase{
		"a change runs the CronJob once": {
			objects: objs{cm1(), byAuto(nil)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(2 * time.Second)
				// The name of a run depends on the version of the source.
				version := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "app-config").ResourceVersion
				sum := sha256.Sum256([]byte(`cj-1{"configmap/app-config":"` + h2 + "@" + version + `","workload":"CronJob/shop/web"}`))
				want := []*batchv1.Job{{
					ObjectMeta: metav1.ObjectMeta{
						Name: "web-" + hex.EncodeToString(sum[:4]), Namespace: "shop",
						Labels:          map[string]string{"app": "web"},
						Annotations:     map[string]string{"team": "shop", kAuto: "true", "cronjob.kubernetes.io/instantiate": "manual"},
						OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "CronJob", Name: "web", UID: "cj-1", Controller: ptr.To(true)}},
					},
					Spec: batchv1.JobSpec{Template: marked(h2)},
				}}
				if diff := cmp.Diff(want, f.runs(), asCreated); diff != "" {
					f.t.Errorf("Jobs differ (-want +got):\n%s", diff)
				}
			},
			want: ran,
		},
		"a suspended CronJob is not run under auto": {
			objects: objs{cm1(), byAuto(suspended)}, change: changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped Suspended, not reloaded for ConfigMap shop/app-config"},
		},
		"a suspended CronJob is run for a named source": {objects: objs{cm1(), byName(suspended)}, change: changeCM, want: ran},
		"a CronJob that forbids concurrency is not run under auto while it is active": {
			objects: objs{cm1(), byAuto(busy)}, change: changeCM, want: []string{state}, events: []string{skipped},
		},
		"a CronJob that forbids concurrency waits, for a named source, until it is not active": {
			objects: objs{cm1(), byName(busy)},
			change:  func(f *fixture) { changeCM(f); f.pass(5 * time.Minute); f.written(0); f.Put(byName(forbid)) },
			want:    ran, events: []string{waits, reloaded},
		},
		"a Job of ours counts as active until it is complete": {
			objects: objs{cm1(), byName(forbid), run("run-1")},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(5 * time.Minute)
				f.requested(map[string]int{"list deployments": 1}) // for the original
				f.Put(run("run-1", batchv1.JobSuspended, batchv1.JobComplete))
				f.pass(10 * time.Second)
			},
			want: ran, events: []string{waits, reloaded},
		},
		"a Job of ours counts as active until it has failed": {objects: objs{cm1(), byName(forbid), run("run-1", batchv1.JobFailed)}, change: changeCM, want: ran},
		"one unfinished Job among several skips the reload": {
			objects: objs{cm1(), byAuto(forbid), run("run-1", batchv1.JobComplete), run("run-2", batchv1.JobSuspended), run("run-3", batchv1.JobFailed)},
			change:  changeCM, want: []string{state}, events: []string{skipped},
		},
		"somebody else's Job does not count":         {objects: objs{cm1(), byName(forbid), ofAnother}, change: changeCM, want: ran},
		"where concurrency is allowed no Job counts": {objects: objs{cm1(), byName(nil), run("run-1")}, change: changeCM, want: ran},
		"a repetition does not wait for the Job that it has created": {
			objects: objs{cm1(), byName(forbid)}, change: func(f *fixture) { f.refuse(1, "patch", "cronjobs", errTryAgain); changeCM(f) },
			want: []string{create, state, state}, events: []string{reloaded, refused},
		},
		"a repetition neither skips the reload nor creates a Job again that is gone": {
			objects: objs{cm1(), byAuto(forbid)}, change: unrecorded(2, func(f *fixture) { f.Delete(f.runs()[0]); f.pass(time.Minute) }),
			want: []string{create, state, state, state}, events: []string{reloaded, refused, refused},
		},
		"a repetition is not skipped as the CronJob is suspended by now": {
			objects: objs{cm1(), byAuto(nil)}, change: unrecorded(1, func(f *fixture) { f.Put(byAuto(suspended)) }),
			want: []string{create, state, state}, events: []string{reloaded, refused},
		},
		"a CronJob does not run again as the source has a label more by now": {
			objects: objs{cm1(), byAuto(nil)}, change: unrecorded(1, func(f *fixture) { f.Put(labelled(cm2())) }),
			want: []string{create, state, state}, events: []string{reloaded, refused},
		},
		"a new leader does not run a CronJob again": {
			objects: objs{cm1(), byAuto(forbid)}, change: unrecorded(1, func(f *fixture) { f.Restart() }),
			want: []string{create, state, state}, events: []string{reloaded, refused},
		},
		"a CronJob runs again as the source has gone back and come again": {
			objects: objs{cm1(), byAuto(nil)},
			change:  unrecorded(1, func(f *fixture) { f.Put(cm1()); f.pass(10 * time.Millisecond); changeCM(f) }),
			want:    []string{create, state, create, state}, events: []string{reloaded, refused},
		},
		"a CronJob runs again as another source has changed too": {
			objects: objs{cm1(), db1(), cronJob(alsoReadsDB, kAuto, "true", nativeState, stateOf(cmKey, h1, dbKey, p1))}, change: unrecorded(1, changeDB),
			want:   []string{create, recorded(cmKey, h2, dbKey, p1), create, recorded(cmKey, h2, dbKey, p2)},
			events: []string{reloadedBoth, refused},
		},
		"a repetition finds its Job though the state is another by now": {
			objects: objs{cm1(), cronJob(alsoReadsDB, kAuto, "true", nativeState, stateOf(cmKey, h1, dbKey, ""))},
			change:  unrecorded(1, func(f *fixture) { f.Put(db1()) }), // recorded, not rolled
			want:    []string{create, recorded(cmKey, h2, dbKey, ""), recorded(cmKey, h2, dbKey, p1)},
			events:  []string{reloaded, refused},
		},
		"a source that goes back to data of a Job that is still there runs another": {
			objects: objs{cm1(), byAuto(nil)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(time.Minute)
				f.Put(cm1())
				f.pass(time.Minute)
				changeCM(f)
				f.pass(time.Minute)
				if n := len(f.runs()); n != 3 {
					f.t.Errorf("%d Jobs, want 3", n)
				}
			},
			want:   []string{create, state, create, recorded(cmKey, h1), create, state},
			events: []string{reloaded, reloaded, reloaded},
		},
		"a dry run says that a suspended CronJob would be skipped": {
			configure: func(c *config) { c.DryRun = true }, objects: objs{cm1(), byAuto(suspended)}, change: changeCM,
			events: []string{"Normal ReloadSkipped Suspended, would not reload for ConfigMap shop/app-config"},
		},
		"annotations of the Job template's own metadata are not read": {objects: objs{cm1(), cronJob(nil)}, change: changeCM},
	})
}
