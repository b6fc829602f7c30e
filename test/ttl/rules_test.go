// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// ruleR is the rule r of the specification, in one namespace and for seconds.
const ruleR = `
- name: r
  resources: [jobs.batch]
  when: "object.metadata.namespace == 'NS' && object.?status.conditions.orValue([]).exists(c, c.type == 'Complete' && c.status == 'True')"
  since: timestamp(object.status.completionTime)
  ttl: 2s`

// createJob creates a Job, whose Pod never starts.
func (f *fixture) createJob(name string) {
	f.Helper()
	if _, err := shared.Admin.BatchV1().Jobs(f.namespace).Create(f.ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: batchv1.JobSpec{BackoffLimit: ptr.To[int32](0), Template: podTemplate()}}, metav1.CreateOptions{}); err != nil {
		f.Fatal(err)
	}
}

// endJob ends the Pod of a Job, as a kubelet does.
func (f *fixture) endJob(name string, phase corev1.PodPhase) {
	f.Helper()
	pods := shared.Admin.CoreV1().Pods(f.namespace)
	fleet.Eventually(f.ctx, f, func() error {
		list, err := pods.List(f.ctx, metav1.ListOptions{LabelSelector: "job-name=" + name})
		if err == nil && len(list.Items) == 0 {
			err = errors.New("the Job has no Pod")
		}
		if err != nil {
			return err
		}
		pod := &list.Items[0]
		pod.Status.Phase = phase
		_, err = pods.UpdateStatus(f.ctx, pod, metav1.UpdateOptions{})
		return err
	})
}

// waitForMetric waits until a metric of the manager has a value.
func (f *fixture) waitForMetric(m *cluster.Manager, line string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error { return fleet.Answers(m.InsecureURL+"/metrics", "", 200, line) })
}

