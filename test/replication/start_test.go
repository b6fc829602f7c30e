// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// TestOriginalThatStillRunsIsReported has two Deployments named as in each original's chart: one runs, one
// is scaled to 0.
func TestOriginalThatStillRunsIsReported(t *testing.T) {
	f := newFixture(t, "a", "b")
	deploy := func(name, label, image string, replicas int32) {
		labels := map[string]string{"app.kubernetes.io/name": label}
		d := &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: f.namespaces["a"], Name: name, Labels: labels},
			Spec: appsv1.DeploymentSpec{
				Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: image}}},
				},
			},
		}
		if _, err := shared.Admin.AppsV1().Deployments(d.Namespace).Create(f.ctx, d, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	deploy("reflector-runs", "reflector", "docker.io/emberstack/kubernetes-reflector:9", 1)
	deploy("reflector-stopped", "reflector", "docker.io/emberstack/kubernetes-reflector:9", 0)
	deploy("replicator-runs", "kubernetes-replicator", "quay.io/mittwald/kubernetes-replicator:v2", 1)
	deploy("another-runs", "replicator", "example.com/replicator", 1)
	m := shared.RunLeader(f.ctx, t, args()...)
	for _, name := range []string{"reflector-runs", "replicator-runs"} {
		if _, err := m.WaitForLine(f.ctx, `is still running" controller="replication" deployment="`+f.namespaces["a"]+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.ReadFile(m.Log)
	assert.NoError(t, err)
	for _, name := range []string{"reflector-stopped", "another-runs"} {
		if strings.Contains(string(log), name) {
			t.Errorf("the log names %s", name)
		}
	}
}

// TestNamespacesRestrictReplication has sources and targets inside and outside of --namespaces.
func TestNamespacesRestrictReplication(t *testing.T) {
	f := newFixture(t, "a", "b", "c")
	f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}", "Q:allow-pull=*"))
	f.secret("c/u", "k=v", f.annotated("Q:push-to={b}"))
	f.secret("a/labels", "k=v", f.annotated("Q:push-to=labels: group={id}"))
	f.secret("b/t", "", f.annotated("Q:pull-from={a}/s"))
	f.secret("b/frozen", "k=old", f.annotated("M:replicate-from={c}/u", "M:replicated-from-version=1", "M:replicated-keys=k"))
	f.secret("c/t", "", f.annotated("Q:pull-from={a}/s"))
	// The fence is for the whole cluster: it refuses a manager that may not say there that it leads.
	shared.InstallWith(f.ctx, t)
	f.kubectl("delete", "validatingadmissionpolicybinding", "quartermaster-fence")
	shared.ExpectRefusals(func(e auditv1.Event) bool { return e.ObjectRef != nil && e.ObjectRef.Namespace == f.namespaces["b"] })
	scope := "--namespaces=" + f.namespaces["a"] + "," + f.namespaces["b"]
	shared.RunLeader(f.ctx, t, args(scope)...)
	f.waitForContent("b/s: k=v", "b/t: k=v")
	f.waitForEvent("a/labels", "InvalidAnnotation")
	f.remove("a/s")
	f.waitForContent("b/s: none")
	f.settle()
	f.waitForContent("b/t: k=v", "b/frozen: k=old", "b/u: none", "c/s: none", "c/t: ")
	f.expectWrites("create b/s", "update b/t", "delete b/s")
	for _, e := range shared.AuditSince(f, f.started, func(e auditv1.Event) bool { return cluster.AuditPod(e) != "" && e.ObjectRef != nil }) {
		ref := e.ObjectRef
		listed := ref.Resource == "namespaces" && (e.Verb == "list" || e.Verb == "watch")
		// The certificates of the secure port's clients are in kube-system.
		objects := (ref.Resource == "secrets" || ref.Resource == "configmaps") && ref.Namespace != metav1.NamespaceSystem
		if listed || objects && ref.Namespace != f.namespaces["a"] && ref.Namespace != f.namespaces["b"] {
			t.Errorf("%s %s in %q", e.Verb, ref.Resource, ref.Namespace)
		}
	}
}
