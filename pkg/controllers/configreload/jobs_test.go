// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
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
	cmpopts.IgnoreFields(metav1.ObjectMeta{}, "ManagedFields"),
}

func TestReconcileCronJobs(t *testing.T) {
	known1, known2 := stateOn("CronJob/shop/web", cmKey, h1), stateOn("CronJob/shop/web", cmKey, h2)
	recorded := func(state any) string {
		return "patch cronjobs/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: state}}})
	}
	state := recorded(known2)
	ran := []string{"create jobs/web-RUN", state}
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
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
		"a change runs the CronJob once": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change:  changeCM, want: ran, events: reloaded,
		},
		"a repetition after a failed write of the state creates no second Job": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.refuseStates(1)
				changeCM(w)
				w.pass(time.Minute)
				if n := len(w.runs()); n != 1 {
					w.t.Errorf("%d Jobs, want one", n)
				}
			},
			want: []string{ran[0], state, state}, events: []string{reloaded[0], refused},
		},
		"a suspended CronJob is not run under auto": {
			objects: []runtime.Object{cm1(), cronJob(suspended, kAuto, "true", nativeState, known1)},
			change:  changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped Suspended, not reloaded for ConfigMap shop/app-config"},
		},
		"a suspended CronJob is run for a named source": {
			objects: []runtime.Object{cm1(), cronJob(suspended, kCM, "app-config", nativeState, known1)},
			change:  changeCM, want: ran, events: reloaded,
		},
		"a CronJob that forbids concurrency is not run under auto while it is active": {
			objects: []runtime.Object{cm1(), cronJob(busy, kAuto, "true", nativeState, known1)},
			change:  changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"},
		},
		"a CronJob that forbids concurrency waits, for a named source, until it is not active": {
			objects: []runtime.Object{cm1(), cronJob(busy, kCM, "app-config", nativeState, known1)},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(5 * time.Minute)
				if got := w.writes(); len(got) != 0 {
					w.t.Errorf("writes while a Job is active: %v", got)
				}
				idle := cronJob(busy, kCM, "app-config", nativeState, known1)
				idle.Status.Active = nil
				w.put(idle)
			},
			want: ran, events: []string{waits, reloaded[0]},
		},
		"a Job of ours counts as active until it is complete": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), run("run-1")},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(5 * time.Minute)
				if got := w.requests(); got["get cronjobs"] != 0 || got["get jobs"] != 0 || len(w.writes()) != 0 {
					w.t.Errorf("requests while a Job is active: %v", got)
				}
				w.put(run("run-1", batchv1.JobSuspended, batchv1.JobComplete))
				w.pass(activeJobPoll)
			},
			want: ran, events: []string{waits, reloaded[0]},
		},
		"a Job of ours counts as active until it has failed": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), run("run-1", batchv1.JobFailed)},
			change:  changeCM, want: ran, events: reloaded,
		},
		"whatever reload it was of, and however many there are": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1),
				run("run-1", batchv1.JobComplete), run("run-2", batchv1.JobSuspended), run("run-3", batchv1.JobFailed)},
			change: changeCM, want: []string{state},
			events: []string{"Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"},
		},
		"somebody else's Job does not count": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1), ofAnother(run("run-1"))},
			change:  changeCM, want: ran, events: reloaded,
		},
		"where concurrency is allowed no Job does": {
			objects: []runtime.Object{cm1(), cronJob(nil, kCM, "app-config", nativeState, known1), run("run-1")},
			change:  changeCM, want: ran, events: reloaded,
		},
		"a repetition does not wait for the Job that it has created": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kCM, "app-config", nativeState, known1)},
			change: func(w *fixture) {
				w.refuseStates(1)
				changeCM(w)
			},
			want: []string{ran[0], state, state}, events: []string{reloaded[0], refused},
		},
		"a repetition neither skips the reload nor creates a Job again that is gone": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.runUnrecorded(2)
				w.remove(w.runs()[0])
				w.pass(time.Minute)
			},
			want: []string{ran[0], state, state, state}, events: []string{reloaded[0], refused, refused},
		},
		"a repetition is not skipped as the CronJob is suspended by now": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				w.put(cronJob(suspended, kAuto, "true", nativeState, known1))
			},
			want: []string{ran[0], state, state}, events: []string{reloaded[0], refused},
		},
		"a CronJob does not run again as the source has a label more by now": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				labelled := cm2()
				labelled.Labels = map[string]string{"team": "shop"}
				w.put(labelled)
			},
			want: []string{ran[0], state, state}, events: []string{reloaded[0], refused},
		},
		"a new leader does not run a CronJob again": {
			objects: []runtime.Object{cm1(), cronJob(forbid, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				w.restart()
			},
			want: []string{ran[0], state, state}, events: []string{reloaded[0], refused},
		},
		"a CronJob runs again as the source has gone back and come again": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				w.put(cm1())
				w.pass(10 * time.Millisecond)
				changeCM(w)
			},
			want: []string{ran[0], state, ran[0], state}, events: []string{reloaded[0], refused},
		},
		"a CronJob runs again as another source has changed too": {
			objects: []runtime.Object{cm1(), db1(), cronJob(func(cj *batchv1.CronJob) { readsSecret("db")(&cj.Spec.JobTemplate.Spec.Template) },
				kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1, dbKey, p1))},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				changeDB(w)
			},
			want:   []string{ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p1)), ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p2))},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config, Secret shop/db", refused},
		},
		"a repetition finds its Job though the state is another by now": {
			objects: []runtime.Object{cm1(), cronJob(func(cj *batchv1.CronJob) { readsSecret("db")(&cj.Spec.JobTemplate.Spec.Template) },
				kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1, dbKey, ""))},
			change: func(w *fixture) {
				w.runUnrecorded(1)
				w.put(db1()) // recorded, not rolled
			},
			want:   []string{ran[0], recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, "")), recorded(stateOn("CronJob/shop/web", cmKey, h2, dbKey, p1))},
			events: []string{reloaded[0], refused},
		},
		"a source that goes back to data of a Job that is still there runs another": {
			objects: []runtime.Object{cm1(), cronJob(nil, kAuto, "true", nativeState, known1)},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(time.Minute)
				w.put(cm1())
				w.pass(time.Minute)
				changeCM(w)
				w.pass(time.Minute)
				if n := len(w.runs()); n != 3 {
					w.t.Errorf("%d Jobs, want 3", n)
				}
			},
			want:   []string{ran[0], state, ran[0], recorded(known1), ran[0], state},
			events: []string{reloaded[0], reloaded[0], reloaded[0]},
		},
		"a dry run says that a suspended CronJob would be skipped": {
			configure: func(c *Config) { c.DryRun = true },
			objects:   []runtime.Object{cm1(), cronJob(suspended, kAuto, "true", nativeState, known1)},
			change:    changeCM,
			events:    []string{"Normal ReloadSkipped Suspended, would not reload for ConfigMap shop/app-config"},
		},
		"annotations of the Job template's own metadata are not read": {
			objects: []runtime.Object{cm1(), cronJob(nil)}, change: changeCM,
		},
	})
}

func TestCronJobRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, cm1(), cronJob(nil, kAuto, "true", nativeState, stateOn("CronJob/shop/web", cmKey, h1)))
		changeCM(w)
		w.pass(2 * time.Second)
		jobs := w.runs()
		if len(jobs) != 1 {
			t.Fatalf("%d jobs, want 1", len(jobs))
		}
		// The name of a run depends on the version of the source.
		sum := sha256.Sum256([]byte(`cj-1{"configmap/app-config":"` + h2 + "@" + w.version(cm1()) + `","workload":"CronJob/shop/web"}`))
		want := batchv1.Job{
			ObjectMeta: metav1.ObjectMeta{
				Name: "web-" + hex.EncodeToString(sum[:4]), Namespace: "shop", UID: jobs[0].UID, ResourceVersion: jobs[0].ResourceVersion,
				Labels:      map[string]string{"app": "web"},
				Annotations: map[string]string{"team": "shop", kAuto: "true", "cronjob.kubernetes.io/instantiate": "manual"},
				OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "batch/v1", Kind: "CronJob", Name: "web", UID: "cj-1", Controller: ptr.To(true),
				}},
			},
			Spec: batchv1.JobSpec{Template: pod(reads("app-config"), variableSet(cmVar, h2))},
		}
		if diff := cmp.Diff(want, *jobs[0], asCreated); diff != "" {
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

func TestReconcileJobs(t *testing.T) {
	replaced := []string{"dry run: create jobs/web-", "delete jobs/web", "create jobs/web"}
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
	runCases(t, map[string]reconcileCase{
		"a Job is deleted and created again, also a finished one": {
			objects: []runtime.Object{cm1(), job(nil)},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(2 * time.Second)
				got := w.job("web")
				want := &batchv1.Job{
					ObjectMeta: metav1.ObjectMeta{
						Namespace: "shop", Name: "web", UID: got.UID, ResourceVersion: got.ResourceVersion,
						Labels: map[string]string{"app": "web"}, Annotations: map[string]string{kAuto: "true"},
					},
					Spec: batchv1.JobSpec{Template: pod(reads("app-config"), variableSet(cmVar, h2))},
				}
				want.Spec.Template.Labels = map[string]string{"app": "web"}
				if diff := cmp.Diff(want, got, asCreated); diff != "" {
					w.t.Errorf("Job differs (-want +got):\n%s", diff)
				}
				if got.UID == "job-1" {
					w.t.Error("it is still the old Job")
				}
			},
			want: replaced, events: reloaded,
		},
		"a Job of a CronJob is left alone": {
			objects: []runtime.Object{cm1(), job(func(j *batchv1.Job) {
				j.OwnerReferences = []metav1.OwnerReference{{Kind: "CronJob", Name: "web", Controller: ptr.To(true)}}
			})},
			change: changeCM,
		},
		"a Job with a manual selector is left alone": {
			objects: []runtime.Object{cm1(), job(func(j *batchv1.Job) { j.Spec.ManualSelector = ptr.To(true) })},
			change:  changeCM,
			events:  []string{"Normal ReloadSkipped The selector is manual, not reloaded for ConfigMap shop/app-config"},
		},
		"a Job that terminates is left alone": {
			objects: []runtime.Object{cm1(), job(func(j *batchv1.Job) {
				j.DeletionTimestamp, j.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
			})},
			change: changeCM,
		},
		"a Job that admission would refuse is not deleted": {
			objects: []runtime.Object{cm1(), job(nil)},
			change: func(w *fixture) {
				refused := false
				w.client.PrependReactor("create", "jobs", func(clienttesting.Action) (bool, runtime.Object, error) {
					if refused {
						return false, nil, nil
					}
					refused = true
					return true, nil, apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("no"))
				})
				changeCM(w)
			},
			want: []string{"dry run: create jobs/web-", "dry run: create jobs/web-", "delete jobs/web", "create jobs/web"},
			events: []string{reloaded[0], "Warning ReloadFail Reload for ConfigMap shop/app-config failed: " +
				`try the new Job: jobs.batch "web" is forbidden: no`},
		},
		"the creation is tried until it succeeds": {
			objects: []runtime.Object{cm1(), job(nil)},
			change: func(w *fixture) {
				n := 0
				w.client.PrependReactor("create", "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
					if len(a.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0 {
						return false, nil, nil
					}
					n++
					return n <= 3, nil, apierrors.NewInternalError(errors.New("try again"))
				})
				changeCM(w)
				w.pass(time.Minute)
				if got := w.job("web"); got.UID == "job-1" {
					w.t.Error("it is still the old Job")
				}
			},
			want: append(append([]string{}, replaced...), replaced[2], replaced[2], replaced[2]), events: reloaded,
		},
	})
}

