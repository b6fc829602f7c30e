// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
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
	known1, known2 := stateOn("CronJob/shop/web", cmKey, h1), stateOn("CronJob/shop/web", cmKey, h2)
	recorded := func(state any) string {
		return "patch cronjobs/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: state}}})
	}
	state := recorded(known2)
	ran := []string{"create jobs/web-RUN", state}
	const refused = "Warning ReloadFail Reload for ConfigMap shop/app-config failed: Internal error occurred: try again"
	suspended := func(cj *batchv1.CronJob) { cj.Spec.Suspend = ptr.To(true) }
	busy := func(cj *batchv1.CronJob) {
		cj.Spec.ConcurrencyPolicy = batchv1.ForbidConcurrent
		cj.Status.Active = []corev1.ObjectReference{{Name: "web-1"}}
	}

	forbid := func(cj *batchv1.CronJob) { cj.Spec.ConcurrencyPolicy = batchv1.ForbidConcurrent }
	const waits = "Normal ReloadWaits A Job is active and concurrencyPolicy is Forbid, waits to reload for ConfigMap shop/app-config"
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
	ofAnother := func(j *batchv1.Job) *batchv1.Job {
		j.OwnerReferences[0].UID = "cj-0"
		return j
	}

	runCases(t, map[string]reconcileCase{
		"a change runs the CronJob once": {objects: objs{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)}, change: changeCM, want: ran},
		"a suspended CronJob is not run under auto": {
			objects: objs{cm1(), cronJob(suspended, kAuto, "true", nativeState, known1)},
			change:  changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped Suspended, not reloaded for ConfigMap shop/app-config"},
		},
		"a suspended CronJob is run for a named source": {objects: objs{cm1(), cronJob(suspended, kCM, "app-config", nativeState, known1)}, change: changeCM, want: ran},
		"a CronJob that forbids concurrency is not run under auto while it is active": {
			objects: objs{cm1(), cronJob(busy, kAuto, "true", nativeState, known1)},
			change:  changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"},
		},
		"a CronJob that forbids concurrency waits, for a named source, until it is not active": {
			objects: objs{cm1(), cronJob(busy, kCM, "app-config", nativeState, known1)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(5 * time.Minute)
				f.written(0)
				idle := cronJob(busy, kCM, "app-config", nativeState, known1)
				idle.Status.Active = nil
				f.Put(idle)
			},
			want: ran, events: []string{waits, reloaded},
		},
		"a Job of ours counts as active until it is complete": {
			objects: objs{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), run("run-1")},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(5 * time.Minute)
				f.requested(map[string]int{"list deployments": 1}) // for the original
				f.Put(run("run-1", batchv1.JobSuspended, batchv1.JobComplete))
				f.pass(10 * time.Second)
			},
			want: ran, events: []string{waits, reloaded},
		},
		"a Job of ours counts as active until it has failed": {
			objects: objs{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), run("run-1", batchv1.JobFailed)},
			change:  changeCM, want: ran,
		},
		"one unfinished Job among several skips the reload": {
			objects: objs{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1),
				run("run-1", batchv1.JobComplete), run("run-2", batchv1.JobSuspended), run("run-3", batchv1.JobFailed)},
			change: changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"},
		},
		"somebody else's Job does not count": {
			objects: objs{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), ofAnother(run("run-1"))},
			change:  changeCM, want: ran,
		},
		"where concurrency is allowed no Job does": {objects: objs{cm1(), cronJob(nil, kCM, "app-config", nativeState, known1), run("run-1")}, change: changeCM, want: ran},
		"a repetition does not wait for the Job that it has created": {
			objects: objs{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1)},
			change:  func(f *fixture) { f.refuse("patch", "cronjobs", errTryAgain); changeCM(f) },
			want:    []string{ran[0], state, state}, events: []string{reloaded, refused},
		},
		"a repetition neither skips the reload nor creates a Job again that is gone": {
			objects: objs{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1)},
			change:  func(f *fixture) { f.runUnrecorded(2); f.Delete(f.runs()[0]); f.pass(time.Minute) },
			want:    []string{ran[0], state, state, state}, events: []string{reloaded, refused, refused},
		},
		"a repetition is not skipped as the CronJob is suspended by now": {
			objects: objs{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change:  func(f *fixture) { f.runUnrecorded(1); f.Put(cronJob(suspended, kAuto, "true", nativeState, known1)) },
			want:    []string{ran[0], state, state}, events: []string{reloaded, refused},
		},
		"a CronJob does not run again as the source has a label more by now": {
			objects: objs{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(f *fixture) {
				f.runUnrecorded(1)
				labelled := cm2()
				labelled.Labels = map[string]string{"team": "shop"}
				f.Put(labelled)
			},
			want: []string{ran[0], state, state}, events: []string{reloaded, refused},
		},
		"a new leader does not run a CronJob again": {
			objects: objs{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1)},
			change:  func(f *fixture) { f.runUnrecorded(1); f.Restart() },
			want:    []string{ran[0], state, state}, events: []string{reloaded, refused},
		},
		"a CronJob runs again as the source has gone back and come again": {
			objects: objs{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(f *fixture) {
				f.runUnrecorded(1)
				f.Put(cm1())
				f.pass(10 * time.Millisecond)
				changeCM(f)
			},
			want: []string{ran[0], state, ran[0], state}, events: []string{reloaded, refused},
		},
		"a CronJob runs again as another source has changed too": {
			objects: objs{cm1(), db1(), cronJob(func(cj *batchv1.CronJob) { readsSecret("db")(&cj.Spec.JobTemplate.Spec.Template) },
				kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1, dbKey, p1))},
			change: func(f *fixture) { f.runUnrecorded(1); changeDB(f) },
			want:   []string{ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p1)), ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p2))},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config, Secret shop/db", refused},
		},
		"a repetition finds its Job though the state is another by now": {
			objects: objs{cm1(), cronJob(func(cj *batchv1.CronJob) { readsSecret("db")(&cj.Spec.JobTemplate.Spec.Template) },
				kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1, dbKey, ""))},
			change: func(f *fixture) {
				f.runUnrecorded(1)
				f.Put(db1()) // recorded, not rolled
			},
			want:   []string{ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, "")), recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p1))},
			events: []string{reloaded, refused},
		},
		"a source that goes back to data of a Job that is still there runs another": {
			objects: objs{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
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
			want:   []string{ran[0], state, ran[0], recorded(known1), ran[0], state},
			events: []string{reloaded, reloaded, reloaded},
		},
		"a dry run says that a suspended CronJob would be skipped": {
			configure: func(c *config) { c.DryRun = true },
			objects:   objs{cm1(), cronJob(suspended, kAuto, "true", nativeState, known1)},
			change:    changeCM,
			events:    []string{"Normal ReloadSkipped Suspended, would not reload for ConfigMap shop/app-config"},
		},
		"annotations of the Job template's own metadata are not read": {objects: objs{cm1(), cronJob(nil)}, change: changeCM},
	})
}

func TestCronJobRunsOnceForAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, cm1(), cronJob(nil, kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1)))
		changeCM(f)
		f.pass(2 * time.Second)
		jobs := f.runs()
		if len(jobs) != 1 {
			t.Fatalf("%d jobs, want 1", len(jobs))
		}
		// The name of a run depends on the version of the source.
		version := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "app-config").ResourceVersion
		sum := sha256.Sum256([]byte(`cj-1{"configmap/app-config":"` + h2 + "@" + version + `","workload":"CronJob/shop/web"}`))
		want := &batchv1.Job{
			ObjectMeta: metav1.ObjectMeta{
				Name: "web-" + hex.EncodeToString(sum[:4]), Namespace: "shop",
				Labels:      map[string]string{"app": "web"},
				Annotations: map[string]string{"team": "shop", kAuto: "true", "cronjob.kubernetes.io/instantiate": "manual"},
				OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "batch/v1", Kind: "CronJob", Name: "web", UID: "cj-1", Controller: ptr.To(true),
				}},
			},
			Spec: batchv1.JobSpec{Template: pod(reads("app-config"), variableSet(cmVar, h2))},
		}
		if diff := cmp.Diff(want, jobs[0], asCreated); diff != "" {
			t.Errorf("Job differs (-want +got):\n%s", diff)
		}
	})
}

