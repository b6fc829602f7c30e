// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

var (
	job    = kind{"batch/v1", "Job"}
	claim  = kind{"v1", "PersistentVolumeClaim"}
	secret = kind{"v1", "Secret"}
)

const (
	getJ    = "get jobs.batch shop/j"
	deleteJ = "delete jobs.batch shop/j"

	// ruleR is the rule r of the specification.
	ruleR = `
- name: r
  resources: [jobs.batch]
  when: "object.?status.conditions.orValue([]).exists(c, c.type == 'Complete' && c.status == 'True')"
  since: timestamp(object.status.completionTime)
  ttl: 1h`
)

// withField returns the object with a field of its own.
func withField(u *unstructured.Unstructured, value any, path ...string) *unstructured.Unstructured {
	if err := unstructured.SetNestedField(u.Object, value, path...); err != nil {
		panic(err)
	}
	return u
}

// completedJob returns a Job that was completed so long ago.
func completedJob(name string, ago time.Duration, annotations ...string) *unstructured.Unstructured {
	return withField(object(job, name, annotations...), map[string]any{
		"completionTime": time.Now().Add(-ago).UTC().Format(time.RFC3339),
		"conditions":     []any{map[string]any{"type": "Complete", "status": "True"}},
	}, "status")
}

func withLabels(u *unstructured.Unstructured, labels map[string]string) *unstructured.Unstructured {
	u.SetLabels(labels)
	return u
}

