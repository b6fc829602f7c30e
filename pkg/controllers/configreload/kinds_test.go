// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
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

// ignoreServerFields ignores the fields that stand in for those set by the API server.
var ignoreServerFields = cmp.Options{
	cmpopts.IgnoreTypes(metav1.TypeMeta{}),
	cmpopts.IgnoreFields(metav1.ObjectMeta{}, "UID", "ResourceVersion", "Generation", "CreationTimestamp", "ManagedFields"),
}

func TestReconcileRunsACronJobOncePerChange(t *testing.T) {
	stateOf := func(pairs ...string) string { return stateOn("CronJob/shop/web", pairs...) }
	recorded := func(pairs ...string) string {
		return "patch cronjobs/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: stateOf(pairs...)}}})
	}
	const (
		create  = "create jobs/web-RUN"
		refused = failedEvent + "Internal error occurred: try again"
		skipped = "Normal ReloadSkipped A Job is active, not reloaded for ConfigMap shop/app-config"
		waits   = "Normal ReloadWaits A Job is active and concurrencyPolicy is Forbid, waits to reload for ConfigMap shop/app-config"
	)
	state := recorded(cmKey, hash2)
	ran := []string{create, state}

	type option = func(*batchv1.CronJob)
	autoCronJob := func(change option) *batchv1.CronJob {
		return cronJob(change, kAuto, "true", nativeState, stateOf(cmKey, hash1))
	}
	namedCronJob := func(change option) *batchv1.CronJob {
		return cronJob(change, kCM, "app-config", nativeState, stateOf(cmKey, hash1))
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
	foreignJob := run("run-1")
	foreignJob.OwnerReferences[0].UID = "cj-0"
	// unrecorded changes the ConfigMap, so that a Job is created, and refuses the next n patches of its CronJob.
	unrecorded := func(n int, next func(f *fixture)) func(f *fixture) {
		return func(f *fixture) {
			f.refuseNext(n, "patch", "cronjobs", errTryAgain)
			f.put(1500*time.Millisecond, cm2())
			next(f)
		}
	}

	runCases(t, map[string]reconcileCase{
		"a change runs the CronJob once": newCase(objectList{cm1(), autoCronJob(nil)}, func(f *fixture) {
			f.put(2*time.Second, cm2())
			// The name of a run depends on the version of the source.
			version := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "app-config").ResourceVersion
			sum := sha256.Sum256([]byte(`cj-1{"configmap/app-config":"` + hash2 + "@" + version + `","workload":"CronJob/shop/web"}`))
			want := []*batchv1.Job{{
				ObjectMeta: metav1.ObjectMeta{
					Name: "web-" + hex.EncodeToString(sum[:4]), Namespace: "shop",
					Labels:          map[string]string{"app": "web"},
					Annotations:     map[string]string{"team": "shop", kAuto: "true", "cronjob.kubernetes.io/instantiate": "manual"},
					OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "CronJob", Name: "web", UID: "cj-1", Controller: ptr.To(true)}},
				},
				Spec: batchv1.JobSpec{Template: marked(hash2)},
			}}
			assert.Equal(f.t, "Jobs", want, f.jobs(), ignoreServerFields)
		}, ran),
		"a suspended CronJob is not run under auto": newCase(objectList{cm1(), autoCronJob(suspended)}, changeCM,
			[]string{state}, "Normal ReloadSkipped Suspended, not reloaded for ConfigMap shop/app-config"),
		"a suspended CronJob is run for a named source":                               {objects: objectList{cm1(), namedCronJob(suspended)}, change: changeCM, want: ran},
		"a CronJob that forbids concurrency is not run under auto while it is active": newCase(objectList{cm1(), autoCronJob(busy)}, changeCM, []string{state}, skipped),
		"a CronJob that forbids concurrency waits, for a named source, until it is not active": newCase(objectList{cm1(), namedCronJob(busy)}, func(f *fixture) { f.put(5*time.Minute, cm2()).expectWriteCount(0); f.Put(namedCronJob(forbid)) },
			ran, waits, reloadedEvent),
		"a Job of ours counts as active until it is complete": newCase(objectList{cm1(), namedCronJob(forbid), run("run-1")}, func(f *fixture) {
			f.put(5*time.Minute, cm2())
			f.expectRequests(map[string]int{"list deployments": 1}) // for the original
			f.put(10*time.Second, run("run-1", batchv1.JobSuspended, batchv1.JobComplete))
		}, ran, waits, reloadedEvent),
		"a Job of ours counts as active until it has failed": {objects: objectList{cm1(), namedCronJob(forbid), run("run-1", batchv1.JobFailed)}, change: changeCM, want: ran},
		"one unfinished Job among several skips the reload": newCase(objectList{cm1(), autoCronJob(forbid), run("run-1", batchv1.JobComplete), run("run-2", batchv1.JobSuspended), run("run-3", batchv1.JobFailed)}, changeCM,
			[]string{state}, skipped),
		"somebody else's Job does not count":         {objects: objectList{cm1(), namedCronJob(forbid), foreignJob}, change: changeCM, want: ran},
		"where concurrency is allowed no Job counts": {objects: objectList{cm1(), namedCronJob(nil), run("run-1")}, change: changeCM, want: ran},
		"a repetition does not wait for the Job that it has created": newCase(objectList{cm1(), namedCronJob(forbid)}, func(f *fixture) { f.refuseNext(1, "patch", "cronjobs", errTryAgain); changeCM(f) },
			[]string{create, state, state}, reloadedEvent, refused),
		"a repetition neither skips the reload nor creates a Job again that is gone": newCase(objectList{cm1(), autoCronJob(forbid)}, unrecorded(2, func(f *fixture) { f.Delete(f.jobs()[0]); f.advance(time.Minute) }),
			[]string{create, state, state, state}, reloadedEvent, refused, refused),
		"a repetition is not skipped as the CronJob is suspended by now": newCase(objectList{cm1(), autoCronJob(nil)}, unrecorded(1, func(f *fixture) { f.Put(autoCronJob(suspended)) }),
			[]string{create, state, state}, reloadedEvent, refused),
		"a CronJob does not run again as the source has a label more by now": newCase(objectList{cm1(), autoCronJob(nil)}, unrecorded(1, func(f *fixture) { f.Put(labelled(cm2())) }),
			[]string{create, state, state}, reloadedEvent, refused),
		"a new leader does not run a CronJob again": newCase(objectList{cm1(), autoCronJob(forbid)}, unrecorded(1, func(f *fixture) { f.Restart() }),
			[]string{create, state, state}, reloadedEvent, refused),
		"a CronJob runs again as the source has gone back and come again": newCase(objectList{cm1(), autoCronJob(nil)}, unrecorded(1, func(f *fixture) { f.Put(cm1()); f.advance(10 * time.Millisecond); changeCM(f) }),
			[]string{create, state, create, state}, reloadedEvent, refused),
		"a CronJob runs again as another source has changed too": newCase(objectList{cm1(), db1(), cronJob(alsoReadsDB, kAuto, "true", nativeState, stateOf(cmKey, hash1, dbKey, dbHash1))}, unrecorded(1, changeDB),
			[]string{create, recorded(cmKey, hash2, dbKey, dbHash1), create, recorded(cmKey, hash2, dbKey, dbHash2)}, reloadedBothEvent, refused),
		"a repetition finds its Job though the state is another by now": {
			objects: objectList{cm1(), cronJob(alsoReadsDB, kAuto, "true", nativeState, stateOf(cmKey, hash1, dbKey, ""))},
			change:  unrecorded(1, func(f *fixture) { f.Put(db1()) }), // recorded, not rolled
			want:    []string{create, recorded(cmKey, hash2, dbKey, ""), recorded(cmKey, hash2, dbKey, dbHash1)},
			events:  []string{reloadedEvent, refused},
		},
		"a dry run says that a suspended CronJob would be skipped": newCase(objectList{cm1(), autoCronJob(suspended)}, changeCM,
			nil, "Normal ReloadSkipped Suspended, would not reload for ConfigMap shop/app-config").withConfig(func(c *config) { c.DryRun = true }),
		"annotations of the Job template's own metadata are not read": {objects: objectList{cm1(), cronJob(nil)}, change: changeCM},
	})
}

