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

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

// withWriteLimit sets the default limit of writes.
func withWriteLimit(c *scaleschedule.Config) {
	c.MaxWritesPerSecond = scaleschedule.NewConfig().MaxWritesPerSecond
}

// TestReconcileFollowsTheSchedule has what is about more than one decision. Package policy has the rest.
func TestReconcileFollowsTheSchedule(t *testing.T) {
	deployments := schema.GroupResource{Group: "apps", Resource: "deployments"}
	for name, tc := range map[string]struct {
		configure func(*scaleschedule.Config)
		run       func(f *fixture)
	}{
		"a workload goes down and up without a request in between": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(time.Minute, 3*time.Hour)))
			f.start()
			f.Sleep(time.Minute - time.Second)
			f.expectWrites()
			f.Sleep(time.Second)
			f.expectWrites(patchA)
			f.expectReplicas("shop/a", "0 (3)")
			f.expectEvents("ScaledDown shop/a")
			f.expectMetric(1, "down_objects", "kind", "Deployment")
			f.expectMetric(1, "lag_seconds")
			f.Sleep(2 * time.Hour)
			if requests := f.takeRequests(); len(requests) > 0 {
				f.Errorf("requests while nothing is due: %q", requests)
			}
			f.Sleep(time.Hour - time.Minute - 10*time.Second)
			f.expectWrites()
			f.Sleep(11 * time.Second)
			f.expectWrites(patchA)
			f.expectReplicas("shop/a", "3")
			f.expectEvents("ScaledUp shop/a")
			f.expectMetric(0, "down_objects", "kind", "Deployment")
			f.expectMetric(1, "writes_total", "kind", "Deployment", "direction", "up", "result", "success")
			f.expectMetric(2, "lag_seconds")
		}},
		"a change of a Namespace wakes its own workloads only": {run: func(f *fixture) {
			f.add(namespace("shop"), namespace("other"), deployment("shop/a", 3), deployment("shop/b", 2), deployment("other/a", 1),
				deployment("shop/c", 1, ds+"uptime", "always"))
			f.start()
			f.expectWrites()
			before := f.Controller(scaleschedule.Name).Status().Reconciles
			f.add(namespace("shop", ds+"downtime", "always"))
			got := f.takeRequests()
			slices.Sort(got)
			if want := []string{patchA, "patch deployments.apps shop/b"}; !slices.Equal(got[len(got)-2:], want) {
				f.Errorf("%q, want %q", got, want)
			}
			// The Namespace, its three workloads, and the two that were written again.
			if n := f.Controller(scaleschedule.Name).Status().Reconciles - before; n > 6 {
				f.Errorf("%d reconciles", n)
			}
			f.expectReplicas("other/a", "1")
			before = f.Controller(scaleschedule.Name).Status().Reconciles
			n := namespace("shop", ds+"downtime", "always")
			n.Labels = map[string]string{"a": "b"}
			f.add(n)
			if after := f.Controller(scaleschedule.Name).Status().Reconciles; after != before {
				f.Errorf("a label of a Namespace made %d reconciles", after-before)
			}
		}},
		"a workload goes down when its grace period ends": {run: func(f *fixture) {
			d := deployment("shop/a", 3, ds+"downtime", "always")
			d.CreationTimestamp.Time = time.Now().Add(-time.Minute)
			f.add(d)
			f.start()
			f.Sleep(14*time.Minute - time.Second)
			f.expectWrites()
			f.Sleep(time.Second)
			f.expectWrites(patchA)
		}},
		"a workload comes up when its schedule is removed": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectReplicas("shop/a", "0 (3)")
			f.annotate("shop/a", ds+"downtime", "")
			f.expectWrites(patchA, patchA)
			f.expectReplicas("shop/a", "3")
		}},
		"a workload that a person raises is left alone for the hold": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectWrites(patchA)
			f.scale("shop/a", 2)
			f.Sleep(15*time.Minute - time.Second)
			f.expectWrites()
			f.expectReplicas("shop/a", "2 (3)")
			f.Sleep(time.Second)
			f.expectWrites(patchA)
			f.expectReplicas("shop/a", "0 (3)")
			f.scale("shop/a", 1)
			f.Sleep(time.Minute)
			f.scale("shop/a", 0)
			f.Sleep(time.Hour)
			f.expectWrites()
			f.expectReplicas("shop/a", "0 (3)")
			f.scale("shop/a", 2)
			f.Sleep(15*time.Minute - time.Second)
			f.expectWrites()
		}},
		"a workload that GitOps raises each time is contested after three times": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, 5*time.Hour)))
			f.start()
			for _, want := range []string{"5 (3)", "5 (5)", "5 (5)"} {
				f.scale("shop/a", 5)
				f.Sleep(15*time.Minute - time.Second)
				f.expectReplicas("shop/a", want)
				f.Sleep(time.Second)
			}
			f.scale("shop/a", 5)
			f.Sleep(2 * time.Hour)
			f.expectReplicas("shop/a", "5 (5)")
			if got := f.takeRecords(); !slices.Equal(got, []string{"3", "5", "5", "5"}) {
				f.Errorf("the records are %q", got)
			}
			f.expectWrites(patchA, patchA, patchA, patchA)
			f.expectEvents("ScaleContested shop/a", "ScaledDown shop/a", "ScaledDown shop/a") // three of them have the same text
			f.expectMetric(1, "contested_objects")
			f.Sleep(3 * time.Hour)
			f.expectReplicas("shop/a", "5")
			f.expectMetric(0, "contested_objects")
		}},
		"a raised workload keeps its number when it comes up": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, time.Minute)))
			f.start()
			f.scale("shop/a", 4)
			f.Sleep(time.Minute)
			f.expectWrites(patchA, patchA)
			f.expectReplicas("shop/a", "4")
			f.expectEvents("ScaledDown shop/a")
		}},
		"a record that somebody removes is put back once": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, 3*time.Hour)))
			f.start()
			f.annotate("shop/a", recordKey, "")
			f.expectWrites(patchA, patchA)
			f.expectReplicas("shop/a", "0 (3)")
			f.annotate("shop/a", recordKey, "")
			f.Sleep(time.Hour)
			f.expectWrites()
			f.expectReplicas("shop/a", "0")
		}},
		"a record is put back once in each downtime": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, time.Hour)+","+span(2*time.Hour, 3*time.Hour)))
			f.start()
			f.annotate("shop/a", recordKey, "")
			f.Sleep(time.Hour)
			f.expectReplicas("shop/a", "3")
			f.Sleep(time.Hour)
			f.annotate("shop/a", recordKey, "")
			f.expectReplicas("shop/a", "0 (3)")
		}},
		"a record that is removed with the replicas is not put back": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"))
			f.start()
			f.editDeployment("shop/a", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](0); delete(d.Annotations, recordKey) })
			f.expectWrites(patchA)
		}},
		"an invalid schedule concerns its own object": {run: func(f *fixture) {
			f.add(namespace("shop"), namespace("bad", ds+"downtime", "8-18 PST"), deployment("bad/a", 1), deployment("bad/b", 1),
				deployment("bad/c", 1, ds+"downtime", "always"), deployment("shop/a", 3, ds+"downtime", "always"),
				deployment("shop/local", 1, ds+"downtime", "Mon-Fri 8-18 Local"), deployment("shop/long", 1, ds+"downtime", strings.Repeat("x", 3000)))
			f.start()
			got := f.takeRequests()
			slices.Sort(got)
			if want := []string{"patch deployments.apps bad/c", patchA}; !slices.Equal(got[len(got)-2:], want) || len(got) > 4 {
				f.Errorf("%q, want %q", got, want)
			}
			f.expectEvents("InvalidSchedule bad", "InvalidSchedule shop/local", "InvalidSchedule shop/long", "ScaledDown bad/c", "ScaledDown shop/a")
			f.expectMetric(3, "invalid_annotations_total", "key", "downtime")
			f.scale("shop/local", 2)
			f.Sleep(24 * time.Hour)
			f.expectEvents()
			f.annotate("shop/local", ds+"downtime", "always")
			f.expectReplicas("shop/local", "0 (2)")
		}},
		"a workload that comes before its Namespace": {run: func(f *fixture) {
			f.start()
			f.add(deployment("shop/a", 0, recordKey, "3"))
			f.expectWrites()
			f.add(namespace("shop", ds+"downtime", span(0, time.Hour)))
			f.expectWrites()
			f.Sleep(time.Hour)
			f.expectWrites(patchA)
		}},
		"a CronJob is suspended and resumed": {run: func(f *fixture) {
			job := &batchv1.CronJob{ObjectMeta: objectMeta("shop/a", ds+"downtime", span(0, time.Hour))}
			f.add(job, &batchv1.CronJob{ObjectMeta: objectMeta("shop/b", ds+"downtime", span(0, time.Hour)), Spec: batchv1.CronJobSpec{Suspend: ptr.To(true)}})
			f.start()
			f.expectWrites("patch cronjobs.batch shop/a")
			if got := controllertest.Get[batchv1.CronJob](f.Host, "shop", "a"); !*got.Spec.Suspend || got.Annotations[recordKey] != "1" {
				f.Errorf("%v", got)
			}
			f.Sleep(time.Hour)
			f.expectWrites("patch cronjobs.batch shop/a")
			if got := controllertest.Get[batchv1.CronJob](f.Host, "shop", "a"); *got.Spec.Suspend || len(got.Annotations) != 1 {
				f.Errorf("%v", got)
			}
		}},
		"a HorizontalPodAutoscaler is lowered and restored": {configure: withKind("horizontalpodautoscalers"), run: func(f *fixture) {
			f.add(autoscaler("shop/h", "Deployment", "a", ds+"downtime", span(0, time.Hour), ds+"downtime-replicas", "1"))
			f.start()
			f.expectWrites("patch horizontalpodautoscalers.autoscaling shop/h")
			h := controllertest.Get[autoscalingv2.HorizontalPodAutoscaler](f.Host, "shop", "h")
			if *h.Spec.MinReplicas != 1 || h.Annotations[recordKey] != "4" {
				f.Errorf("%v", h)
			}
			h.Spec.MaxReplicas = 2
			f.add(h)
			f.Sleep(time.Hour)
			f.expectWrites("patch horizontalpodautoscalers.autoscaling shop/h")
			if h := controllertest.Get[autoscalingv2.HorizontalPodAutoscaler](f.Host, "shop", "h"); *h.Spec.MinReplicas != 2 {
				f.Errorf("%v", h)
			}
		}},
		"a Deployment with a HorizontalPodAutoscaler is left alone": {run: func(f *fixture) {
			f.add(autoscaler("shop/h", "Deployment", "a"), autoscaler("shop/i", "Deployment", "b"), deployment("shop/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"),
				deployment("shop/b", 3, ds+"downtime", "always"), deployment("other/a", 3, ds+"downtime", "always", ds+"downtime-replicas", "1"))
			f.start()
			f.expectReplicas("shop/a", "3")
			f.expectReplicas("shop/b", "0 (3)")
			f.expectReplicas("other/a", "1 (3)")
			f.expectEvents("ScaledByOther shop/a", "ScaledDown other/a", "ScaledDown shop/b")
			f.Delete(autoscaler("shop/h", "Deployment", "a"))
			f.Settle()
			f.expectReplicas("shop/a", "1 (3)")
		}},
		"a ScaledObject is paused in place of its Deployment": {configure: withKind("scaledobjects.keda.sh"), run: func(f *fixture) {
			f.add(definition("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"), namespace("shop", ds+"downtime", span(0, time.Hour)), scaledObject("shop/s", "a"),
				autoscaler("shop/keda-hpa-s", "Deployment", "a"), deployment("shop/a", 3), deployment("shop/b", 2))
			f.start()
			f.expectReplicas("shop/a", "3")
			f.expectReplicas("shop/b", "0 (2)")
			if got := f.scaledObject().GetAnnotations(); got["autoscaling.keda.sh/paused-replicas"] != "0" || got[recordKey] != "-1" {
				f.Errorf("%v", got)
			}
			f.Sleep(time.Hour)
			if got := f.scaledObject().GetAnnotations(); len(got) > 0 {
				f.Errorf("%v", got)
			}
			f.expectEvents("ScaledDown shop/b", "ScaledDown shop/s", "ScaledUp shop/b", "ScaledUp shop/s")
		}},
		"a manager works where KEDA is not installed": {configure: withKind("scaledobjects.keda.sh"), run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectReplicas("shop/a", "0 (3)")
		}},
		"a Rollout": {configure: withKind("rollouts.argoproj.io"), run: func(f *fixture) {
			f.add(definition("argoproj.io", "v1alpha1", "Rollout", "rollouts"), rollout("shop/r", ds+"downtime", span(0, time.Hour)))
			f.start()
			f.expectWrites("patch rollouts.argoproj.io shop/r")
			f.Sleep(time.Hour)
			f.expectWrites("patch rollouts.argoproj.io shop/r")
		}},
		"a conflict is decided on again": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3))
			f.start()
			first := true
			f.beforePatch(func(controllertest.Request) error {
				if first {
					first = false
					f.Put(deployment("shop/a", 4, ds+"downtime", "always"))
				}
				return nil
			})
			f.annotate("shop/a", ds+"downtime", "always")
			f.Sleep(time.Second)
			f.expectWrites(patchA, patchA)
			f.expectReplicas("shop/a", "0 (4)")
			f.expectMetric(1, "writes_total", "kind", "Deployment", "direction", "down", "result", "conflict")
		}},
		"a 429 is retried after the time that the API server asks for": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3))
			f.start()
			refusals := 1
			f.beforePatch(func(controllertest.Request) error {
				if refusals--; refusals >= 0 {
					return apierrors.NewTooManyRequests("busy", 30)
				}
				return nil
			})
			f.annotate("shop/a", ds+"downtime", "always")
			f.Sleep(29 * time.Second)
			f.expectWrites(patchA + " refused")
			f.Sleep(time.Second)
			f.expectWrites(patchA)
		}},
		"a refusal is tried again seldom, and told once an hour": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.requestHook = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					return apierrors.NewForbidden(deployments, "a", errors.New("by a policy"))
				}
				return nil
			}
			f.start()
			f.expectWrites(patchA + " refused")
			f.Sleep(5*time.Minute + 10*time.Minute + 20*time.Minute + 40*time.Minute + time.Second)
			f.expectWrites(patchA+" refused", patchA+" refused", patchA+" refused", patchA+" refused")
			f.Sleep(24 * time.Hour)
			if n := len(f.takeRequests()); n > 2*25 { // with the reads that compare the clocks
				f.Errorf("%d requests in a day", n)
			}
			if n := f.countEvents("FailedToScale"); n < 20 || n > 26 {
				f.Errorf("told %d times in 25 hours", n)
			}
		}},
		"what the API server finds invalid is tried again seldom": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.requestHook = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					return apierrors.NewInvalid(schema.GroupKind{Group: "apps", Kind: "Deployment"}, "a", nil)
				}
				return nil
			}
			f.start()
			f.expectWrites(patchA + " refused")
			f.Sleep(5*time.Minute - time.Second)
			f.expectWrites()
			f.expectEvents("FailedToScale shop/a")
		}},
		"a workload that is deleted before the write is forgotten": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3))
			f.start()
			f.beforePatch(func(controllertest.Request) error {
				f.Delete(deployment("shop/a", 3))
				return nil
			})
			f.annotate("shop/a", ds+"downtime", "always")
			f.Sleep(time.Hour)
			f.expectWrites(patchA)
			f.expectMetric(0, "writes_total", "kind", "Deployment", "direction", "down", "result", "error")
		}},
		"nothing is written while the clocks differ": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3))
			f.start()
			f.SetClock(func(string) time.Time { return time.Now().Add(12 * time.Hour) })
			f.annotate("shop/a", ds+"downtime", "always")
			f.add(deployment("shop/b", 3, ds+"downtime", "always"))
			f.Sleep(3 * time.Minute)
			if n := len(f.takeRequests()); n > 8 {
				f.Errorf("%d requests", n)
			}
			f.expectReplicas("shop/a", "3")
			if skew := f.Metric("quartermaster_scale_schedule_clock_skew_seconds"); skew > -43199 || skew < -43201 {
				f.Errorf("the skew is %v", skew)
			}
			f.SetClock(func(string) time.Time { return time.Now().Add(59 * time.Second) })
			f.Sleep(time.Minute)
			f.expectReplicas("shop/a", "0 (3)")
		}},
		"the clocks are compared once a minute": {run: func(f *fixture) {
			for i := range 10 {
				f.add(deployment(fmt.Sprintf("shop/a%d", i), 3, ds+"downtime", span(time.Minute, 2*time.Minute)))
			}
			f.start()
			f.Sleep(time.Minute + 10*time.Second)
			reads := slices.DeleteFunc(f.takeRequests(), func(r string) bool { return !strings.HasPrefix(r, "get ") })
			if len(reads) < 1 || len(reads) > 2 { // there are two workers
				f.Errorf("%q", reads)
			}
		}},
		"a thousand workloads do not exceed the limit of writes": {configure: withWriteLimit, run: func(f *fixture) {
			for i := range 1000 {
				f.add(deployment(fmt.Sprintf("shop%d/a%d", i%7, i), 3, ds+"downtime", span(time.Minute, 2*time.Hour)))
			}
			var times []time.Time
			f.requestHook = func(r controllertest.Request) error {
				if r.Verb == "patch" {
					times = append(times, time.Now())
				}
				return nil
			}
			f.start()
			due := time.Now().Truncate(time.Minute).Add(time.Minute)
			f.Sleep(2 * time.Minute)
			if len(times) != 1000 {
				f.Fatalf("%d writes", len(times))
			}
			if first, last := times[0].Sub(due), times[999].Sub(due); first > time.Second || last > time.Minute {
				f.Errorf("the first write after %v, the last after %v", first, last)
			}
			for i := 21; i < len(times); i++ {
				if times[i].Sub(times[i-21]) < time.Second {
					f.Fatalf("22 writes within %v", times[i].Sub(times[i-21]))
				}
			}
		}},
		"a dry run reports and writes nothing": {configure: func(c *scaleschedule.Config) { c.DryRun = true }, run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(time.Minute, 3*time.Hour)), deployment("shop/b", 0, recordKey, "2"))
			f.start()
			f.expectEvents("WouldScaleUp shop/b")
			f.Sleep(2 * time.Hour)
			f.expectEvents("WouldScaleDown shop/a")
			f.scale("shop/a", 4)
			f.expectEvents()
			// The original does what was told.
			f.editDeployment("shop/a", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr.To[int32](0); d.Annotations[recordKey] = "3" })
			f.Sleep(time.Hour)
			f.expectEvents("WouldScaleUp shop/a")
			if requests := f.takeRequests(); len(requests) > 0 {
				f.Errorf("%q", requests)
			}
			f.expectMetric(1, "writes_total", "kind", "Deployment", "direction", "down", "result", "dry_run")
		}},
		"a new leader goes on": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, 2*time.Hour)), deployment("shop/b", 3, ds+"downtime", span(time.Hour, 2*time.Hour)))
			f.start()
			f.expectWrites(patchA)
			f.Restart()
			f.expectReplicas("shop/a", "0 (3)")
			f.Sleep(time.Hour)
			f.expectWrites("patch deployments.apps shop/b")
			f.Sleep(time.Hour)
			f.expectReplicas("shop/a", "3")
			f.expectReplicas("shop/b", "3")
		}},
		"a boundary passes while nobody leads": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(time.Hour, 5*time.Hour)), deployment("shop/b", 3, ds+"downtime", span(0, 2*time.Hour)))
			f.start()
			f.Restart(func() { <-time.After(3 * time.Hour) })
			f.expectReplicas("shop/a", "0 (3)")
			f.expectReplicas("shop/b", "3")
		}},
		"a workload is deleted, and created anew": {run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(time.Hour, 5*time.Hour)))
			f.start()
			f.Delete(deployment("shop/a", 3))
			f.add(deployment("shop/a", 7))
			f.Sleep(2 * time.Hour)
			f.expectWrites()
			f.expectReplicas("shop/a", "7")
		}},
		"a workload that is being deleted is left alone": {run: func(f *fixture) {
			d := deployment("shop/a", 3, ds+"downtime", "always")
			d.Finalizers = []string{"example.com/x"}
			d.DeletionTimestamp = ptr.To(d.CreationTimestamp)
			f.add(d)
			f.start()
			f.expectWrites()
		}},
		"a workload in a protected namespace is left alone": {run: func(f *fixture) {
			f.add(deployment("kube-system/a", 3, ds+"downtime", "always"))
			f.start()
			f.Sleep(time.Hour)
			f.expectWrites()
		}},
		"a workload in an allowed protected namespace is scaled": {configure: func(c *scaleschedule.Config) { c.AllowProtected = []string{"in:kube-system"} }, run: func(f *fixture) {
			f.add(deployment("kube-system/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectWrites("patch deployments.apps kube-system/a")
		}},
		"a workload that the selector leaves out": {configure: func(c *scaleschedule.Config) { c.Selector = "app=a" }, run: func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectWrites()
			f.editDeployment("shop/a", func(d *appsv1.Deployment) { d.Labels = map[string]string{"app": "a"} })
			f.expectWrites(patchA)
		}},
		"without an original in --compat": {run: func(f *fixture) {
			f.flags = nil
			f.add(deployment("shop/a", 3, ds+"downtime", "always"), deployment("shop/b", 3, "quartermaster.dev/scale-downtime", "always"))
			f.start()
			f.expectWrites("patch deployments.apps shop/b")
		}},
		"with --namespaces, annotations of Namespaces do not count": {run: func(f *fixture) {
			f.flags = append(f.flags, "--namespaces=shop")
			f.add(namespace("shop", ds+"downtime", "always"), deployment("shop/a", 3), deployment("shop/b", 3, ds+"downtime", "always"))
			f.start()
			f.expectWrites("patch deployments.apps shop/b")
		}},
		"the manager's own dry run": {run: func(f *fixture) {
			f.flags = append(f.flags, "--dry-run")
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectReplicas("shop/a", "3")
			f.expectWrites()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { tc.run(newFixture(t, tc.configure)) })
		})
	}
}