// TestRulesDeleteOnTheAPIServer has what depends on the API server and on Kubernetes' own controllers.
func TestRulesDeleteOnTheAPIServer(t *testing.T) {
	f := newFixture(t)
	temp := newFixture(t)
	m := shared.RunLeader(f.ctx, t, args("--v=2", "--ttl-rules="+f.writeRules(ruleR+`
- {name: temp, resources: ["*"], when: "object.metadata.?namespace.orValue('') == '`+temp.namespace+`'", ttl: 20s}
- {name: widgets, resources: [widgets.v1.example.com], when: object.metadata.namespace == 'NS' && object.spec.old, ttl: 0s}
- {name: expensive, resources: [configmaps], when: "object.metadata.namespace == 'NS' && object.data.exists(a, object.data.exists(b, object.data[a] == object.data[b] + 'x'))", ttl: 0s}
- {name: missing, resources: [persistentvolumeclaims], when: object.metadata.namespace == 'NS' && object.status.x == 1, ttl: 0s}`))...)

	// A rule for every type, whose time begins now.
	deployments := shared.Admin.AppsV1().Deployments(temp.namespace)
	template := podTemplate()
	template.Spec.RestartPolicy = corev1.RestartPolicyAlways
	if _, err := deployments.Create(f.ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d"},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	// Jobs that are done, run, fail, and are kept by an annotation.
	for _, name := range []string{"done", "runs", "fails", "kept"} {
		f.createJob(name)
	}
	f.annotate("job/kept", "quartermaster.dev/ttl=forever")
	f.endJob("done", corev1.PodSucceeded)
	f.endJob("kept", corev1.PodSucceeded)
	f.endJob("fails", corev1.PodFailed)
	jobs, pods := shared.Admin.BatchV1().Jobs(f.namespace), shared.Admin.CoreV1().Pods(f.namespace)
	waitUntilGone(f, jobs.Get, "done")
	f.waitForEvent(f.namespace, "done", "DeletedExpiredTTL")
	fleet.Eventually(f.ctx, t, func() error {
		list, err := pods.List(f.ctx, metav1.ListOptions{LabelSelector: "job-name=done"})
		if err == nil && len(list.Items) > 0 {
			err = errors.New("its Pod is left")
		}
		return err
	})
	f.waitForMetric(m, `quartermaster_ttl_deletions_total{group="batch",resource="jobs",result="success",rule="r"} 1`)

	// A rule that fails, and an expensive object, keep nobody waiting.
	if _, err := shared.Admin.CoreV1().PersistentVolumeClaims(f.namespace).Create(f.ctx, newClaim("missing"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	f.waitForMetric(m, `quartermaster_ttl_rule_errors_total{rule="missing"} 1`)
	hostile := map[string]string{}
	for i := range 10_000 {
		hostile[fmt.Sprintf("key-%d", i)] = fmt.Sprintf("%080d", i)
	}
	begin := cpuTime(t, m)
	if _, err := shared.Admin.CoreV1().ConfigMaps(f.namespace).Create(f.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "hostile"}, Data: hostile}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	f.waitForMetric(m, `quartermaster_ttl_rule_errors_total{rule="expensive"} 1`)
	t.Logf("CPU time for an expensive ConfigMap of 1 MB: %v", cpuTime(t, m)-begin)
	f.settle()

	// A type that comes later.
	if _, err := shared.Objects.Resource(definitions).Create(f.ctx, widgetDefinition(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.Objects.Resource(definitions).Delete(context.Background(), "widgets.example.com", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	widget := func(namespace, name string, old bool) {
		fleet.Eventually(f.ctx, t, func() error {
			_, err := shared.Objects.Resource(widgets).Namespace(namespace).Create(f.ctx, newObject("example.com/v1", "Widget", name, map[string]any{"spec": map[string]any{"old": old}}), metav1.CreateOptions{})
			return err
		})
	}
	widget(f.namespace, "old", true)
	widget(f.namespace, "new", false)
	widget(temp.namespace, "temporary", false)
	for namespace, name := range map[string]string{f.namespace: "old", temp.namespace: "temporary"} {
		waitUntilGone(f, func(ctx context.Context, name string, opts metav1.GetOptions) (any, error) {
			return shared.Objects.Resource(widgets).Namespace(namespace).Get(ctx, name, opts)
		}, name)
	}

	waitUntilGone(f, deployments.Get, "d")
	f.settle()
	if _, err := jobs.Get(f.ctx, "fails", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	f.expectDeleted("jobs/done", "widgets/old")
	temp.expectDeleted("deployments/d", "widgets/temporary") // and neither its Pods, nor kube-root-ca.crt, nor the ServiceAccount default
	if log := m.Tail(10_000); strings.Contains(log, strings.Repeat("0", 70)) || !strings.Contains(log, "A rule cannot be evaluated") {
		t.Error("the log has a value, or no rule that cannot be evaluated")
	}
	token, err := shared.AdminToken(f.ctx)
	assert.NoError(t, err)
	if err := fleet.Answers(m.SecureURL+"/debug/controllers/ttl", token, 200, `"rule": "missing"`, `"reason": "reads a field that the object lacks"`); err != nil {
		t.Error(err)
	}
}

// TestLongTenantWithExpensiveObjects has tenants who write large ConfigMaps, for which a rule costs the most
// that it may, as fast as the API server lets them, and somebody else's ConfigMaps that a rule deletes.
func TestLongTenantWithExpensiveObjects(t *testing.T) {
	f, other := newFixture(t), newFixture(t)
	m := shared.RunReleased(f.ctx, t, args("--ttl-max-deletions-per-minute=0", "--ttl-rules="+f.writeRules(`
- {name: expensive, resources: [configmaps], when: "object.metadata.namespace == 'NS' && object.data.exists(a, object.data.exists(b, object.data[a] == object.data[b] + 'x'))", ttl: 0s}
- {name: old, resources: [configmaps], when: "object.metadata.namespace == '`+other.namespace+`' && object.?data.old.orValue('') == 'yes'", ttl: 0s}`))...)
	hostile := map[string]string{}
	for i := range 9000 {
		hostile[fmt.Sprintf("key-%d", i)] = fmt.Sprintf("%080d", i)
	}
	writing, stop := context.WithCancel(f.ctx)
	var tenants sync.WaitGroup
	var writes atomic.Int64
	for i := range 3 {
		tenants.Go(func() {
			cm, maps := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("hostile-%d", i)}, Data: hostile}, shared.Admin.CoreV1().ConfigMaps(f.namespace)
			_, err := maps.Create(writing, cm, metav1.CreateOptions{})
			for n := 0; err == nil; n++ {
				writes.Add(1)
				_, err = maps.Patch(writing, cm.Name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{"n":"%d"}}}`, n), metav1.PatchOptions{})
			}
		})
	}
	begin, spent, longest := time.Now(), cpuTime(t, m), time.Duration(0)
	for i := range 15 {
		name, created := fmt.Sprintf("old-%d", i), time.Now()
		if _, err := shared.Admin.CoreV1().ConfigMaps(other.namespace).Create(f.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"old": "yes"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		other.waitUntilGone(name)
		longest = max(longest, time.Since(created))
		fleet.Wait(f.ctx, time.Second)
	}
	stop()
	tenants.Wait()
	t.Logf("%d writes of 0.8 MB in %v took %v of CPU time; somebody else's ConfigMap was deleted after %v at most", writes.Load(),
		time.Since(begin).Round(time.Second), cpuTime(t, m)-spent, longest.Round(time.Millisecond))
}

func newClaim(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}
}

func TestFileWithAMistakeFailsTheStart(t *testing.T) {
	f := newFixture(t)
	m, err := shared.StartManager(shared.NewReplica(f.ctx, t), cluster.ManagerOptions{Binary: shared.Binary, Args: args("--ttl-rules=" + f.writeRules("\n- {name: bad, resources: ['*'], when: has(object.spec), ttl: 1h}"))})
	assert.NoError(t, err)
	if _, err := m.WaitForLine(f.ctx, "rule bad: when: "); err != nil {
		t.Error(err)
	}
	if err := m.Wait(f.ctx); m.ExitCode() != 1 {
		t.Errorf("%v, exit code %d", err, m.ExitCode())
	}
}

// TestLeaderDiesBetweenTheRequestsOfARule has a hundred Jobs with timers, a leader that is
// killed after it has read one of them, and its successor.
func TestLeaderDiesBetweenTheRequestsOfARule(t *testing.T) {
	f := newFixture(t)
	replica, proxy := shared.NewReplicaBehindProxy(f.ctx, t)
	never := make(chan struct{})
	defer close(never)
	held := proxy.Add(faultproxy.Rule{Hold: never, Match: func(r *http.Request) bool {
		return r.Method == http.MethodDelete && strings.Contains(r.URL.Path, "/configmaps/cm-")
	}})
	flags := args(append([]string{"--ttl-max-deletions-per-minute=0", "--ttl-rules=" + f.writeRules(`
- {name: r, resources: [configmaps], when: "object.metadata.namespace == 'NS' && object.?data.old.orValue('') == 'yes'", ttl: 10s}`)}, fleet.ShortTimings...)...)
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: flags})
	shared.WaitForLeader(f.ctx, t, m)
	var want []string
	for i := range 100 {
		name := fmt.Sprintf("cm-%d", i)
		if _, err := shared.Admin.CoreV1().ConfigMaps(f.namespace).Create(f.ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"old": "yes"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		want = append(want, "configmaps/"+name)
	}
	assert.NoError(t, held.WaitHits(f.ctx, 1))
	m.Kill()
	shared.RunLeader(f.ctx, t, flags...)
	for i := range 100 {
		f.waitUntilGone(fmt.Sprintf("cm-%d", i))
	}
	f.expectDeleted(want...)
}

func TestRuleOfAForbiddenTypeStopsNoOther(t *testing.T) {
	f := newFixture(t)
	const role = "quartermaster-controller-ttl"
	r, err := shared.Admin.RbacV1().ClusterRoles().Get(f.ctx, role, metav1.GetOptions{})
	assert.NoError(t, err)
	kept := r.Rules[:0]
	for _, rule := range r.Rules {
		if resource := rule.Resources[0]; resource != "*" && resource != "persistentvolumeclaims" {
			kept = append(kept, rule)
		}
	}
	r.Rules = kept
	if _, err := shared.Admin.RbacV1().ClusterRoles().Update(f.ctx, r, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shared.InstallWith(context.Background(), t) })
	shared.ExpectRefusals(func(e auditv1.Event) bool { return e.Verb == "list" || e.Verb == "watch" })
	m := shared.RunLeader(f.ctx, t, args("--ttl-rules="+f.writeRules(`
- {name: claims, resources: [persistentvolumeclaims], ttl: 0s}
- {name: maps, resources: [configmaps], when: "object.metadata.namespace == 'NS' && object.?data.old.orValue('') == 'yes'", ttl: 0s}`))...)
	if _, err := shared.Admin.CoreV1().ConfigMaps(f.namespace).Create(f.ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "cm"}, Data: map[string]string{"old": "yes"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	f.waitUntilGone("cm")
	f.expectDeleted("configmaps/cm")
	fleet.Eventually(f.ctx, t, func() error {
		return fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_controller_problem{controller="ttl"} 0`)
	})
}

// TestCommandShowsWhatRulesDelete compares what the command shows with what a leader deletes then.
func TestCommandShowsWhatRulesDelete(t *testing.T) {
	f := newFixture(t)
	for name, old := range map[string]string{"old": "yes", "new": "no"} {
		if _, err := shared.Admin.CoreV1().ConfigMaps(f.namespace).Create(f.ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"old": old}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	file := f.writeRules(`
- {name: r, resources: [configmaps], when: "object.metadata.namespace == 'NS' && object.data.old == 'yes'", ttl: 0s}`)
	begin := time.Now()
	out, err := exec.CommandContext(f.ctx, shared.Binary, "ttl", "test", file, "--kubeconfig="+shared.Kubeconfig()).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !regexp.MustCompile(`(?m)^`+f.namespace+` +configmaps/old +r +`).Match(out) || bytes.Contains(out, []byte("configmaps/new")) || !regexp.MustCompile(`(?m)^r +1 +0 +0 +false$`).Match(out) {
		t.Errorf("it shows\n%s", out)
	}
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool {
		return strings.HasPrefix(e.UserAgent, "manager/") && e.User.Username == "admin"
	}) {
		if e.Verb != "get" && e.Verb != "list" {
			t.Errorf("it asks to %s %s", e.Verb, e.RequestURI)
		}
	}
	shared.RunLeader(f.ctx, t, args("--ttl-rules="+file)...)
	f.waitUntilGone("old")
	f.settle()
	f.expectDeleted("configmaps/old")
}

// TestLongGrowthByRulesIsLogged logs by how much ten rules over OBJECTS (20,000) Pods, Jobs and claims make a
// leader larger, if they choose none of these, and all.
func TestLongGrowthByRulesIsLogged(t *testing.T) {
	f := newFixture(t)
	f.ctx = fleet.Within(t.Context(), t, 40*time.Minute)
	objects, rounds := fleet.Setting(t, "OBJECTS", 20_000), fleet.Setting(t, "MEMORY_ROUNDS", 2)
	var creating sync.WaitGroup
	for part := range 20 {
		creating.Go(func() {
			for i := range objects / 20 {
				name := fmt.Sprintf("an-object-of-an-application-%d-%d", part, i)
				meta := metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "an-application", "app.kubernetes.io/managed-by": "bench"}}
				var err error
				switch {
				case part < 10:
					template := podTemplate()
					_, err = shared.Admin.CoreV1().Pods(f.namespace).Create(f.ctx, &corev1.Pod{ObjectMeta: meta, Spec: template.Spec}, metav1.CreateOptions{})
				case part < 15:
					_, err = shared.Admin.BatchV1().Jobs(f.namespace).Create(f.ctx, &batchv1.Job{ObjectMeta: meta,
						Spec: batchv1.JobSpec{Suspend: ptr.To(true), Template: podTemplate()}}, metav1.CreateOptions{})
				default:
					claim := newClaim(name)
					claim.ObjectMeta = meta
					_, err = shared.Admin.CoreV1().PersistentVolumeClaims(f.namespace).Create(f.ctx, claim, metav1.CreateOptions{})
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	creating.Wait()
	rules := func(when string) string {
		var text strings.Builder
		for i := range 10 {
			fmt.Fprintf(&text, "\n- {name: r%d, resources: [pods, jobs.batch, persistentvolumeclaims], ttl: 30d, when: \"object.metadata.namespace == 'NS' && object.?status.conditions.orValue([]).exists(c, c.type == 'T%d' && c.status == 'True') || %s\"}", i, i, when)
		}
		return "--ttl-rules=" + f.writeRules(text.String())
	}
	types := "--ttl-include-resources=pods,jobs.batch,persistentvolumeclaims"
	var baseline fleet.Memory
	for _, variant := range []struct {
		name string
		args []string
	}{{"without rules", nil}, {"with rules that choose none", []string{rules("object.metadata.?labels.x.orValue('') != ''")}}, {"with rules that choose all", []string{rules("object.metadata.namespace == 'NS'")}}} {
		for round := range rounds {
			m := shared.RunReleased(f.ctx, t, append(args(types), variant.args...)...)
			fleet.Eventually(f.ctx, t, func() error {
				return fleet.Answers(m.InsecureURL+"/metrics", "", 200, "quartermaster_ttl_watched_types 3")
			})
			took := cpuTime(t, m)
			fleet.Wait(f.ctx, time.Duration(fleet.Setting(t, "TTL_SETTLE", 150))*time.Second) // Go collects garbage every 2 minutes
			memory := shared.MemoryOf(f.ctx, t, m)
			if variant.args == nil && (round == 0 || memory.Resident < baseline.Resident) {
				baseline = memory
			}
			t.Logf("%s, %d: %v, %v of CPU time for the start; growth: %v", variant.name, round, memory, took, memory.Minus(baseline))
			m.Kill()
			shared.FreeLease(t, m)
		}
	}
}