// rolloutDefinition is as much of Argo's CustomResourceDefinition as the test's API server reads.
var rolloutDefinition = &unstructured.Unstructured{Object: map[string]any{
	"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "rollouts.argoproj.io"},
	"spec": map[string]any{"group": "argoproj.io", "scope": "Namespaced", "names": map[string]any{"kind": "Rollout", "plural": "rollouts"},
		"versions": []any{map[string]any{"name": "v1alpha1", "served": true, "storage": true}}},
}}

// rollout returns the Argo Rollout web; a nil template leaves the template out.
func rollout(t *testing.T, template *corev1.PodTemplateSpec, annotations ...string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout",
		"metadata": map[string]any{"namespace": "shop", "name": "web"},
		"spec":     map[string]any{"strategy": map[string]any{"canary": map[string]any{}}},
	}}
	if template != nil {
		object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(template)
		assert.NoError(t, err)
		u.Object["spec"].(map[string]any)["template"] = object
	}
	return annotated(u, annotations...)
}

func TestReconcilePatchesRollouts(t *testing.T) {
	stateOf := func(pairs ...string) string { return stateOn("Rollout/shop/web", pairs...) }
	oldState, newState := stateOf(cmKey, hash1), stateOf(cmKey, hash2)
	otherVar := variableSet("OTHER", "x")
	fromSecret := func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}}})
	}
	marked := pod(otherVar, variableSet(cmVar, hash1), reads("app-config"))
	two := pod(otherVar, variableSet(dbVar, dbHash1), variableSet(cmVar, hash1), reads("app-config"), fromSecret)
	current, bare := pod(reads("app-config"), variableSet(cmVar, hash2)), pod(reads("app-config"), fromSecret)
	patch := func(state string, spec object) string {
		return "patch rollouts/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: state}}, "spec": spec})
	}
	// containers is the patch that leaves the containers of a template.
	containers := func(state string, options ...podOption) string {
		template := pod(options...)
		list, _, err := unstructured.NestedSlice(rollout(t, &template).Object, "spec", "template", "spec", "containers")
		assert.NoError(t, err)
		return patch(state, object{"template": object{"spec": object{"containers": list}}})
	}
	replaced := containers(newState, otherVar, variableSet(cmVar, hash2), reads("app-config"))
	// row has a Rollout with this template and this state.
	row := func(configure func(*config), template *corev1.PodTemplateSpec, state string, change func(f *fixture), want ...string) reconcileCase {
		return reconcileCase{
			configure: func(c *config) { c.ArgoRollouts = true; configure(c) }, change: change, want: want,
			objects: objectList{rolloutDefinition, cm1(), db1(), rollout(t, template, kAuto, "true", nativeState, state)},
		}
	}
	plain := func(*config) {}
	both := func(template *corev1.PodTemplateSpec, options ...podOption) reconcileCase {
		tc := row(plain, template, stateOf(cmKey, hash1, dbKey, dbHash1), func(f *fixture) { changeCM(f); changeDB(f) },
			containers(stateOf(cmKey, hash2, dbKey, dbHash2), options...))
		tc.events = []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"}
		return tc
	}
	restarted := rollout(t, &current, kAuto, "true", compatStrategy, "restart", nativeState, oldState)
	argo := func(c *config) { c.ArgoRollouts = true }

	runCases(t, map[string]reconcileCase{
		"the first variable of a container is added": row(plain, &web, oldState, changeCM, containers(newState, reads("app-config"), variableSet(cmVar, hash2))),
		"several variables are each replaced where they stand": both(&two,
			otherVar, variableSet(dbVar, dbHash2), variableSet(cmVar, hash2), reads("app-config"), fromSecret),
		"several variables are added one after the other": both(&bare, reads("app-config"), fromSecret, variableSet(dbVar, dbHash2), variableSet(cmVar, hash2)),
		"on-delete removes it where it stands": row(onDelete, &marked, oldState, deleteCM,
			containers(stateOf(cmKey, ""), otherVar, reads("app-config"))),
		"a conflict is decided on again": row(plain, &marked, oldState, func(f *fixture) {
			f.refuseNext(1, "patch", "rollouts", apierrors.NewConflict(configreload.RolloutsResource.GroupResource(), "web", errTryAgain))
			f.put(time.Minute, cm2()).expectNoErrors()
		}, replaced, replaced),
		"the annotations strategy is a merge patch": row(strategyAnnotations, &web, oldState, changeCM,
			patch(newState, object{"template": object{"metadata": object{"annotations": object{compatMark: markOf(hash2, 1)}}}})),
		"the strategy restart marks nothing, and a variable that an earlier configuration left tells nothing": newCase(objectList{rolloutDefinition, cm1(), restarted}, changeCM,
			[]string{patch(newState, object{"restartAt": second(1)})}).withConfig(argo),
		"without the flag Rollouts are left alone": {objects: objectList{rolloutDefinition, cm1(), rollout(t, &web, kAuto, "true", nativeState, oldState)}, change: changeCM},
	})
}

