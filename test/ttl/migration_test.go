// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestMigrationWritesNothing takes over from originals that work by rules. A dry run beside the original
// tells of what is due, here after 1 s. Then a leader has the original's times, by which nothing is due.
func TestMigrationWritesNothing(t *testing.T) {
	example, err := os.ReadFile("../../deploy/examples/ttl-rules/rules.yaml")
	assert.NoError(t, err)
	for name, original := range map[string]struct {
		file string
		// createLeftovers creates what the original leaves behind, and returns the names of what is due after 1 s.
		createLeftovers func(f *fixture) []string
	}{
		"kube-janitor with a rules file": {
			file: `rules:
# id: require-app-label, jmespath: "!(metadata.labels.app)"
- name: require-app-label
  resources: [configmaps, jobs.batch]
  when: "object.?metadata.labels.app.orValue('') == ''"
  ttl: 4d
# id: pull-requests, jmespath: "starts_with(metadata.name, 'pr-')", resources: ["*"]
- name: pull-requests
  resources: ["*"]
  when: object.metadata.name.startsWith('pr-')
  ttl: 4h
`,
			createLeftovers: func(f *fixture) []string {
				f.createConfigMap("without-label", nil)
				f.createConfigMap("forever", map[string]string{"janitor/ttl": "forever"})
				f.createConfigMap("notified", map[string]string{"janitor/ttl": "7d", "janitor/notified": "yes"})
				f.createJob("pr-1")
				return []string{"without-label", "pr-1"}
			},
		},
		"kube-cleanup-operator with its defaults": {
			file: string(example),
			createLeftovers: func(f *fixture) []string {
				for _, name := range []string{"succeeded", "failed", "runs"} {
					f.createJob(name)
				}
				f.endJob("succeeded", corev1.PodSucceeded)
				f.endJob("failed", corev1.PodFailed)
				f.createPod("evicted", corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted"})
				f.createPod("orphaned", corev1.PodStatus{Phase: corev1.PodSucceeded})
				f.createPod("not-ready", corev1.PodStatus{Phase: corev1.PodRunning})
				return []string{"succeeded", "evicted", "orphaned"}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			short := original.file
			for _, ttl := range []string{"15m", "1h", "4h", "4d"} {
				short = strings.ReplaceAll(short, "ttl: "+ttl, "ttl: 1s")
			}
			namespaceFlag := "--ttl-include-namespaces=" + f.namespace
			due := original.createLeftovers(f)
			dry := shared.RunLeader(f.ctx, t, args(namespaceFlag, "--ttl-dry-run", "--ttl-rules="+f.writeFile(short))...)
			for _, name := range due {
				f.waitForEvent(f.namespace, name, "WouldDeleteExpiredTTL")
			}
			if err := dry.Stop(f.ctx, fleet.Patience); err != nil {
				t.Error(err)
			}
			shared.RunLeader(f.ctx, t, args(namespaceFlag, "--ttl-rules="+f.writeFile(original.file))...)
			f.settle()
			for _, e := range shared.AuditSince(t, f.begin, func(e auditv1.Event) bool {
				return cluster.AuditPod(e) != "" && e.ObjectRef != nil && e.ObjectRef.Namespace == f.namespace && e.ObjectRef.Resource != "events" &&
					e.Verb != "get" && e.Verb != "list" && e.Verb != "watch" && !strings.HasPrefix(e.ObjectRef.Name, "canary-")
			}) {
				t.Errorf("the migration has sent %s %s", e.Verb, e.RequestURI)
			}
			if reported := f.countEvents("WouldDeleteExpiredTTL"); reported != len(due) {
				t.Errorf("%d objects are due, want %q", reported, due)
			}
		})
	}
}

// createPod creates a Pod without an owner, in a state that a kubelet reports.
func (f *fixture) createPod(name string, status corev1.PodStatus) {
	f.Helper()
	pods := shared.Admin.CoreV1().Pods(f.namespace)
	pod, err := pods.Create(f.ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: podTemplate().Spec}, metav1.CreateOptions{})
	if err == nil {
		status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(time.Now())}}
		pod.Status = status
		_, err = pods.UpdateStatus(f.ctx, pod, metav1.UpdateOptions{})
	}
	assert.NoError(f, err)
}

// countEvents counts the Events of a reason in the namespace.
func (f *fixture) countEvents(reason string) int {
	f.Helper()
	events, err := shared.Admin.CoreV1().Events(f.namespace).List(f.ctx, metav1.ListOptions{FieldSelector: "reason=" + reason})
	assert.NoError(f, err)
	return len(events.Items)
}
