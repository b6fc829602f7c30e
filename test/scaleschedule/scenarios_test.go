// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// downtimeIn returns a downtime that begins in d, and does not end.
func downtimeIn(d time.Duration) string {
	return "from " + time.Now().Add(d).UTC().Format(time.RFC3339Nano)
}

// TestWorkloadGoesDownAndUp scales a Deployment and a CronJob at a boundary, and back when the annotation
// goes.
func TestWorkloadGoesDownAndUp(t *testing.T) {
	f := newFixture(t, fleet.Patience)
	f.deploy("a", nil)
	jobs := shared.Admin.BatchV1().CronJobs(f.namespace)
	_, err := jobs.Create(f.ctx, &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Name: "j"}, Spec: batchv1.CronJobSpec{Schedule: "0 0 1 1 *",
		JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever,
			Containers: []corev1.Container{{Name: "c", Image: "i"}}}}}}}}, metav1.CreateOptions{})
	assert.NoError(t, err)
	shared.RunLeader(f.ctx, t, args()...)
	suspended := func(want bool, recorded string) func() error {
		return func() error {
			j, err := jobs.Get(f.ctx, "j", metav1.GetOptions{})
			if err == nil && (*j.Spec.Suspend != want || j.Annotations[record] != recorded) {
				err = fmt.Errorf("suspended: %t, record: %q", *j.Spec.Suspend, j.Annotations[record])
			}
			return err
		}
	}
	f.annotate(prefix+"downtime", downtimeIn(2*time.Second))
	f.waitForState("0 (3)", 1)
	fleet.Eventually(f.ctx, t, suspended(true, "1"))
	f.waitForEvent("a", "ScaledDown")
	f.annotate(prefix+"downtime", "")
	f.waitForState("3", 1)
	fleet.Eventually(f.ctx, t, suspended(false, ""))
	f.waitForEvent("a", "ScaledUp")
}

// TestAutoscalerTakesThePatch is what the real type makes of the patch, and of an index by its target.
func TestAutoscalerTakesThePatch(t *testing.T) {
	f := newFixture(t, fleet.Patience)
	f.deploy("a", map[string]string{prefix + "downtime": "always", prefix + "downtime-replicas": "1"})
	f.deploy("b", map[string]string{prefix + "downtime": "always", prefix + "downtime-replicas": "1"})
	_, err := shared.Admin.AutoscalingV2().HorizontalPodAutoscalers(f.namespace).Create(f.ctx, &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Name: "h"},
		Spec:       autoscalingv2.HorizontalPodAutoscalerSpec{MaxReplicas: 5, ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "a"}},
	}, metav1.CreateOptions{})
	assert.NoError(t, err)
	shared.RunLeader(f.ctx, t, args()...)
	f.waitForState("1 (3)", 1)
	f.waitForEvent("a", "ScaledByOther")
	if states := f.states(); states["3"] != 1 {
		t.Errorf("%v", states)
	}
}