// TestRulesDeleteWhatTheyChoose has what is about more than one object or moment. The tests of package rules
// have the rest.
func TestRulesDeleteWhatTheyChoose(t *testing.T) {
	runCases(t, map[string]row{
		"a Job is deleted an hour after it completes": {rules: ruleR, run: func(f *fixture) {
			f.start(withField(object(job, "shop/j"), int64(1), "status", "active")).expectRequestsAfter(3 * time.Hour)
			f.expectMetric(0, "rule_errors_total", "rule", "r")
			f.expectMetric(0, "tracked_objects")
			f.add(completedJob("shop/j", 0)).expectRequestsAt(time.Hour, getJ, deleteJ)
			texts, _ := f.takeEvents()
			if want := "because of rule r, since 2000-01-01T03:00:00Z, ttl 1h, due at 2000-01-01T04:00:00Z"; len(texts) != 1 || !strings.HasSuffix(texts[0], want) {
				f.Errorf("Events %q, want one that ends in %q", texts, want)
			}
			f.expectMetric(1, "deletions_total", "group", "batch", "resource", "jobs", "result", "success", "rule", "r")
		}},
		"an object without a field that a rule reads is not deleted": {rules: "\n- {name: r, resources: [jobs.batch], when: object.status.x == 1, ttl: 1h}", run: func(f *fixture) {
			f.start(completedJob("shop/j", 2*time.Hour))
			f.add(withField(completedJob("shop/j", 2*time.Hour), int64(1), "status", "failed")) // which changes nothing
			f.expectRequestsAfter(3 * time.Hour)
			f.expectEvents()
			f.expectMetric(1, "rule_errors_total", "rule", "r")
			details := f.Controller(ttl.Name).Status().Details.(ttl.Details)
			if len(details.Rules) != 1 || details.Rules[0].LastFault == nil || details.Rules[0].LastFault.Object != "jobs.batch/shop/j" || details.Rules[0].Objects != 0 {
				f.Errorf("the status is %+v", details.Rules)
			}
		}},
		"an annotation that the cache does not show yet keeps rules away": {rules: ruleR, run: func(f *fixture) {
			f.start(completedJob("shop/j", 50*time.Minute))
			f.putBeforeRead(completedJob("shop/j", 50*time.Minute, "quartermaster.dev/ttl", "forever")).expectRequestsAfter(3*time.Hour, getJ)
		}},
		"a rule decides on the whole object when an annotation goes": {rules: "\n- {name: r, resources: [jobs.batch], when: \"!has(object.spec)\", ttl: 1h}", run: func(f *fixture) {
			f.start(withField(object(job, "shop/j", "quartermaster.dev/ttl", "3h"), true, "spec", "suspend"))
			f.putBeforeRead(withField(object(job, "shop/j"), true, "spec", "suspend")).expectRequestsAfter(3*time.Hour, getJ)
		}},
		"a label that has changed since is read before the deletion": {rules: "\n- {name: r, resources: [jobs.batch], when: object.metadata.labels.keep == 'no', ttl: 3h}", run: func(f *fixture) {
			f.start(withLabels(object(job, "shop/j"), map[string]string{"keep": "no"}))
			f.putBeforeRead(withLabels(object(job, "shop/j"), map[string]string{"keep": "yes"})).expectRequestsAfter(3*time.Hour, getJ)
			f.expectEvents()
		}},
		"a backlog stops no annotation": {rules: ruleR, run: func(f *fixture) {
			for i := range 150 {
				f.add(completedJob(fmt.Sprintf("shop/j%d", i), 2*time.Hour))
			}
			f.start()
			if got := len(controllertest.List[batchv1.Job](f.Host)); got != 90 {
				f.Errorf("%d Jobs are left, want 90", got)
			}
			f.add(expiringPod("1h")).expectLeft(0, 0)
			f.expectMetric(1, "stopped_namespaces")
			f.expectMetric(90, "overdue_objects")
			texts, _ := f.takeEvents()
			if text := texts[slices.IndexFunc(texts, func(s string) bool { return strings.Contains(s, "TTLBreakerOpen") })]; !strings.Contains(text, "of which r is due") {
				f.Error(text)
			}
		}},
		"a rule with dryRun deletes nothing, other rules do": {rules: "\n- {name: claims, resources: [persistentvolumeclaims], ttl: 1h, dryRun: true}" + ruleR, run: func(f *fixture) {
			f.start(object(claim, "shop/c"), completedJob("shop/j", 2*time.Hour)).expectEvents("DeletedExpiredTTL", "WouldDeleteExpiredTTL")
			f.Sleep(3 * time.Hour)
			got := f.takeRequests()
			slices.Sort(got)
			if want := []string{deleteJ, getJ, "get persistentvolumeclaims shop/c"}; !slices.Equal(got, want) {
				f.Errorf("requests %q, want %q", got, want)
			}
			f.expectMetric(1, "deletions_total", "result", "dry_run", "rule", "claims")
			f.expectEvents()
		}},
		"a claim that is mounted again is not deleted": {rules: `
- name: unused
  resources: [persistentvolumeclaims]
  when: "object.status.conditions.exists(c, c.type == 'Unused' && c.status == 'True')"
  since: timestamp(object.status.conditions.filter(c, c.type == 'Unused')[0].lastTransitionTime)
  ttl: 3d2h`, run: func(f *fixture) {
			claimUnused := func(status string) *unstructured.Unstructured {
				return withField(object(claim, "shop/c"), []any{map[string]any{"type": "Unused", "status": status,
					"lastTransitionTime": time.Now().Add(-3 * 24 * time.Hour).UTC().Format(time.RFC3339)}}, "status", "conditions")
			}
			f.start(claimUnused("True")).expectMetric(1, "tracked_objects")
			f.add(claimUnused("False")).expectMetric(0, "tracked_objects")
			f.expectRequestsAfter(3 * time.Hour)
		}},
		"an object that is due in days is deleted on time and without an announcement": {rules: strings.Replace(ruleR, "1h", "3d", 1), configure: withGrace, run: func(f *fixture) {
			since := time.Now()
			deadline := since.Add(3 * 24 * time.Hour)
			sleepUntil := func(at time.Time) { f.Helper(); f.Sleep(time.Until(at)) }
			nextDeadline := func() *time.Time {
				types := f.Controller(ttl.Name).Status().Details.(ttl.Details).Types
				return types[slices.IndexFunc(types, func(k ttl.TypeStatus) bool { return k.Resource == "jobs.batch" })].NextDeadline
			}
			f.start(completedJob("shop/j", 0))
			sleepUntil(since.Add(24 * time.Hour))
			f.add(withField(completedJob("shop/j", time.Since(since)), int64(1), "status", "failed")) // as after a new list
			sleepUntil(since.Add(30 * time.Hour))
			f.Restart()
			sleepUntil(deadline.Add(-90 * time.Minute))
			if at := nextDeadline(); at != nil {
				f.Errorf("there is a record with the deadline %v", at)
			}
			if n := f.Controller(ttl.Name).Status().Reconciles; n > 0 {
				f.Errorf("%d reconciles of what is not due within an hour", n)
			}
			f.expectMetric(1, "tracked_objects")
			f.expectMetric(1, "rule_objects", "rule", "r")
			sleepUntil(deadline.Add(-time.Second))
			if at := nextDeadline(); at == nil || !at.Equal(deadline) {
				f.Errorf("the next deadline is %v, want %v", at, deadline)
			}
			f.expectRequests()
			sleepUntil(deadline)
			f.expectRequests(getJ, deleteJ)
			f.expectEvents("DeletedExpiredTTL")
		}},
		"an object whose deletion is under way": {run: func(f *fixture) {
			p := expiringPod("3h")
			p.SetFinalizers([]string{"example.com/wait"})
			f.start(p).Delete(p)
			f.expectRequestsAfter(24 * time.Hour)
		}},
		"a deadline that moves away and back counts as it is": {rules: "\n- {name: r, resources: [jobs.batch], when: has(object.metadata.labels.at), since: timestamp(object.metadata.labels.at), ttl: 1h}", run: func(f *fixture) {
			moveDeadline := func(at string) { f.Helper(); f.add(withLabels(object(job, "shop/j"), map[string]string{"at": at})) }
			moveDeadline("1999-12-31T23:30:00Z")
			f.start()
			moveDeadline("2000-01-08T00:00:00Z")
			f.Sleep(24 * time.Hour)
			f.expectMetric(1, "rule_objects", "rule", "r")
			f.add(withLabels(object(job, "shop/j"), map[string]string{"x": "", "at": "2000-01-02T00:01:00Z"})).expectRequestsAfter(time.Hour)
			moveDeadline("2000-01-08T00:00:00Z")
			f.expectRequestsAfter(time.Hour)
			f.Sleep(6*24*time.Hour - time.Hour + time.Second) // it is the 8th, 1:00
			f.expectRequests(getJ, deleteJ)
			f.expectMetric(0, "rule_objects", "rule", "r")
		}},
		"a Secret": {rules: "\n- {name: r, resources: [secrets], when: \"object.data.a == 'eA=='\", ttl: 1h}", run: func(f *fixture) {
			f.start(withField(object(secret, "shop/s"), "eA==", "data", "a"), withField(object(secret, "shop/t"), "eQ==", "data", "a"))
			f.expectRequests("get secrets shop/s", "delete secrets shop/s")
		}},
	})
}

