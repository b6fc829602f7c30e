// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

// limited sets the default limit of writes.
func limited(c *scaleschedule.Config) { c.MaxPerSecond = scaleschedule.NewConfig().MaxPerSecond }

// TestReconcile has what is about more than one decision. The tests of package policy have the rest.
func TestReconcile(t *testing.T) {
	deployments := schema.GroupResource{Group: "apps", Resource: "deployments"}
	for name, test := range map[string]struct {
		configure func(*scaleschedule.Config)
		run       func(w *fixture)
	}{
		"a workload goes down and up without a request in between": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(time.Minute, 3*time.Hour)))
			w.start()
			w.Sleep(time.Minute - time.Second)
			w.asked()
			w.Sleep(time.Second)
			w.asked(patchA)
			w.is("shop/a", "0 (3)")
			w.toldOf("ScaledDown shop/a")
			w.metric(1, "down_objects", "kind", "Deployment")
			w.metric(1, "lag_seconds")
			w.Sleep(2 * time.Hour)
			if all := w.all(); len(all) > 0 {
				w.Errorf("requests while nothing is due: %q", all)
			}
			w.Sleep(time.Hour - time.Minute - 10*time.Second)
			w.asked()
			w.Sleep(11 * time.Second)
			w.asked(patchA)
			w.is("shop/a", "3")
			w.toldOf("ScaledUp shop/a")
			w.metric(0, "down_objects", "kind", "Deployment")
			w.metric(1, "writes_total", "kind", "Deployment", "direction", "up", "result", "success")
			w.metric(2, "lag_seconds")
		}},
		"a change of a Namespace wakes its own workloads only": {run: func(w *fixture) {
			w.add(namespace("shop"), namespace("other"), deployment("shop/a", 3), deployment("shop/b", 2), deployment("other/a", 1),
				deployment("shop/c", 1, ds+"uptime", "always"))
			w.start()
			w.asked()
			before := w.Controller(scaleschedule.Name).Status().Reconciles
			w.add(namespace("shop", ds+"downtime", "always"))
			got := w.all()
			slices.Sort(got)
			if want := []string{patchA, "patch deployments.apps shop/b"}; !slices.Equal(got[len(got)-2:], want) {
				w.Errorf("%q, want %q", got, want)
			}
			// The Namespace, its three workloads, and the two that were written again.
			if n := w.Controller(scaleschedule.Name).Status().Reconciles - before; n > 6 {
				w.Errorf("%d reconciles", n)
			}
			w.is("other/a", "1")
			before = w.Controller(scaleschedule.Name).Status().Reconciles
			n := namespace("shop", ds+"downtime", "always")
			n.Labels = map[string]string{"a": "b"}
			w.add(n)
			if after := w.Controller(scaleschedule.Name).Status().Reconciles; after != before {
				w.Errorf("a label of a Namespace made %d reconciles", after-before)
			}
		}},
		"a workload goes down when its grace period ends": {run: func(w *fixture) {
			d := deployment("shop/a", 3, ds+"downtime", "always")
			d.CreationTimestamp.Time = time.Now().Add(-time.Minute)
			w.add(d)
			w.start()
			w.Sleep(14*time.Minute - time.Second)
			w.asked()
			w.Sleep(time.Second)
			w.asked(patchA)
		}},
		"a workload comes up when its schedule is removed": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.start()
			w.is("shop/a", "0 (3)")
			w.annotate("shop/a", ds+"downtime", "")
			w.asked(patchA, patchA)
			w.is("shop/a", "3")
		}},
		"a workload that a person raises is left alone for the hold": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.start()
			w.asked(patchA)
			w.scale("shop/a", 2)
			w.Sleep(15*time.Minute - time.Second)
			w.asked()
			w.is("shop/a", "2 (3)")
			w.Sleep(time.Second)
			w.asked(patchA)
			w.is("shop/a", "0 (3)")
			w.scale("shop/a", 1)
			w.Sleep(time.Minute)
			w.scale("shop/a", 0)
			w.Sleep(time.Hour)
			w.asked()
			w.is("shop/a", "0 (3)")
			w.scale("shop/a", 2)
			w.Sleep(15*time.Minute - time.Second)
			w.asked()
		}},
		"a workload that GitOps raises each time is contested after three times": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(0, 5*time.Hour)))
			w.start()
			for _, want := range []string{"5 (3)", "5 (5)", "5 (5)"} {
				w.scale("shop/a", 5)
				w.Sleep(15*time.Minute - time.Second)
				w.is("shop/a", want)
				w.Sleep(time.Second)
			}
			w.scale("shop/a", 5)
			w.Sleep(2 * time.Hour)
			w.is("shop/a", "5 (5)")
			if got := w.records(); !slices.Equal(got, []string{"3", "5", "5", "5"}) {
				w.Errorf("the records are %q", got)
			}
			w.asked(patchA, patchA, patchA, patchA)
			w.toldOf("ScaleContested shop/a", "ScaledDown shop/a", "ScaledDown shop/a") // three of them have the same text
			w.metric(1, "contested_objects")
			w.Sleep(3 * time.Hour)
			w.is("shop/a", "5")
			w.metric(0, "contested_objects")
		}},
		"a raised workload keeps its number when it comes up": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(0, time.Minute)))
			w.start()
			w.scale("shop/a", 4)
			w.Sleep(time.Minute)
			w.asked(patchA, patchA)
			w.is("shop/a", "4")
			w.toldOf("ScaledDown shop/a")
		}},
		"a record that somebody removes is put back once": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(0, 3*time.Hour)))
			w.start()
			w.annotate("shop/a", R, "")
			w.asked(patchA, patchA)
			w.is("shop/a", "0 (3)")
			w.annotate("shop/a", R, "")
			w.Sleep(time.Hour)
			w.asked()
			w.is("shop/a", "0")
		}},
		"a record is put back once in each downtime": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(0, time.Hour)+","+in(2*time.Hour, 3*time.Hour)))
			w.start()
			w.annotate("shop/a", R, "")
			w.Sleep(time.Hour)
			w.is("shop/a", "3")
			w.Sleep(time.Hour)
			w.annotate("shop/a", R, "")
			w.is("shop/a", "0 (3)")
		}},
		"a record that is removed with the replicas is not put back": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"))
			w.start()
			w.edit("shop/a", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](0); delete(d.Annotations, R) })
			w.asked(patchA)
		}},
		"an invalid schedule concerns its own object": {run: func(w *fixture) {
			w.add(namespace("shop"), namespace("bad", ds+"downtime", "8-18 PST"), deployment("bad/a", 1), deployment("bad/b", 1),
				deployment("bad/c", 1, ds+"downtime", "always"), deployment("shop/a", 3, ds+"downtime", "always"),
				deployment("shop/local", 1, ds+"downtime", "Mon-Fri 8-18 Local"), deployment("shop/long", 1, ds+"downtime", strings.Repeat("x", 3000)))
			w.start()
			got := w.all()
			slices.Sort(got)
			if want := []string{"patch deployments.apps bad/c", patchA}; !slices.Equal(got[len(got)-2:], want) || len(got) > 4 {
				w.Errorf("%q, want %q", got, want)
			}
			w.toldOf("InvalidSchedule bad", "InvalidSchedule shop/local", "InvalidSchedule shop/long", "ScaledDown bad/c", "ScaledDown shop/a")
			w.metric(3, "invalid_annotations_total", "key", "downtime")
			w.scale("shop/local", 2)
			w.Sleep(24 * time.Hour)
			w.toldOf()
			w.annotate("shop/local", ds+"downtime", "always")
			w.is("shop/local", "0 (2)")
		}},
		"a workload that comes before its Namespace": {run: func(w *fixture) {
			w.start()
			w.add(deployment("shop/a", 0, R, "3"))
			w.asked()
			w.add(namespace("shop", ds+"downtime", in(0, time.Hour)))
			w.asked()
			w.Sleep(time.Hour)
			w.asked(patchA)
		}},
		"a CronJob is suspended and resumed": {run: func(w *fixture) {
			job := &batchv1.CronJob{ObjectMeta: meta("shop/a", ds+"downtime", in(0, time.Hour))}
			w.add(job, &batchv1.CronJob{ObjectMeta: meta("shop/b", ds+"downtime", in(0, time.Hour)), Spec: batchv1.CronJobSpec{Suspend: ptr.To(true)}})
			w.start()
			w.asked("patch cronjobs.batch shop/a")
			if got := controllertest.Get[batchv1.CronJob](w.Host, "shop", "a"); !*got.Spec.Suspend || got.Annotations[R] != "1" {
				w.Errorf("%v", got)
			}
			w.Sleep(time.Hour)
			w.asked("patch cronjobs.batch shop/a")
			if got := controllertest.Get[batchv1.CronJob](w.Host, "shop", "a"); *got.Spec.Suspend || len(got.Annotations) != 1 {
				w.Errorf("%v", got)
			}
		}},
		"a HorizontalPodAutoscaler is lowered and restored": {configure: withKind("horizontalpodautoscalers"), run: func(w *fixture) {
			w.add(autoscaler("shop/h", "Deployment", "a", ds+"downtime", in(0, time.Hour), ds+"downtime-replicas", "1"))
			w.start()
			w.asked("patch horizontalpodautoscalers.autoscaling shop/h")
			h := controllertest.Get[autoscalingv2.HorizontalPodAutoscaler](w.Host, "shop", "h")
			if *h.Spec.MinReplicas != 1 || h.Annotations[R] != "4" {
				w.Errorf("%v", h)
			}
			h.Spec.MaxReplicas = 2
			w.add(h)
			w.Sleep(time.Hour)
			w.asked("patch horizontalpodautoscalers.autoscaling shop/h")
			if h := controllertest.Get[autoscalingv2.HorizontalPodAutoscaler](w.Host, "shop", "h"); *h.Spec.MinReplicas != 2 {
				w.Errorf("%v", h)
			}
		}},
		"a Deployment with a HorizontalPodAutoscaler is left alone": {run: func(w *fixture) {
			w.add(autoscaler("shop/h", "Deployment", "a"), autoscaler("shop/i", "Deployment", "b"), deployment("shop/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"),
				deployment("shop/b", 3, ds+"downtime", "always"), deployment("other/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"))
			w.start()
			w.is("shop/a", "3")
			w.is("shop/b", "0 (3)")
			w.is("other/a", "1 (3)")
			w.toldOf("ScaledByOther shop/a", "ScaledDown other/a", "ScaledDown shop/b")
			w.Delete(autoscaler("shop/h", "Deployment", "a"))
			w.Settle()
			w.is("shop/a", "1 (3)")
		}},
		"a ScaledObject is paused in place of its Deployment": {configure: withKind("scaledobjects.keda.sh"), run: func(w *fixture) {
			w.add(definition("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"), namespace("shop", ds+"downtime", in(0, time.Hour)), scaledObject("shop/s", "a"),
				autoscaler("shop/keda-hpa-s", "Deployment", "a"), deployment("shop/a", 3), deployment("shop/b", 2))
			w.start()
			w.is("shop/a", "3")
			w.is("shop/b", "0 (2)")
			if got := w.scaledObject().GetAnnotations(); got["autoscaling.keda.sh/paused-replicas"] != "0" || got[R] != "-1" {
				w.Errorf("%v", got)
			}
			w.Sleep(time.Hour)
			if got := w.scaledObject().GetAnnotations(); len(got) > 0 {
				w.Errorf("%v", got)
			}
			w.toldOf("ScaledDown shop/b", "ScaledDown shop/s", "ScaledUp shop/b", "ScaledUp shop/s")
		}},
		"a manager works where KEDA is not installed": {configure: withKind("scaledobjects.keda.sh"), run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.start()
			w.is("shop/a", "0 (3)")
		}},
		"a Rollout": {configure: withKind("rollouts.argoproj.io"), run: func(w *fixture) {
			w.add(definition("argoproj.io", "v1alpha1", "Rollout", "rollouts"), rollout("shop/r", ds+"downtime", in(0, time.Hour)))
			w.start()
			w.asked("patch rollouts.argoproj.io shop/r")
			w.Sleep(time.Hour)
			w.asked("patch rollouts.argoproj.io shop/r")
		}},
		"a conflict is decided on again": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3))
			w.start()
			first := true
			w.beforePatch(func(controllertest.Request) error {
				if first {
					first = false
					w.Put(deployment("shop/a", 4, ds+"downtime", "always"))
				}
				return nil
			})
			w.annotate("shop/a", ds+"downtime", "always")
			w.Sleep(time.Second)
			w.asked(patchA, patchA)
			w.is("shop/a", "0 (4)")
			w.metric(1, "writes_total", "kind", "Deployment", "direction", "down", "result", "conflict")
		}},
		"a 429 is retried after the time that the API server asks for": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3))
			w.start()
			refusals := 1
			w.beforePatch(func(controllertest.Request) error {
				if refusals--; refusals >= 0 {
					return apierrors.NewTooManyRequests("busy", 30)
				}
				return nil
			})
			w.annotate("shop/a", ds+"downtime", "always")
			w.Sleep(29 * time.Second)
			w.asked(patchA + " refused")
			w.Sleep(time.Second)
			w.asked(patchA)
		}},
		"a refusal is tried again seldom, and told once an hour": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.before = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					return apierrors.NewForbidden(deployments, "a", errors.New("by a policy"))
				}
				return nil
			}
			w.start()
			w.asked(patchA + " refused")
			w.Sleep(5*time.Minute + 10*time.Minute + 20*time.Minute + 40*time.Minute + time.Second)
			w.asked(patchA+" refused", patchA+" refused", patchA+" refused", patchA+" refused")
			w.Sleep(24 * time.Hour)
			if n := len(w.all()); n > 2*25 { // with the reads that compare the clocks
				w.Errorf("%d requests in a day", n)
			}
			if n := w.repeated("FailedToScale"); n < 20 || n > 26 {
				w.Errorf("told %d times in 25 hours", n)
			}
		}},
		"what the API server finds invalid is tried again seldom": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.before = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					return apierrors.NewInvalid(schema.GroupKind{Group: "apps", Kind: "Deployment"}, "a", nil)
				}
				return nil
			}
			w.start()
			w.asked(patchA + " refused")
			w.Sleep(5*time.Minute - time.Second)
			w.asked()
			w.toldOf("FailedToScale shop/a")
		}},
		"a workload that is deleted before the write is forgotten": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3))
			w.start()
			w.beforePatch(func(controllertest.Request) error {
				w.Delete(deployment("shop/a", 3))
				return nil
			})
			w.annotate("shop/a", ds+"downtime", "always")
			w.Sleep(time.Hour)
			w.asked(patchA)
			w.metric(0, "writes_total", "kind", "Deployment", "direction", "down", "result", "error")
		}},
		"nothing is written while the clocks differ": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3))
			w.start()
			w.SetClock(func(string) time.Time { return time.Now().Add(12 * time.Hour) })
			w.annotate("shop/a", ds+"downtime", "always")
			w.add(deployment("shop/b", 3, ds+"downtime", "always"))
			w.Sleep(3 * time.Minute)
			if n := len(w.all()); n > 8 {
				w.Errorf("%d requests", n)
			}
			w.is("shop/a", "3")
			if skew := w.Metric("quartermaster_scale_schedule_clock_skew_seconds"); skew > -43199 || skew < -43201 {
				w.Errorf("the skew is %v", skew)
			}
			w.SetClock(func(string) time.Time { return time.Now().Add(59 * time.Second) })
			w.Sleep(time.Minute)
			w.is("shop/a", "0 (3)")
		}},
		"the clocks are compared once a minute": {run: func(w *fixture) {
			for i := range 10 {
				w.add(deployment(fmt.Sprintf("shop/a%d", i), 3, ds+"downtime", in(time.Minute, 2*time.Minute)))
			}
			w.start()
			w.Sleep(time.Minute + 10*time.Second)
			reads := slices.DeleteFunc(w.all(), func(r string) bool { return !strings.HasPrefix(r, "get ") })
			if len(reads) < 1 || len(reads) > 2 { // there are two workers
				w.Errorf("%q", reads)
			}
		}},
		"a thousand workloads do not exceed the limit of writes": {configure: limited, run: func(w *fixture) {
			for i := range 1000 {
				w.add(deployment(fmt.Sprintf("shop%d/a%d", i%7, i), 3, ds+"downtime", in(time.Minute, 2*time.Hour)))
			}
			var times []time.Time
			w.before = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					times = append(times, time.Now())
				}
				return nil
			}
			w.start()
			due := time.Now().Truncate(time.Minute).Add(time.Minute)
			w.Sleep(2 * time.Minute)
			if len(times) != 1000 {
				w.Fatalf("%d writes", len(times))
			}
			if first, last := times[0].Sub(due), times[999].Sub(due); first > time.Second || last > time.Minute {
				w.Errorf("the first write after %v, the last after %v", first, last)
			}
			for i := 21; i < len(times); i++ {
				if times[i].Sub(times[i-21]) < time.Second {
					w.Fatalf("22 writes within %v", times[i].Sub(times[i-21]))
				}
			}
		}},
		"a dry run reports and writes nothing": {configure: func(c *scaleschedule.Config) { c.DryRun = true }, run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(time.Minute, 3*time.Hour)), deployment("shop/b", 0, R, "2"))
			w.start()
			w.toldOf("WouldScaleUp shop/b")
			w.Sleep(2 * time.Hour)
			w.toldOf("WouldScaleDown shop/a")
			w.scale("shop/a", 4)
			w.toldOf()
			// The original does what was told.
			w.edit("shop/a", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](0); d.Annotations[R] = "3" })
			w.Sleep(time.Hour)
			w.toldOf("WouldScaleUp shop/a")
			if all := w.all(); len(all) > 0 {
				w.Errorf("%q", all)
			}
			w.metric(1, "writes_total", "kind", "Deployment", "direction", "down", "result", "dry_run")
		}},
		"a new leader goes on": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(0, 2*time.Hour)), deployment("shop/b", 3, ds+"downtime", in(time.Hour, 2*time.Hour)))
			w.start()
			w.asked(patchA)
			w.Restart()
			w.is("shop/a", "0 (3)")
			w.Sleep(time.Hour)
			w.asked("patch deployments.apps shop/b")
			w.Sleep(time.Hour)
			w.is("shop/a", "3")
			w.is("shop/b", "3")
		}},
		"a boundary passes while nobody leads": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(time.Hour, 5*time.Hour)), deployment("shop/b", 3, ds+"downtime", in(0, 2*time.Hour)))
			w.start()
			w.Restart(func() { <-time.After(3 * time.Hour) })
			w.is("shop/a", "0 (3)")
			w.is("shop/b", "3")
		}},
		"a workload is deleted, and created anew": {run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", in(time.Hour, 5*time.Hour)))
			w.start()
			w.Delete(deployment("shop/a", 3))
			w.add(deployment("shop/a", 7))
			w.Sleep(2 * time.Hour)
			w.asked()
			w.is("shop/a", "7")
		}},
		"a workload that is being deleted is left alone": {run: func(w *fixture) {
			d := deployment("shop/a", 3, ds+"downtime", "always")
			d.Finalizers = []string{"example.com/x"}
			d.DeletionTimestamp = ptr.To(d.CreationTimestamp)
			w.add(d)
			w.start()
			w.asked()
		}},
		"a workload in a protected namespace is left alone": {run: func(w *fixture) {
			w.add(deployment("kube-system/a", 3, ds+"downtime", "always"))
			w.start()
			w.Sleep(time.Hour)
			w.asked()
		}},
		"a workload in an allowed protected namespace is scaled": {configure: func(c *scaleschedule.Config) { c.AllowProtected = []string{"in:kube-system"} }, run: func(w *fixture) {
			w.add(deployment("kube-system/a", 3, ds+"downtime", "always"))
			w.start()
			w.asked("patch deployments.apps kube-system/a")
		}},
		"a workload that the selector leaves out": {configure: func(c *scaleschedule.Config) { c.Selector = "app=a" }, run: func(w *fixture) {
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.start()
			w.asked()
			w.edit("shop/a", func(d *appsv1.Deployment) { d.Labels = map[string]string{"app": "a"} })
			w.asked(patchA)
		}},
		"without an original in --compat": {run: func(w *fixture) {
			w.flags = nil
			w.add(deployment("shop/a", 3, ds+"downtime", "always"), deployment("shop/b", 3, "quartermaster.dev/scale-downtime", "always"))
			w.start()
			w.asked("patch deployments.apps shop/b")
		}},
		"with --namespaces, annotations of Namespaces do not count": {run: func(w *fixture) {
			w.flags = append(w.flags, "--namespaces=shop")
			w.add(namespace("shop", ds+"downtime", "always"), deployment("shop/a", 3), deployment("shop/b", 3, ds+"downtime", "always"))
			w.start()
			w.asked("patch deployments.apps shop/b")
		}},
		"the manager's own dry run": {run: func(w *fixture) {
			w.flags = append(w.flags, "--dry-run")
			w.add(deployment("shop/a", 3, ds+"downtime", "always"))
			w.start()
			w.is("shop/a", "3")
			w.asked()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test.run(newFixture(t, test.configure)) })
		})
	}
}