// TestConflictIsDecidedAgain changes a workload between the decision and the write, again and again.
func TestConflictIsDecidedAgain(t *testing.T) {
	f := newFixture(t, fleet.Patience)
	for i := range 20 {
		f.deploy(fmt.Sprintf("a%d", i), nil)
	}
	shared.RunLeader(f.ctx, t, args("--scale-schedule-max-writes-per-second=0")...)
	f.annotate(prefix+"downtime", downtimeIn(time.Second))
	writing, stop := context.WithTimeout(f.ctx, 4*time.Second)
	defer stop()
	deployments := shared.Admin.AppsV1().Deployments(f.namespace)
	for n := 0; writing.Err() == nil; n++ {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{"n":"%d"}}}`, n)
		_, _ = deployments.Patch(writing, fmt.Sprintf("a%d", n%20), types.MergePatchType, patch, metav1.PatchOptions{})
	}
	f.waitForState("0 (3)", 20)
	f.expectOneWriteEach(f.begin, 20, 0, `"downscaler/original-replicas":"3"`)
}

// TestLongLeaderIsKilledAtTheBoundary kills the leader while it scales 500 Deployments down and up. Each
// is scaled once, and comes back with the replicas that it had.
func TestLongLeaderIsKilledAtTheBoundary(t *testing.T) {
	const workloads, workers = 500, 2
	kills := fleet.Setting(t, "SCALE_KILLS", 20)
	f := newFixture(t, time.Duration(kills+3)*time.Minute)
	f.deployAll(workloads)
	// With longer timings, a busy machine ends no leader. A standby sees at once that one was killed.
	flags := args("--scale-schedule-max-writes-per-second=0")
	leader := shared.RunLeader(f.ctx, t, flags...)
	standby := shared.RunStandby(f.ctx, t, flags...)
	for kill := range kills {
		want, part, begin := "0 (3)", `"downscaler/original-replicas":"3"`, time.Now()
		if kill%2 == 0 {
			f.annotate(prefix+"downtime", downtimeIn(time.Second))
		} else {
			want, part = "3", `"replicas":3`
			f.annotate(prefix+"downtime", "until "+time.Now().Add(time.Second).UTC().Format(time.RFC3339Nano))
		}
		f.waitForState(want, 50+20*kill)
		leader.Kill()
		if left := workloads - f.states()[want]; left == 0 {
			t.Logf("kill %d came too late", kill)
		} else {
			t.Logf("kill %d left %d of %d", kill, left, workloads)
		}
		shared.WaitForLeader(f.ctx, t, standby)
		f.waitForState(want, workloads)
		leader, standby = standby, shared.RunStandby(f.ctx, t, flags...)
		f.expectOneWriteEach(begin, workloads, workers, part)
	}
}

// TestLongFiveHundredAtOnceAreScaledOnce logs how long 500 Deployments take at the limit of the default, and
// how long requests of somebody else take before and meanwhile.
func TestLongFiveHundredAtOnceAreScaledOnce(t *testing.T) {
	const workloads = 500
	f := newFixture(t, 5*time.Minute)
	f.deployAll(workloads)
	shared.RunReleased(f.ctx, t, args()...)
	other := newFixture(t, 5*time.Minute)
	other.deploy("somebody-elses", nil)
	deployments := shared.Admin.AppsV1().Deployments(other.namespace)
	probing, stop := context.WithCancel(f.ctx)
	type probe struct {
		at   time.Time
		took time.Duration
	}
	result := make(chan []probe)
	go func() {
		var probes []probe
		for n := 0; probing.Err() == nil; n++ {
			begin := time.Now()
			_, err := deployments.Patch(probing, "somebody-elses", types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{"n":"%d"}}}`, n), metav1.PatchOptions{})
			if err == nil {
				probes = append(probes, probe{begin, time.Since(begin)})
			}
			fleet.Wait(probing, 50*time.Millisecond)
		}
		result <- probes
	}()
	due := time.Now().Add(20 * time.Second)
	f.annotate(prefix+"downtime", "from "+due.UTC().Format(time.RFC3339Nano))
	fleet.Wait(f.ctx, time.Until(due.Add(25*time.Second))) // to list all of them would be a load of its own
	f.waitForState("0 (3)", workloads)
	stop()
	probes := <-result
	var first, last time.Time
	for _, e := range shared.AuditSince(t, due.Add(-time.Second), func(e auditv1.Event) bool {
		return fleet.IsControllerWrite(e, cluster.AuditPod(e)) && e.ObjectRef.Namespace == f.namespace
	}) {
		if first.IsZero() || e.StageTimestamp.Time.Before(first) {
			first = e.StageTimestamp.Time
		}
		if e.StageTimestamp.After(last) {
			last = e.StageTimestamp.Time
		}
	}
	if first.Before(due) {
		t.Errorf("the first write %v before the boundary", due.Sub(first))
	}
	t.Logf("the first write %v after the boundary, the last %v", first.Sub(due), last.Sub(due))
	median := func(begin, end time.Time) time.Duration {
		var took []time.Duration
		for _, p := range probes {
			if p.at.After(begin) && p.at.Before(end) {
				took = append(took, p.took)
			}
		}
		slices.Sort(took)
		if len(took) < 20 {
			t.Fatalf("%d probes", len(took))
		}
		return took[len(took)/2]
	}
	t.Logf("the median of another user's PATCH is %v before and %v meanwhile", median(due.Add(-15*time.Second), due), median(due, last))
	f.expectOneWriteEach(due.Add(-time.Second), workloads, 0, `"downscaler/original-replicas":"3"`)
}

// TestLongIdleLeaderSendsNoRequests counts the requests of a leader with 500 Deployments in 50 Namespaces
// while nothing is due, beyond its Lease and watches.
func TestLongIdleLeaderSendsNoRequests(t *testing.T) {
	idle := time.Duration(fleet.Setting(t, "SCALE_IDLE_MINUTES", 5)) * time.Minute
	f := newFixture(t, idle+10*time.Minute)
	for range 50 {
		other := *f
		other.namespace = shared.NewNamespace(f.ctx, t, nil)
		other.annotate(prefix+"uptime", "Mon-Sun 00:00-24:00 Europe/Berlin")
		other.deployAll(10)
	}
	m := shared.RunReleased(f.ctx, t, args()...)
	fleet.Wait(f.ctx, 10*time.Second)
	begin := time.Now()
	fleet.Wait(f.ctx, idle)
	requests := map[string]int{}
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == m.Pod && e.ObjectRef != nil }) {
		if e.Verb != "watch" && e.ObjectRef.Resource != "leases" {
			requests[strings.TrimSpace(e.Verb+" "+e.ObjectRef.Resource+" "+e.ObjectRef.Name)]++
		}
	}
	t.Logf("in %v: %v", time.Since(begin).Round(time.Second), requests)
	for request, n := range requests {
		for _, resource := range []string{"deployments", "statefulsets", "cronjobs", "horizontalpodautoscalers", "namespaces "} {
			if strings.Contains(request, resource) && !strings.HasSuffix(request, "-leader") {
				t.Errorf("%d times %s", n, request)
			}
		}
	}
}

// TestLongGrowthByDeploymentsIsLogged logs the resident memory of a leader in an empty cluster and with 5,000
// Deployments that have a schedule, in 50 Namespaces.
func TestLongGrowthByDeploymentsIsLogged(t *testing.T) {
	f := newFixture(t, 20*time.Minute)
	measure := func() fleet.Memory {
		t.Helper()
		return fleet.MedianMemory(t, func() fleet.Memory {
			m := shared.RunReleased(f.ctx, t, args()...)
			fleet.Wait(f.ctx, time.Duration(fleet.Setting(t, "SCALE_SETTLE", 150))*time.Second) // Go collects garbage every 2 minutes
			memory := shared.MemoryOf(f.ctx, t, m)
			if err := m.Stop(f.ctx, fleet.Patience); err != nil {
				t.Error(err)
			}
			return memory
		})
	}
	empty := measure()
	for range 50 {
		other := *f
		other.namespace = shared.NewNamespace(f.ctx, t, nil)
		other.annotate(prefix+"uptime", "Mon-Sun 00:00-24:00 Europe/Berlin")
		other.deployAll(100)
	}
	t.Logf("5,000 Deployments take %v", measure().Minus(empty))
}