func TestKindsAreRolledAlike(t *testing.T) {
	// row has app-config and a workload. Only Deployments can be paused.
	row := func(kind, resource string, workload metav1.Object) reconcileCase {
		workload.SetNamespace("shop")
		workload.SetName("web")
		annotated(workload, kAuto, "true", kPause, "5m", nativeState, stateOn(kind+"/shop/web", cmKey, hash1))
		return newCase(objectList{cm1(), workload.(runtime.Object)}, changeCM, []string{envOn(resource+"/web", stateOn(kind+"/shop/web", cmKey, hash2), "web/"+cmVar, hash2)})
	}
	runCases(t, map[string]reconcileCase{
		"a StatefulSet": row("StatefulSet", "statefulsets", &appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Template: web}}),
		"a DaemonSet":   row("DaemonSet", "daemonsets", &appsv1.DaemonSet{Spec: appsv1.DaemonSetSpec{Template: web}}),
	})
}

// job returns a finished Job of its own, as the API server returns it.
func job(change func(*batchv1.Job)) *batchv1.Job {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "job-1", CreationTimestamp: metav1.Unix(1, 0),
		Labels: map[string]string{"app": "web"}, Annotations: map[string]string{kAuto: "true"},
	}}
	j.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"batch.kubernetes.io/controller-uid": "job-1"}}
	j.Spec.Template = pod(reads("app-config"))
	j.Spec.Template.Labels = map[string]string{"app": "web", "controller-uid": "job-1", "job-name": "web",
		"batch.kubernetes.io/controller-uid": "job-1", "batch.kubernetes.io/job-name": "web"}
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