// TestFileThatIsMissingFailsTheStart has a mistake that fails the start. The tests of package rules have the
// others.
func TestFileThatIsMissingFailsTheStart(t *testing.T) {
	entry := ttl.Entry()
	entry.Config.(*ttl.Config).RulesFile = filepath.Join(t.TempDir(), "rules.yaml")
	if _, err := entry.New(controllers.Host{}); err == nil || !strings.Contains(err.Error(), "--ttl-rules") {
		t.Error(err)
	}
}

func TestCommandShowsWhatRulesDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, row{configure: func(c *ttl.Config) { c.Include = append(c.Include, "jobs.batch") }})
		f.add(completedJob("shop/j", 2*time.Hour), completedJob("shop/later", time.Minute), completedJob("kube-system/j", 2*time.Hour),
			completedJob("shop/kept", 2*time.Hour, "quartermaster.dev/ttl", "forever"), object(pod, "shop/p"), object(configMap, "temp/c"))
		f.start()
		f.writeRules(ruleR + `
- {name: bad, resources: [pods], when: object.spec.x == 1, ttl: 1h}
- {name: none, resources: [nodes], ttl: 1h}
- {name: temp, resources: ["*"], when: "object.metadata.?namespace.orValue('') == 'temp'", ttl: 1h}`)
		cmd := f.entry.Command(func() (controllers.Settings, *rest.Config, error) { return controllers.Settings{}, f.RESTConfig(), nil })
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetArgs([]string{"test", f.cfg.RulesFile})
		assert.NoError(t, cmd.ExecuteContext(t.Context()))
		want := `NAMESPACE   NAME           RULE   SINCE                  DUE
shop        jobs.batch/j   r      1999-12-31T22:00:00Z   1999-12-31T23:00:00Z
temp        configmaps/c   temp   1999-12-31T22:00:00Z   1999-12-31T23:00:00Z

RULE   DUE   LATER   FAULTY   DRYRUN
r      1     1       0        false
bad    0     0       1        false
none   0     0       0        false
temp   1     0       0        false

nodes of the rule none is no type whose objects may be deleted here; the flags may exclude it, such as --ttl-include-resources

the rule bad reads a field that the object lacks, such as pods/p in "shop": no such key: spec
`
		assert.Equal(t, "printed", want, out.String())
		f.expectRequests()
	})
}