// The API server may have done a request although its response was lost.
func TestJobSurvivesALostAnswer(t *testing.T) {
	const try, remove, create = "dry run: create jobs/web-", "delete jobs/web", "create jobs/web"
	jobs := batchv1.Resource("jobs")
	timeout := apierrors.NewTimeoutError("no answer", 1)
	failed := "Warning ReloadFail Reload for ConfigMap shop/app-config failed: "
	const reloaded = "Normal Reloaded Reloaded for ConfigMap shop/app-config"
	terminating := job(func(j *batchv1.Job) {
		j.DeletionTimestamp, j.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
	})
	for name, tc := range map[string]struct {
		verb    string
		tries   int                                              // creations while the old one terminates
		answers []func(w *fixture, a clienttesting.Action) error // nil: like the API server
		want    []string
		events  []string
	}{
		"the deletion was done": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, _ clienttesting.Action) error { w.remove(job(nil)); return timeout },
			},
			want:   []string{try, remove, remove, create},
			events: []string{reloaded, failed + timeout.Error()},
		},
		"the deletion was done, and the second is refused": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, _ clienttesting.Action) error { w.remove(job(nil)); return timeout },
				func(*fixture, clienttesting.Action) error { return apierrors.NewTooManyRequests("later", 1) },
				func(*fixture, clienttesting.Action) error {
					return apierrors.NewForbidden(jobs, "web", errors.New("no"))
				},
			},
			want:   []string{try, remove, remove, remove, remove, create},
			events: []string{reloaded, failed + timeout.Error()},
		},

		"the deletion was done, but finalizers hold it up": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, _ clienttesting.Action) error { w.put(terminating); return timeout },
				func(w *fixture, _ clienttesting.Action) error {
					// Between two tries.
					time.AfterFunc(30*time.Minute+terminatingPoll/2, func() { w.remove(terminating) })
					return nil
				},
			},
			tries: 35,
			want:  []string{try, remove, remove, create}, events: []string{reloaded, failed + timeout.Error()},
		},
		"the deletion was not done": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(*fixture, clienttesting.Action) error { return errors.New("connection reset") },
				func(*fixture, clienttesting.Action) error { return timeout },
			},
			want:   []string{try, remove, remove, remove, create},
			events: []string{reloaded, failed + "connection reset"},
		},

		"the deletion is refused": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(*fixture, clienttesting.Action) error {
					return apierrors.NewForbidden(jobs, "web", errors.New("no"))
				},
			},
			want:   []string{try, remove, try, remove, create},
			events: []string{reloaded, failed + `jobs.batch "web" is forbidden: no`},
		},
		"somebody else takes the name": {
			verb: "create",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, _ clienttesting.Action) error {
					w.put(job(func(j *batchv1.Job) { j.UID = "job-2"; variableSet(cmVar, h2)(&j.Spec.Template) }))
					return apierrors.NewAlreadyExists(jobs, "web")
				},
			},
			want: []string{try, remove, create}, events: []string{reloaded},
		},
		"somebody else deletes the Job at that moment, so it is not created again": {
			verb: "delete",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, _ clienttesting.Action) error {
					w.remove(job(nil))
					return apierrors.NewNotFound(jobs, "web")
				},
			},
			want: []string{try, remove},
		},
		"the creation was done": {
			verb: "create",
			answers: []func(w *fixture, a clienttesting.Action) error{
				func(w *fixture, a clienttesting.Action) error {
					if _, _, err := clienttesting.ObjectReaction(w.client.Tracker())(a); err != nil {
						return err
					}
					return timeout
				},
			},
			want:   []string{try, remove, create, create},
			events: []string{reloaded},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), job(nil))
				n := 0
				w.client.PrependReactor(tc.verb, "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
					if c, ok := a.(clienttesting.CreateActionImpl); ok && len(c.CreateOptions.DryRun) > 0 || n == len(tc.answers) {
						return false, nil, nil
					}
					n++
					return true, nil, tc.answers[n-1](w, a)
				})
				changeCM(w)
				w.pass(time.Hour)
				want := slices.Concat(tc.want, slices.Repeat([]string{create}, tc.tries))
				if diff := cmp.Diff(want, w.writes()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(tc.events, w.events()); diff != "" {
					t.Errorf("events differ (-want +got):\n%s", diff)
				}
				if n := w.count("lost_jobs_total", nil); n != 0 {
					t.Errorf("%v lost jobs counted", n)
				}
				if tc.want[len(tc.want)-1] == create && w.job("web").Spec.Template.Spec.Containers[0].Env == nil {
					t.Error("the Job carries no mark")
				}
			})
		})
	}
}