// TestLongYearKeepsItsSchedule runs the manager for a year on fake time, and compares when each workload was
// scaled with what clocks on the wall show.
func TestLongYearKeepsItsSchedule(t *testing.T) {
	zones := []string{"Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"}
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *scaleschedule.Config) { c.Weekdays, c.Kinds = "Mon-Fri", []string{"deployments"} })
		// More renewals of the Lease, and watches of other kinds, would be most of the requests of a year.
		f.flags = append(f.flags, "--leader-elect-lease-duration=10m", "--leader-elect-renew-deadline=8m", "--leader-elect-retry-period=4m")
		got := map[string][]string{}
		for _, zone := range zones {
			f.add(deployment("shop/"+strings.ToLower(zone[len(zone)-4:]), 3, ds+"uptime", "01:45-20:30 "+zone))
		}
		f.requestHook = func(r controllertest.Request) error {
			if r.Verb == "patch" {
				direction := " up"
				if strings.Contains(string(r.Body), `"replicas":0`) {
					direction = " down"
				}
				got[r.Name] = append(got[r.Name], time.Now().UTC().Format("2006-01-02T15:04")+direction)
			}
			return nil
		}
		f.start()
		begin := time.Now()
		for range 366 {
			f.Sleep(24 * time.Hour)
		}
		for _, name := range zones {
			zone, err := time.LoadLocation(name)
			assert.NoError(t, err)
			var want []string
			up := true // as it was before
			day, reached := 0, [2]bool{}
			for at := begin.Add(-48 * time.Hour).Truncate(time.Minute); at.Before(time.Now()); at = at.Add(time.Minute) {
				wall := at.In(zone)
				if wall.YearDay() != day {
					day, reached = wall.YearDay(), [2]bool{}
				}
				minute := wall.Hour()*60 + wall.Minute()
				reached[0], reached[1] = reached[0] || minute >= 105, reached[1] || minute >= 20*60+30
				now := reached[0] && !reached[1] && wall.Weekday()%6 != 0
				if at.Add(time.Minute).After(begin) && now != up {
					up = now
					want = append(want, at.UTC().Format("2006-01-02T15:04")+map[bool]string{true: " up", false: " down"}[up])
				}
			}
			if scaled := got[strings.ToLower(name[len(name)-4:])]; !slices.Equal(scaled, want) || len(want) < 500 {
				t.Errorf("%s: scaled %d times, want %d; the first are %q, %q", name, len(scaled), len(want), scaled[:min(3, len(scaled))], want[:min(3, len(want))])
			}
		}
	})
}
