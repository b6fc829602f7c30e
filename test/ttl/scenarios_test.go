// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const ttlControllerTTL = "k8s-ttl-controller.twin.sh/ttl"

// TestWhatIsDueIsDeletedInTime has what depends on the API server, in one leader.
func TestWhatIsDueIsDeletedInTime(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 5*time.Minute)
	m := shared.RunLeader(ctx, t, args("--v=4", "--ttl-max-deletions-per-minute=0")...)
	scenarios := map[string]func(w *fixture){
		"within a second of the deadline": func(w *fixture) {
			deadlines := map[string]time.Time{}
			for i := range 5 {
				name := fmt.Sprintf("cm-%d", i)
				annotations := expiresIn(2*time.Second + time.Duration(i)*100*time.Millisecond)
				deadlines[name], _ = time.Parse(time.RFC3339Nano, annotations["quartermaster.dev/expires"])
				w.createConfigMap(name, annotations)
			}
			w.createConfigMap("stays", map[string]string{ttlControllerTTL: "1h"})
			for name := range deadlines {
				w.waitUntilGone(name)
			}
			w.waitForEvent(w.namespace, "cm-0", "DeletedExpiredTTL")
			w.expectDeleted("configmaps/cm-0", "configmaps/cm-1", "configmaps/cm-2", "configmaps/cm-3", "configmaps/cm-4")
			for _, d := range w.deletions() {
				if deadline, ok := deadlines[d.ObjectRef.Name]; ok {
					late := d.StageTimestamp.Sub(deadline)
					w.Logf("%s was deleted %v after its deadline", d.ObjectRef.Name, late)
					if late < 0 || late > 10*time.Second { // a busy machine must not fail this
						w.Error("not in time")
					}
				}
			}
		},
		"a Job's Pods go too": func(w *fixture) {
			jobs, pods := shared.Admin.BatchV1().Jobs(w.namespace), shared.Admin.CoreV1().Pods(w.namespace)
			_, err := jobs.Create(w.ctx, &batchv1.Job{
				ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: batchv1.JobSpec{Template: podTemplate()},
			}, metav1.CreateOptions{})
			assert.NoError(w, err)
			count := func(want func(int) bool) {
				w.Helper()
				fleet.Eventually(w.ctx, w, func() error {
					list, err := pods.List(w.ctx, metav1.ListOptions{})
					if err == nil && !want(len(list.Items)) {
						err = fmt.Errorf("%d Pods", len(list.Items))
					}
					return err
				})
			}
			count(func(n int) bool { return n == 1 })
			w.annotate("job/job", ttlControllerTTL+"=0s")
			waitUntilGone(w, jobs.Get, "job")
			count(func(n int) bool { return n == 0 })
			w.expectDeleted("jobs/job")
		},
		"the copy on a ReplicaSet does nothing": func(w *fixture) {
			deployments := shared.Admin.AppsV1().Deployments(w.namespace)
			template := podTemplate()
			template.Spec.RestartPolicy = corev1.RestartPolicyAlways
			_, err := deployments.Create(w.ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d", Annotations: expiresIn(3 * time.Second)},
				Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{})
			assert.NoError(w, err)
			waitUntilGone(w, deployments.Get, "d")
			w.expectDeleted("deployments/d")
		},
		"a Namespace goes, with what is in it": func(w *fixture) {
			w.createConfigMap("inside", nil)
			w.annotate("namespace/"+w.namespace, "janitor/ttl=0s")
			waitUntilGone(w, shared.Admin.CoreV1().Namespaces().Get, w.namespace)
		},
		"what is protected stays": func(w *fixture) {
			if _, err := shared.Admin.CoreV1().Namespaces().Create(w.ctx, &corev1.Namespace{
				ObjectMeta: metav1.ObjectMeta{Name: "kube-" + w.namespace, Annotations: expiresIn(0)}}, metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
			w.createConfigMapIn(metav1.NamespaceSystem, w.namespace, expiresIn(0))
			w.waitForEvent(metav1.NamespaceSystem, w.namespace, "TTLProtected")
			w.waitForEvent(metav1.NamespaceDefault, "kube-"+w.namespace, "TTLProtected")
			w.settle()
			if _, err := shared.Admin.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(w.ctx, w.namespace, metav1.GetOptions{}); err != nil {
				w.Error(err)
			}
		},
		"a ClusterRole with an annotation of kube-janitor stays": func(w *fixture) {
			roles := shared.Admin.RbacV1().ClusterRoles()
			for name, key := range map[string]string{"janitors-": "janitor/ttl", "controllers-": ttlControllerTTL} {
				if _, err := roles.Create(w.ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{
					Name: name + w.namespace, Annotations: map[string]string{key: "0s"}}}, metav1.CreateOptions{}); err != nil {
					w.Fatal(err)
				}
			}
			waitUntilGone(w, roles.Get, "controllers-"+w.namespace)
			w.settle()
			if _, err := roles.Get(w.ctx, "janitors-"+w.namespace, metav1.GetOptions{}); err != nil {
				w.Error(err)
			}
		},
		"a Node is not even watched": func(w *fixture) {
			if _, err := shared.Admin.CoreV1().Nodes().Create(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.namespace, Annotations: expiresIn(0)}}, metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
			w.settle()
			if _, err := shared.Admin.CoreV1().Nodes().Get(w.ctx, w.namespace, metav1.GetOptions{}); err != nil {
				w.Error(err)
			}
		},
		"an object with an invalid value stays until it is removed": func(w *fixture) {
			w.createConfigMap("cm", map[string]string{ttlControllerTTL: "0s", "k8s-ttl-controller.twin.sh/refreshed-at": "yesterday"})
			w.waitForEvent(w.namespace, "cm", "InvalidTTL")
			w.settle()
			w.annotate("configmap/cm", "k8s-ttl-controller.twin.sh/refreshed-at-")
			w.waitUntilGone("cm")
		},
		"annotations that come and change": func(w *fixture) {
			w.createConfigMap("cm", nil)
			w.createConfigMap("prolonged", expiresIn(10*time.Second)) // a busy machine must prolong it in time
			w.annotate("configmap/prolonged", "quartermaster.dev/expires=2200-01-01")
			w.annotate("configmap/cm", ttlControllerTTL+"=0s")
			w.waitUntilGone("cm")
			<-time.After(10 * time.Second)
			w.settle()
			w.expectDeleted("configmaps/cm")
		},
		"a finalizer is waited for": func(w *fixture) {
			cm := w.createConfigMap("cm", nil)
			cm.Finalizers, cm.Annotations = []string{"example.com/wait"}, expiresIn(0)
			if _, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Update(w.ctx, cm, metav1.UpdateOptions{}); err != nil {
				w.Fatal(err)
			}
			w.waitForEvent(w.namespace, "cm", "DeletedExpiredTTL")
			w.annotate("configmap/cm", "a=b")
			w.settle()
			w.expectDeleted("configmaps/cm")
			if _, err := shared.Kubectl(w.ctx, "-n", w.namespace, "patch", "configmap", "cm", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`); err != nil {
				w.Fatal(err)
			}
			w.waitUntilGone("cm")
		},
	}
	t.Run("at once", func(t *testing.T) {
		for name, run := range scenarios {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				run(newFixture(t))
			})
		}
	})
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	if err := fleet.Answers(m.SecureURL+"/debug/controllers/ttl", token, 200, `"resource": "configmaps"`, `"synced": true`); err != nil {
		t.Error(err)
	}
	if err := fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_ttl_deletions_total{group="batch",resource="jobs",result="success",rule=""} 1`, "quartermaster_ttl_watched_types"); err != nil {
		t.Error(err)
	}
}

func (w *fixture) annotate(object, annotation string) {
	w.Helper()
	if _, err := shared.Kubectl(w.ctx, "-n", w.namespace, "annotate", "--overwrite", object, annotation); err != nil {
		w.Fatal(err)
	}
}

func podTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x"}},
		Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "none"}}}}
}