func TestReconcileReplacesJobs(t *testing.T) {
	replaced := []string{tryJob, deleteJob, createJob}
	runCases(t, map[string]reconcileCase{
		"a Job is deleted and created again, also a finished one": newCase(objectList{cm1(), job(nil)}, func(f *fixture) {
			f.put(2*time.Second, cm2())
			want := &batchv1.Job{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{"app": "web"}, Annotations: map[string]string{kAuto: "true"}},
				Spec:       batchv1.JobSpec{Template: marked(hash2)},
			}
			want.Spec.Template.Labels = map[string]string{"app": "web"}
			assert.Equal(f.t, "Job", want, f.job(), ignoreServerFields)
			assert.Equal(f.t, "it is still the old Job", false, f.job().UID == "job-1")
		}, replaced),
		"a Job of a CronJob is left alone": newCase(objectList{cm1(), job(func(j *batchv1.Job) {
			j.OwnerReferences = []metav1.OwnerReference{{Kind: "CronJob", Name: "web", Controller: ptr.To(true)}}
		})}, changeCM, nil),
		"a Job with a manual selector is left alone": {
			objects: objectList{cm1(), job(func(j *batchv1.Job) { j.Spec.ManualSelector = ptr.To(true) })}, change: changeCM,
			events: []string{"Normal ReloadSkipped The selector is manual, not reloaded for ConfigMap shop/app-config"},
		},
		"a Job that terminates is left alone": {objects: objectList{cm1(), job(terminate)}, change: changeCM},
		"a Job that admission would refuse is not deleted": {
			objects: objectList{cm1(), job(nil)}, change: func(f *fixture) { f.refuseNext(1, "try", "jobs", jobForbidden); changeCM(f) },
			want: append([]string{tryJob}, replaced...), events: []string{reloadedEvent, failedEvent + "try the new Job: " + jobForbidden.Error()},
		},
		"the creation is tried until it succeeds": {
			objects: objectList{cm1(), job(nil)}, change: func(f *fixture) { f.refuseNext(3, "create", "jobs", errTryAgain); changeCM(f); f.advance(time.Minute) },
			want: append(slices.Clone(replaced), createJob, createJob, createJob),
		},
	})
}