// The new Job may be in the cache long before the response to its creation arrives.
func TestJobChangeDuringItsCreation(t *testing.T) {
	for name, answer := range map[string]error{"and the answer comes late": nil, "and the answer is lost": apierrors.NewTimeoutError("no answer", 1)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), job(nil))
				n := 0
				w.client.PrependReactor("create", "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
					if len(a.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0 || n > 0 {
						return false, nil, nil
					}
					n++
					if err := w.apply(a); err != nil {
						return true, nil, err
					}
					created := w.job("web")
					<-time.After(10 * time.Second)
					w.put(cm("app-config", "color", "green"))
					<-time.After(10 * time.Second)
					return true, created, answer
				})
				changeCM(w)
				w.pass(time.Hour)
				want := []corev1.EnvVar{{Name: cmVar, Value: hashOf("color", "green")}}
				if diff := cmp.Diff(want, w.job("web").Spec.Template.Spec.Containers[0].Env); diff != "" {
					t.Errorf("mark differs (-want +got):\n%s", diff)
				}
				if n := w.count("pending_workloads", nil); n != 0 {
					t.Errorf("%v workloads wait", n)
				}
			})
		})
	}
}

// The controller remembers what a Job was created again for before the cache has that Job.
func TestJobChangeBeforeTheCacheHasIt(t *testing.T) {
	deny := func(w *fixture, until *atomic.Bool, err error) {
		w.client.PrependReactor("create", "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if len(a.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0 || until.Load() {
				return false, nil, nil
			}
			return true, nil, err
		})
	}
	green := cm("app-config", "color", "green")
	createdLate := func(w *fixture) {
		var allowed atomic.Bool
		deny(w, &allowed, apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("exceeded quota")))
		changeCM(w)
		w.pass(5 * time.Second)
		w.put(green)
		w.pass(5 * time.Second)
		allowed.Store(true)
	}
	for name, tc := range map[string]struct {
		change func(w *fixture)
		want   string // the mark
		n      int    // Jobs created
	}{
		"a change before the cache has the new Job is not lost": {
			change: func(w *fixture) {
				changeCM(w)
				w.pass(2 * time.Second)
				if w.job("web").UID == "job-1" {
					w.t.Fatal("not created again yet")
				}
				w.put(green)
			},
			want: hashOf("color", "green"), n: 2,
		},
		"a change that takes the source back is not lost": {
			change: func(w *fixture) {
				changeCM(w)
				w.pass(2 * time.Second)
				w.put(cm1())
			},
			want: h1, n: 2,
		},
		"a change before the creation replaces the Job no second time": {
			change: createdLate,
			want:   h2, n: 1,
		},
		"the way back from a change before the creation replaces the Job": {
			change: func(w *fixture) {
				createdLate(w)
				w.pass(time.Minute)
				changeCM(w)
			},
			want: h2, n: 2,
		},
		"no other 404 than the namespace's ends the attempts": {
			change: func(w *fixture) {
				var allowed atomic.Bool
				deny(w, &allowed, apierrors.NewNotFound(schema.GroupResource{Group: "kueue.x-k8s.io", Resource: "localqueues"}, "shop"))
				changeCM(w)
				w.pass(5 * time.Second)
				allowed.Store(true)
			},
			want: h2, n: 1,
		},
		"a Job that somebody deletes meanwhile is left alone": {
			change: func(w *fixture) {
				changeCM(w)
				w.pass(2 * time.Second)
				w.remove(w.job("web"))
				w.pass(2 * settle)
				if n := w.c.Status().Errors; n != 0 {
					w.t.Errorf("%d reconciles failed", n)
				}
			},
			n: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newLaggingFixture(t, map[string]time.Duration{"jobs": 3 * time.Second}, nil, cm1(), job(nil))
				w.pass(time.Minute)
				tc.change(w)
				w.pass(time.Hour)
				var mark string
				for _, job := range w.runs() {
					mark = job.Spec.Template.Spec.Containers[0].Env[0].Value
				}
				if mark != tc.want {
					t.Errorf("mark %s, want %s; writes %v", mark, tc.want, w.writes())
				}
				n := 0
				for _, a := range w.client.Actions() {
					if c, ok := a.(clienttesting.CreateActionImpl); ok && len(c.CreateOptions.DryRun) > 0 {
						n++
					}
				}
				if n != tc.n {
					t.Errorf("replaced %d times, want %d; writes %v", n, tc.n, w.writes())
				}
				if n := w.c.memory.replacements(); len(n) != 0 {
					t.Errorf("remembers %v", n)
				}
			})
		})
	}
}

func TestJobPerhapsDeletedIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, cm1(), job(nil))
		w.client.PrependReactor("delete", "jobs", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("connection refused")
		})
		changeCM(w)
		w.pass(10 * time.Second)
		w.stop()
		if n := w.count("lost_jobs_total", nil); n != 0 {
			t.Errorf("%v lost jobs counted", n)
		}
	})
}

func TestJobNotRecreatedIsCounted(t *testing.T) {
	cases := map[string]struct {
		create func(w *fixture) error // the API server's response to the creation
		end    bool                   // the controller stops
	}{
		"the namespace terminates": {create: func(*fixture) error {
			err := apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("terminating"))
			err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
			return err
		}},
		"the namespace is gone": {create: func(*fixture) error { return apierrors.NewNotFound(corev1.Resource("namespaces"), "shop") }},
		"the controller stops":  {end: true, create: func(*fixture) error { return apierrors.NewInternalError(errors.New("try again")) }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), job(nil))
				w.client.PrependReactor("create", "jobs", func(a clienttesting.Action) (bool, runtime.Object, error) {
					if len(a.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0 {
						return false, nil, nil
					}
					return true, nil, tc.create(w)
				})
				changeCM(w)
				w.pass(10 * time.Second)
				if tc.end {
					if n := w.count("lost_jobs_total", nil); n != 0 {
						t.Errorf("given up before the end: %v", w.writes())
					}
					w.stop()
				}
				if n := w.count("lost_jobs_total", nil); n != 1 {
					t.Errorf("%v lost jobs counted, want 1; writes %v", n, w.writes())
				}
			})
		})
	}
}

