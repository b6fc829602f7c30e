// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

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

const tryJob, deleteJob, createJob = "try jobs/web-", "delete jobs/web", "create jobs/web"

var jobForbidden = apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("no"))

func terminate(j *batchv1.Job) {
	j.DeletionTimestamp, j.Finalizers = ptr.To(metav1.Unix(1, 0)), []string{"example.org/wait"}
}

func TestReconcileJobs(t *testing.T) {
	replaced := []string{tryJob, deleteJob, createJob}
	runCases(t, map[string]reconcileCase{
		"a Job is deleted and created again, also a finished one": given(objs{cm1(), job(nil)}, func(f *fixture) {
			f.put(2*time.Second, cm2())
			want := &batchv1.Job{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{"app": "web"}, Annotations: map[string]string{kAuto: "true"}},
				Spec:       batchv1.JobSpec{Template: marked(h2)},
			}
			want.Spec.Template.Labels = map[string]string{"app": "web"}
			same(f.t, "Job", want, f.job(), asCreated)
			if f.job().UID == "job-1" {
				f.t.Error("it is still the old Job")
			}
		}, replaced),
		"a Job of a CronJob is left alone": {
			objects: objs{cm1(), job(func(j *batchv1.Job) {
				j.OwnerReferences = []metav1.OwnerReference{{Kind: "CronJob", Name: "web", Controller: ptr.To(true)}}
			})},
			change: changeCM,
		},
		"a Job with a manual selector is left alone": {
			objects: objs{cm1(), job(func(j *batchv1.Job) { j.Spec.ManualSelector = ptr.To(true) })}, change: changeCM,
			events: []string{"Normal ReloadSkipped The selector is manual, not reloaded for ConfigMap shop/app-config"},
		},
		"a Job that terminates is left alone": {objects: objs{cm1(), job(terminate)}, change: changeCM},
		"a Job that admission would refuse is not deleted": {
			objects: objs{cm1(), job(nil)}, change: func(f *fixture) { f.refuse(1, "try", "jobs", jobForbidden); changeCM(f) },
			want: append([]string{tryJob}, replaced...), events: []string{reloaded, failed + "try the new Job: " + jobForbidden.Error()},
		},
		"the creation is tried until it succeeds": {
			objects: objs{cm1(), job(nil)}, change: func(f *fixture) { f.refuse(3, "create", "jobs", errTryAgain); changeCM(f); f.pass(time.Minute) },
			want: append(slices.Clone(replaced), createJob, createJob, createJob),
		},
	})
}

// The API server may have done a request although its response was lost.
func TestJobSurvivesALostAnswer(t *testing.T) {
	gone := func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return errTimeout }
	// row answers requests with that verb.
	row := func(verb string, answers []answer, want []string, events ...string) reconcileCase {
		return reconcileCase{objects: objs{cm1(), job(nil)}, want: want, events: events, change: func(f *fixture) {
			f.answer(verb, "jobs", answers...)
			f.put(time.Hour, cm2()).count(0, "lost_jobs_total")
			if want[len(want)-1] == createJob && f.job().Spec.Template.Spec.Containers[0].Env == nil {
				f.t.Error("the Job carries no mark")
			}
		}}
	}
	runCases(t, map[string]reconcileCase{
		"the deletion was done, and the second is refused": row("delete",
			[]answer{gone, refusal(apierrors.NewTooManyRequests("later", 1)), refusal(jobForbidden)},
			[]string{tryJob, deleteJob, deleteJob, deleteJob, deleteJob, createJob}, reloaded, failed+errTimeout.Error()),
		"the deletion was done, but finalizers hold it up": row("delete",
			[]answer{
				func(f *fixture, _ controllertest.Request) error { f.Put(job(terminate)); return errTimeout },
				func(f *fixture, _ controllertest.Request) error {
					// Between two tries.
					time.AfterFunc(30*time.Minute+time.Second/2, func() { f.Put(job(func(j *batchv1.Job) { terminate(j); j.Finalizers = nil })) })
					return nil
				},
			},
			append([]string{tryJob, deleteJob, deleteJob}, slices.Repeat([]string{createJob}, 36)...), reloaded, failed+errTimeout.Error()),
		"the deletion was not done": row("delete", []answer{refusal(errTryAgain), refusal(errTimeout)},
			[]string{tryJob, deleteJob, deleteJob, deleteJob, createJob}, reloaded, failed+errTryAgain.Error()),
		"the deletion is refused": row("delete", []answer{refusal(jobForbidden)},
			[]string{tryJob, deleteJob, tryJob, deleteJob, createJob}, reloaded, failed+jobForbidden.Error()),
		"somebody else takes the name": row("create",
			[]answer{func(f *fixture, _ controllertest.Request) error {
				f.Put(job(func(j *batchv1.Job) { j.UID = "job-2"; variableSet(cmVar, h2)(&j.Spec.Template) }))
				return nil
			}},
			[]string{tryJob, deleteJob, createJob}, reloaded),
		"somebody else deletes the Job at that moment, so it is not created again": row("delete",
			[]answer{func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return nil }}, []string{tryJob, deleteJob}),
		"the creation was done": row("create",
			[]answer{(*fixture).apply}, []string{tryJob, deleteJob, createJob, createJob}, reloaded),
	})
}