// The API server may have done a request although its response was lost.
func TestJobSurvivesALostAnswer(t *testing.T) {
	gone := func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return errTimeout }
	// row answers requests with that verb.
	row := func(verb string, answers []answer, want []string, events ...string) reconcileCase {
		return reconcileCase{objects: objectList{cm1(), job(nil)}, want: want, events: events, change: func(f *fixture) {
			f.answerNext(verb, "jobs", answers...)
			f.put(time.Hour, cm2()).expectMetric(0, "lost_jobs_total")
			if want[len(want)-1] == createJob && f.job().Spec.Template.Spec.Containers[0].Env == nil {
				f.t.Error("the Job carries no mark")
			}
		}}
	}
	runCases(t, map[string]reconcileCase{
		"the deletion was done, and the second is refused": row("delete",
			[]answer{gone, refusal(apierrors.NewTooManyRequests("later", 1)), refusal(jobForbidden)},
			[]string{tryJob, deleteJob, deleteJob, deleteJob, deleteJob, createJob}, reloadedEvent, failedEvent+errTimeout.Error()),
		"the deletion was done, but finalizers hold it up": row("delete",
			[]answer{
				func(f *fixture, _ controllertest.Request) error { f.Put(job(terminate)); return errTimeout },
				func(f *fixture, _ controllertest.Request) error {
					// Between two tries.
					time.AfterFunc(30*time.Minute+time.Second/2, func() { f.Put(job(func(j *batchv1.Job) { terminate(j); j.Finalizers = nil })) })
					return nil
				},
			},
			append([]string{tryJob, deleteJob, deleteJob}, slices.Repeat([]string{createJob}, 36)...), reloadedEvent, failedEvent+errTimeout.Error()),
		"the deletion was not done": row("delete", []answer{refusal(errTryAgain), refusal(errTimeout)},
			[]string{tryJob, deleteJob, deleteJob, deleteJob, createJob}, reloadedEvent, failedEvent+errTryAgain.Error()),
		"the deletion is refused": row("delete", []answer{refusal(jobForbidden)},
			[]string{tryJob, deleteJob, tryJob, deleteJob, createJob}, reloadedEvent, failedEvent+jobForbidden.Error()),
		"somebody else takes the name": row("create",
			[]answer{func(f *fixture, _ controllertest.Request) error {
				f.Put(job(func(j *batchv1.Job) { j.UID = "job-2"; variableSet(cmVar, hash2)(&j.Spec.Template) }))
				return nil
			}},
			[]string{tryJob, deleteJob, createJob}, reloadedEvent),
		"somebody else deletes the Job at that moment, so it is not created again": row("delete",
			[]answer{func(f *fixture, _ controllertest.Request) error { f.Delete(job(nil)); return nil }}, []string{tryJob, deleteJob}),
		"the creation was done": row("create",
			[]answer{(*fixture).applyRequest}, []string{tryJob, deleteJob, createJob, createJob}, reloadedEvent),
	})
}