func TestJobCopyOfALongName(t *testing.T) {
	long := strings.Repeat("a", 63)
	w := &policy.Workload{Key: policy.Key{Kind: "CronJob", ObjectName: cache.NewObjectName("shop", long)}}
	got := runName(&policy.Facts{Workload: w}, &policy.Plan{})
	if len(got) != 52+1+8 || !strings.HasPrefix(got, long[:52]+"-") {
		t.Errorf("name = %q, want 52 characters, a hyphen and 8 digits", got)
	}
	if got, want := cutName(strings.Repeat("a", 50)+"-.nightly")+"-", strings.Repeat("a", 50)+"-"; got != want {
		t.Errorf("cut to %q, want %q: a dot before a hyphen is no name", got, want)
	}
}

// refuseStates refuses the next n patches of CronJobs.
func (w *fixture) refuseStates(n int) {
	w.client.PrependReactor("patch", "cronjobs", func(clienttesting.Action) (bool, runtime.Object, error) {
		if n == 0 {
			return false, nil, nil
		}
		n--
		return true, nil, apierrors.NewInternalError(errors.New("try again"))
	})
}

// runUnrecorded changes the ConfigMap and lets the quiet period pass, so that a Job is created. The
// next n patches of its CronJob are refused.
func (w *fixture) runUnrecorded(n int) {
	w.refuseStates(n)
	changeCM(w)
	w.pass(1500 * time.Millisecond)
}

// runs returns the existing Jobs.
func (w *fixture) runs() []*batchv1.Job {
	w.t.Helper()
	obj, err := w.client.Tracker().List(batchv1.SchemeGroupVersion.WithResource("jobs"), batchv1.SchemeGroupVersion.WithKind("Job"), "shop")
	if err != nil {
		w.t.Fatal(err)
	}
	var jobs []*batchv1.Job
	for _, job := range obj.(*batchv1.JobList).Items {
		jobs = append(jobs, &job)
	}
	return jobs
}

func (w *fixture) job(name string) *batchv1.Job {
	w.t.Helper()
	obj, err := w.client.Tracker().Get(batchv1.SchemeGroupVersion.WithResource("jobs"), "shop", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return obj.(*batchv1.Job).DeepCopy()
}