// job returns a finished Job of its own, as the API server returns it.
func job(change func(*batchv1.Job)) *batchv1.Job {
	generated := map[string]string{
		"controller-uid": "job-1", "job-name": "web",
		"batch.kubernetes.io/controller-uid": "job-1", "batch.kubernetes.io/job-name": "web",
	}
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "job-1", Labels: map[string]string{"app": "web"},
		Annotations:       map[string]string{kAuto: "true"},
		CreationTimestamp: metav1.Unix(1, 0),
	}}
	j.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"batch.kubernetes.io/controller-uid": "job-1"}}
	j.Spec.Template = pod(reads("app-config"))
	j.Spec.Template.Labels = map[string]string{"app": "web"}
	for key, value := range generated {
		j.Spec.Template.Labels[key] = value
	}
	j.Status.Succeeded = 1
	if change != nil {
		change(j)
	}
	return j
}

const (
	tryJob, deleteJob, createJob = "try jobs/web-", "delete jobs/web", "create jobs/web"

	jobFailed = "Warning ReloadFail Reload for ConfigMap shop/app-config failed: "
)

var jobForbidden = apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("no"))

func TestReconcileJobs(t *testing.T) {
	replaced := []string{tryJob, deleteJob, createJob}
	runCases(t, map[string]reconcileCase{
		"a Job is deleted and created again, also a finished one": {
			objects: objs{cm1(), job(nil)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(2 * time.Second)
				got := f.job()
				want := &batchv1.Job{
					ObjectMeta: metav1.ObjectMeta{
						Namespace: "shop", Name: "web", Labels: map[string]string{"app": "web"}, Annotations: map[string]string{kAuto: "true"},
					},
					Spec: batchv1.JobSpec{Template: pod(reads("app-config"), variableSet(cmVar, h2))},
				}
				want.Spec.Template.Labels = map[string]string{"app": "web"}
				if diff := cmp.Diff(want, got, asCreated); diff != "" {
					f.t.Errorf("Job differs (-want +got):\n%s", diff)
				}
				if got.UID == "job-1" {
					f.t.Error("it is still the old Job")
				}
			},
			want: replaced,
		},
		"a Job of a CronJob is left alone": {
			objects: objs{cm1(), job(func(j *batchv1.Job) {
				j.OwnerReferences = []metav1.OwnerReference{{Kind: "CronJob", Name: "web", Controller: ptr.To(true)}}
			})},
			change: changeCM,
		},
		"a Job with a manual selector is left alone": {
			objects: objs{cm1(), job(func(j *batchv1.Job) { j.Spec.ManualSelector = ptr.To(true) })},
			change:  changeCM,
			events:  []string{"Normal ReloadSkipped The selector is manual, not reloaded for ConfigMap shop/app-config"},
		},
		"a Job that terminates is left alone": {objects: objs{cm1(), job(terminate)}, change: changeCM},
		"a Job that admission would refuse is not deleted": {
			objects: objs{cm1(), job(nil)},
			change:  func(f *fixture) { f.refuse("try", "jobs", jobForbidden); changeCM(f) },
			want:    append([]string{tryJob}, replaced...),
			events:  []string{reloaded, jobFailed + "try the new Job: " + jobForbidden.Error()},
		},
		"the creation is tried until it succeeds": {
			objects: objs{cm1(), job(nil)},
			change: func(f *fixture) {
				f.refuse("create", "jobs", errTryAgain, errTryAgain, errTryAgain)
				changeCM(f)
				f.pass(time.Minute)
			},
			want: append(slices.Clone(replaced), createJob, createJob, createJob),
		},
	})
}

func terminate(j *batchv1.Job) {
	j.DeletionTimestamp, j.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
}