// The cache may have the new Job long before the response to its creation arrives, or long after. The
// controller remembers what the Job was created again for.
func TestChangeNearAJobsCreationIsNotLost(t *testing.T) {
	green := cm("app-config", "color", "green")
	h3 := hashOf("color", "green")
	// refuseCreations refuses the creations of 10 s, in which change happens.
	refuseCreations := func(err error, change func(f *fixture)) func(f *fixture) {
		return func(f *fixture) {
			start := time.Now()
			f.beforeRequest("create", "jobs", func(controllertest.Request) error {
				if time.Since(start) < 10*time.Second {
					return err
				}
				return nil
			})
			f.put(5*time.Second, cm2())
			change(f)
			f.advance(5 * time.Second)
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
			f.beforeFirst("create", "jobs", func() {
				f.Latency(20 * time.Second)
				time.AfterFunc(10*time.Second, func() { f.Put(green) })
				time.AfterFunc(20*time.Second, func() { f.Latency(time.Millisecond) })
			})
			changeCM(f)
		}, h3, 2},
		"a change before the answer to the creation is lost is not": {func(f *fixture) {
			f.answerNext("create", "jobs", func(_ *fixture, r controllertest.Request) error {
				lost := f.applyRequest(r)
				<-time.After(10 * time.Second)
				f.Put(green)
				<-time.After(10 * time.Second)
				return lost
			})
			changeCM(f)
		}, h3, 2},
		"a change that takes the source back before the cache has the new Job is not lost": {func(f *fixture) { changeCM(f); f.advance(2 * time.Second); f.Put(cm1()) }, hash1, 2},
		"a change before the creation replaces the Job no second time":                     {refuseCreations(jobForbidden, putGreen), hash2, 1},
		"the way back from a change before the creation replaces the Job": {func(f *fixture) {
			refuseCreations(jobForbidden, putGreen)(f)
			f.advance(time.Minute)
			changeCM(f)
		}, hash2, 2},
		"no other 404 than the namespace's ends the attempts": {refuseCreations(apierrors.NewNotFound(schema.GroupResource{Group: "kueue.x-k8s.io", Resource: "localqueues"}, "shop"), func(*fixture) {}), hash2, 1},
		"a Job that somebody deletes meanwhile is left alone": {func(f *fixture) {
			f.put(2*time.Second, cm2())
			f.Delete(f.job())
			f.advance(2 * time.Second).expectNoErrors()
		}, "", 1},
	}, func(t bubble, tc row) {
		f := newFixture(t.T, nil, cm1(), job(nil))
		f.Lag(3*time.Second, "jobs")
		tc.change(f)
		f.advance(time.Hour)
		var mark string
		for _, job := range f.jobs() {
			mark = job.Spec.Template.Spec.Containers[0].Env[0].Value
		}
		assert.Equal(t, "mark", tc.want, mark)
		assert.Equal(t, "replacements", tc.n, f.countRequests()["try jobs"])
		f.expectMetric(0, "pending_workloads")
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
		f.refuseNext(99, tc.verb, "jobs", tc.refusal)
		f.put(10*time.Second, cm2()).expectMetric(tc.lost, "lost_jobs_total")
		f.Restart(func() { f.expectMetric(tc.end, "lost_jobs_total") })
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