// The cache may have the new Job long before the response to its creation arrives, or long after. The
// controller remembers what the Job was created again for.
func TestJobChangeAroundItsCreation(t *testing.T) {
	green := cm("app-config", "color", "green")
	h3 := hashOf("color", "green")
	// deny refuses the creations of 10 s, in which change happens.
	deny := func(err error, change func(f *fixture)) func(f *fixture) {
		return func(f *fixture) {
			begun := time.Now()
			f.before("create", "jobs", func(controllertest.Request) error {
				if time.Since(begun) < 10*time.Second {
					return err
				}
				return nil
			})
			f.put(5*time.Second, cm2())
			change(f)
			f.pass(5 * time.Second)
		}
	}
	putGreen := func(f *fixture) { f.Put(green) }
	type row struct {
		change func(f *fixture)
		want   string // the mark
		n      int    // Jobs created
	}
	bubbles(t, map[string]row{
		"a change before the creation is answered is not lost": {func(f *fixture) {
			f.once("create", "jobs", func() {
				f.Latency(20 * time.Second)
				time.AfterFunc(10*time.Second, func() { f.Put(green) })
				time.AfterFunc(20*time.Second, func() { f.Latency(time.Millisecond) })
			})
			changeCM(f)
		}, h3, 2},
		"a change before the answer to the creation is lost is not": {func(f *fixture) {
			f.answer("create", "jobs", func(_ *fixture, r controllertest.Request) error {
				lost := f.apply(r)
				<-time.After(10 * time.Second)
				f.Put(green)
				<-time.After(10 * time.Second)
				return lost
			})
			changeCM(f)
		}, h3, 2},
		"a change before the cache has the new Job is not lost": {func(f *fixture) {
			f.put(2*time.Second, cm2())
			if f.job().UID == "job-1" {
				f.t.Fatal("not created again yet")
			}
			f.Put(green)
		}, h3, 2},
		"a change that takes the source back is not lost":              {func(f *fixture) { changeCM(f); f.pass(2 * time.Second); f.Put(cm1()) }, h1, 2},
		"a change before the creation replaces the Job no second time": {deny(jobForbidden, putGreen), h2, 1},
		"the way back from a change before the creation replaces the Job": {func(f *fixture) {
			deny(jobForbidden, putGreen)(f)
			f.pass(time.Minute)
			changeCM(f)
		}, h2, 2},
		"no other 404 than the namespace's ends the attempts": {
			deny(apierrors.NewNotFound(schema.GroupResource{Group: "kueue.x-k8s.io", Resource: "localqueues"}, "shop"), func(*fixture) {}), h2, 1,
		},
		"a Job that somebody deletes meanwhile is left alone": {func(f *fixture) {
			f.put(2*time.Second, cm2())
			f.Delete(f.job())
			f.pass(2 * time.Second).noErrors()
		}, "", 1},
	}, func(t bubble, tc row) {
		f := newFixture(t.T, nil, cm1(), job(nil))
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
		f.count(0, "pending_workloads")
	})
}

func TestJobNotRecreatedIsCounted(t *testing.T) {
	terminating := apierrors.NewForbidden(batchv1.Resource("jobs"), "web", errors.New("terminating"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	type row struct {
		verb      string
		refusal   error
		lost, end float64 // before and after the controller stops
	}
	bubbles(t, map[string]row{
		"the namespace terminates":                  {"create", terminating, 1, 1},
		"the namespace is gone":                     {"create", apierrors.NewNotFound(corev1.Resource("namespaces"), "shop"), 1, 1},
		"the controller stops":                      {"create", errTryAgain, 0, 1},
		"an unanswered deletion counts no lost Job": {"delete", errTryAgain, 0, 0},
	}, func(t bubble, tc row) {
		f := newFixture(t.T, nil, cm1(), job(nil))
		f.refuse(99, tc.verb, "jobs", tc.refusal)
		f.put(10*time.Second, cm2()).count(tc.lost, "lost_jobs_total")
		f.Restart(func() { f.count(tc.end, "lost_jobs_total") })
	})
}

func (f *fixture) job() *batchv1.Job {
	f.t.Helper()
	j := controllertest.Get[batchv1.Job](f.Host, "shop", "web")
	if j == nil {
		f.t.Fatal("there is no Job")
	}
	return j
}