// The API server may have done a request although its response was lost.
func TestJobSurvivesALostAnswer(t *testing.T) {
	timeout := apierrors.NewTimeoutError("no answer", 1)
	type hook = func(f *fixture, r controllertest.Request) error
	refuse := func(err error) hook { return func(*fixture, controllertest.Request) error { return err } }
	gone := func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return timeout }
	for name, tc := range map[string]struct {
		verb    string
		tries   int    // creations while the old one terminates
		answers []hook // nil: like the API server
		want    []string
		events  []string
	}{
		"the deletion was done": {
			verb: "delete", answers: []hook{gone},
			want:   []string{tryJob, deleteJob, deleteJob, createJob},
			events: []string{reloaded, jobFailed + timeout.Error()},
		},
		"the deletion was done, and the second is refused": {
			verb: "delete", answers: []hook{gone, refuse(apierrors.NewTooManyRequests("later", 1)), refuse(jobForbidden)},
			want:   []string{tryJob, deleteJob, deleteJob, deleteJob, deleteJob, createJob},
			events: []string{reloaded, jobFailed + timeout.Error()},
		},
		"the deletion was done, but finalizers hold it up": {
			verb: "delete",
			answers: []hook{
				func(f *fixture, _ controllertest.Request) error { f.Put(job(terminate)); return timeout },
				func(f *fixture, _ controllertest.Request) error {
					// Between two tries.
					time.AfterFunc(30*time.Minute+time.Second/2, func() { f.Put(job(func(j *batchv1.Job) { terminate(j); j.Finalizers = nil })) })
					return nil
				},
			},
			tries: 35,
			want:  []string{tryJob, deleteJob, deleteJob, createJob}, events: []string{reloaded, jobFailed + timeout.Error()},
		},
		"the deletion was not done": {
			verb: "delete", answers: []hook{refuse(errTryAgain), refuse(timeout)},
			want:   []string{tryJob, deleteJob, deleteJob, deleteJob, createJob},
			events: []string{reloaded, jobFailed + errTryAgain.Error()},
		},
		"the deletion is refused": {
			verb: "delete", answers: []hook{refuse(jobForbidden)},
			want:   []string{tryJob, deleteJob, tryJob, deleteJob, createJob},
			events: []string{reloaded, jobFailed + jobForbidden.Error()},
		},
		"somebody else takes the name": {
			verb: "create",
			answers: []hook{func(f *fixture, _ controllertest.Request) error {
				f.Put(job(func(j *batchv1.Job) { j.UID = "job-2"; variableSet(cmVar, h2)(&j.Spec.Template) }))
				return nil
			}},
			want: []string{tryJob, deleteJob, createJob}, events: []string{reloaded},
		},
		"somebody else deletes the Job at that moment, so it is not created again": {
			verb:    "delete",
			answers: []hook{func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return nil }},
			want:    []string{tryJob, deleteJob},
		},
		"the creation was done": {
			verb: "create",
			answers: []hook{func(f *fixture, r controllertest.Request) error {
				if err := f.apply(r); err != nil {
					return err
				}
				return timeout
			}},
			want:   []string{tryJob, deleteJob, createJob, createJob},
			events: []string{reloaded},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1(), job(nil))
				n := 0
				f.before(tc.verb, "jobs", func(r controllertest.Request) error {
					if n++; n > len(tc.answers) {
						return nil
					}
					return tc.answers[n-1](f, r)
				})
				changeCM(f)
				f.pass(time.Hour)
				f.expect(slices.Concat(tc.want, slices.Repeat([]string{createJob}, tc.tries))...)
				f.told(tc.events...)
				f.count(0, "lost_jobs_total")
				if tc.want[len(tc.want)-1] == createJob && f.job().Spec.Template.Spec.Containers[0].Env == nil {
					t.Error("the Job carries no mark")
				}
			})
		})
	}
}

var green = cm("app-config", "color", "green")

// The new Job may be in the cache long before the response to its creation arrives.
func TestJobChangeDuringItsCreation(t *testing.T) {
	for name, create := range map[string]func(f *fixture, r controllertest.Request) error{
		"the creation is answered late": func(f *fixture, _ controllertest.Request) error {
			f.Latency(20 * time.Second)
			time.AfterFunc(10*time.Second, func() { f.Put(green) })
			time.AfterFunc(20*time.Second, func() { f.Latency(time.Millisecond) })
			return nil
		},
		"the answer to the creation is lost": func(f *fixture, r controllertest.Request) error {
			if err := f.apply(r); err != nil {
				return err
			}
			<-time.After(10 * time.Second)
			f.Put(green)
			<-time.After(10 * time.Second)
			return apierrors.NewTimeoutError("no answer", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1(), job(nil))
				n := 0
				f.before("create", "jobs", func(r controllertest.Request) error {
					if n++; n > 1 {
						return nil
					}
					return create(f, r)
				})
				changeCM(f)
				f.pass(time.Hour)
				want := []corev1.EnvVar{{Name: cmVar, Value: hashOf("color", "green")}}
				if diff := cmp.Diff(want, f.job().Spec.Template.Spec.Containers[0].Env); diff != "" {
					t.Errorf("mark differs (-want +got):\n%s", diff)
				}
				f.count(0, "pending_workloads")
			})
		})
	}
}

// The controller remembers what a Job was created again for before the cache has that Job.
func TestJobChangeBeforeTheCacheHasIt(t *testing.T) {
	// deny refuses the creations of 10 s, in which change happens.
	deny := func(f *fixture, err error, change func()) {
		begun := time.Now()
		f.before("create", "jobs", func(controllertest.Request) error {
			if time.Since(begun) < 10*time.Second {
				return err
			}
			return nil
		})
		changeCM(f)
		f.pass(5 * time.Second)
		change()
		f.pass(5 * time.Second)
	}
	for name, tc := range map[string]struct {
		change func(f *fixture)
		want   string // the mark
		n      int    // Jobs created
	}{
		"a change before the cache has the new Job is not lost": {
			change: func(f *fixture) {
				changeCM(f)
				f.pass(2 * time.Second)
				if f.job().UID == "job-1" {
					f.t.Fatal("not created again yet")
				}
				f.Put(green)
			},
			want: hashOf("color", "green"), n: 2,
		},
		"a change that takes the source back is not lost":              {change: func(f *fixture) { changeCM(f); f.pass(2 * time.Second); f.Put(cm1()) }, want: h1, n: 2},
		"a change before the creation replaces the Job no second time": {change: func(f *fixture) { deny(f, jobForbidden, func() { f.Put(green) }) }, want: h2, n: 1},
		"the way back from a change before the creation replaces the Job": {
			change: func(f *fixture) { deny(f, jobForbidden, func() { f.Put(green) }); f.pass(time.Minute); changeCM(f) },
			want:   h2, n: 2,
		},
		"no other 404 than the namespace's ends the attempts": {
			change: func(f *fixture) {
				deny(f, apierrors.NewNotFound(schema.GroupResource{Group: "kueue.x-k8s.io", Resource: "localqueues"}, "shop"), func() {})
			},
			want: h2, n: 1,
		},
		"a Job that somebody deletes meanwhile is left alone": {
			change: func(f *fixture) {
				changeCM(f)
				f.pass(2 * time.Second)
				f.Delete(f.job())
				f.pass(2 * time.Second)
				f.noErrors()
			},
			n: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1(), job(nil))
				f.Lag(3*time.Second, "jobs")
				tc.change(f)
				f.pass(time.Hour)
				var mark string
				for _, job := range f.runs() {
					mark = job.Spec.Template.Spec.Containers[0].Env[0].Value
				}
				if mark != tc.want {
					t.Errorf("mark %s, want %s; writes %v", mark, tc.want, f.writes())
				}
				if n := f.asked()["try jobs"]; n != tc.n {
					t.Errorf("replaced %d times, want %d; writes %v", n, tc.n, f.writes())
				}
			})
		})
	}
}

func TestJobNotRecreatedIsCounted(t *testing.T) {
	terminating := apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("terminating"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	for name, tc := range map[string]struct {
		verb      string
		refusal   error
		lost, end float64 // before and after the controller stops
	}{
		"the namespace terminates":                  {"create", terminating, 1, 1},
		"the namespace is gone":                     {"create", apierrors.NewNotFound(corev1.Resource("namespaces"), "shop"), 1, 1},
		"the controller stops":                      {"create", errTryAgain, 0, 1},
		"an unanswered deletion counts no lost Job": {"delete", errTryAgain, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1(), job(nil))
				f.before(tc.verb, "jobs", func(controllertest.Request) error { return tc.refusal })
				changeCM(f)
				f.pass(10 * time.Second)
				f.count(tc.lost, "lost_jobs_total")
				f.Restart(func() { f.count(tc.end, "lost_jobs_total") })
			})
		})
	}
}

// runUnrecorded changes the ConfigMap and lets the quiet period pass, so that a Job is created. The
// next n patches of its CronJob are refused.
func (f *fixture) runUnrecorded(n int) {
	f.refuse("patch", "cronjobs", slices.Repeat([]error{errTryAgain}, n)...)
	changeCM(f)
	f.pass(1500 * time.Millisecond)
}

// runs returns the existing Jobs.
func (f *fixture) runs() []*batchv1.Job { return controllertest.List[batchv1.Job](f.Host) }

func (f *fixture) job() *batchv1.Job {
	f.t.Helper()
	j := controllertest.Get[batchv1.Job](f.Host, "shop", "web")
	if j == nil {
		f.t.Fatal("there is no Job")
	}
	return j
}
