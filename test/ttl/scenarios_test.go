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
	scenarios := map[string]func(f *fixture){
		"within a second of the deadline": func(f *fixture) {
			deadlines := map[string]time.Time{}
			for i := range 5 {
				name := fmt.Sprintf("cm-%d", i)
				annotations := expiresIn(2*time.Second + time.Duration(i)*100*time.Millisecond)
				deadlines[name], _ = time.Parse(time.RFC3339Nano, annotations["quartermaster.dev/expires"])
				f.createConfigMap(name, annotations)
			}
			f.createConfigMap("stays", map[string]string{ttlControllerTTL: "1h"})
			for name := range deadlines {
				f.waitUntilGone(name)
			}
			f.waitForEvent(f.namespace, "cm-0", "DeletedExpiredTTL")
			f.expectDeleted("configmaps/cm-0", "configmaps/cm-1", "configmaps/cm-2", "configmaps/cm-3", "configmaps/cm-4")
			for _, d := range f.deletions() {
				if deadline, ok := deadlines[d.ObjectRef.Name]; ok {
					late := d.StageTimestamp.Sub(deadline)
					f.Logf("%s was deleted %v after its deadline", d.ObjectRef.Name, late)
					if late < 0 || late > 10*time.Second { // a busy machine must not fail this
						f.Error("not in time")
					}
				}
			}
		},
		"a Job's Pods go too": func(f *fixture) {
			jobs, pods := shared.Admin.BatchV1().Jobs(f.namespace), shared.Admin.CoreV1().Pods(f.namespace)
			_, err := jobs.Create(f.ctx, &batchv1.Job{
				ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: batchv1.JobSpec{Template: podTemplate()},
			}, metav1.CreateOptions{})
			assert.NoError(f, err)
			count := func(want func(int) bool) {
				f.Helper()
				fleet.Eventually(f.ctx, f, func() error {
					list, err := pods.List(f.ctx, metav1.ListOptions{})
					if err == nil && !want(len(list.Items)) {
						err = fmt.Errorf("%d Pods", len(list.Items))
					}
					return err
				})
			}
			count(func(n int) bool { return n == 1 })
			f.annotate("job/job", ttlControllerTTL+"=0s")
			waitUntilGone(f, jobs.Get, "job")
			count(func(n int) bool { return n == 0 })
			f.expectDeleted("jobs/job")
		},
		"the copy on a ReplicaSet does nothing": func(f *fixture) {
			deployments := shared.Admin.AppsV1().Deployments(f.namespace)
			template := podTemplate()
			template.Spec.RestartPolicy = corev1.RestartPolicyAlways
			_, err := deployments.Create(f.ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d", Annotations: expiresIn(3 * time.Second)},
				Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{})
			assert.NoError(f, err)
			waitUntilGone(f, deployments.Get, "d")
			f.expectDeleted("deployments/d")
		},
		"a Namespace goes, with what is in it": func(f *fixture) {
			f.createConfigMap("inside", nil)
			f.annotate("namespace/"+f.namespace, "janitor/ttl=0s")
			waitUntilGone(f, shared.Admin.CoreV1().Namespaces().Get, f.namespace)
		},
		"what is protected stays": func(f *fixture) {
			if _, err := shared.Admin.CoreV1().Namespaces().Create(f.ctx, &corev1.Namespace{
				ObjectMeta: metav1.ObjectMeta{Name: "kube-" + f.namespace, Annotations: expiresIn(0)}}, metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			f.createConfigMapIn(metav1.NamespaceSystem, f.namespace, expiresIn(0))
			f.waitForEvent(metav1.NamespaceSystem, f.namespace, "TTLProtected")
			f.waitForEvent(metav1.NamespaceDefault, "kube-"+f.namespace, "TTLProtected")
			f.settle()
			if _, err := shared.Admin.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(f.ctx, f.namespace, metav1.GetOptions{}); err != nil {
				f.Error(err)
			}
		},
		"a ClusterRole with an annotation of kube-janitor stays": func(f *fixture) {
			roles := shared.Admin.RbacV1().ClusterRoles()
			for name, key := range map[string]string{"janitors-": "janitor/ttl", "controllers-": ttlControllerTTL} {
				if _, err := roles.Create(f.ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{
					Name: name + f.namespace, Annotations: map[string]string{key: "0s"}}}, metav1.CreateOptions{}); err != nil {
					f.Fatal(err)
				}
			}
			waitUntilGone(f, roles.Get, "controllers-"+f.namespace)
			f.settle()
			if _, err := roles.Get(f.ctx, "janitors-"+f.namespace, metav1.GetOptions{}); err != nil {
				f.Error(err)
			}
		},
		"a Node is not even watched": func(f *fixture) {
			if _, err := shared.Admin.CoreV1().Nodes().Create(f.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.namespace, Annotations: expiresIn(0)}}, metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			f.settle()
			if _, err := shared.Admin.CoreV1().Nodes().Get(f.ctx, f.namespace, metav1.GetOptions{}); err != nil {
				f.Error(err)
			}
		},
		"an object with an invalid value stays until it is removed": func(f *fixture) {
			f.createConfigMap("cm", map[string]string{ttlControllerTTL: "0s", "k8s-ttl-controller.twin.sh/refreshed-at": "yesterday"})
			f.waitForEvent(f.namespace, "cm", "InvalidTTL")
			f.settle()
			f.annotate("configmap/cm", "k8s-ttl-controller.twin.sh/refreshed-at-")
			f.waitUntilGone("cm")
		},
		"annotations that come and change": func(f *fixture) {
			f.createConfigMap("cm", nil)
			f.createConfigMap("prolonged", expiresIn(10*time.Second)) // a busy machine must prolong it in time
			f.annotate("configmap/prolonged", "quartermaster.dev/expires=2200-01-01")
			f.annotate("configmap/cm", ttlControllerTTL+"=0s")
			f.waitUntilGone("cm")
			<-time.After(10 * time.Second)
			f.settle()
			f.expectDeleted("configmaps/cm")
		},
		"a finalizer is waited for": func(f *fixture) {
			cm := f.createConfigMap("cm", nil)
			cm.Finalizers, cm.Annotations = []string{"example.com/wait"}, expiresIn(0)
			if _, err := shared.Admin.CoreV1().ConfigMaps(f.namespace).Update(f.ctx, cm, metav1.UpdateOptions{}); err != nil {
				f.Fatal(err)
			}
			f.waitForEvent(f.namespace, "cm", "DeletedExpiredTTL")
			f.annotate("configmap/cm", "a=b")
			f.settle()
			f.expectDeleted("configmaps/cm")
			if _, err := shared.Kubectl(f.ctx, "-n", f.namespace, "patch", "configmap", "cm", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`); err != nil {
				f.Fatal(err)
			}
			f.waitUntilGone("cm")
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

func (f *fixture) annotate(object, annotation string) {
	f.Helper()
	if _, err := shared.Kubectl(f.ctx, "-n", f.namespace, "annotate", "--overwrite", object, annotation); err != nil {
		f.Fatal(err)
	}
}

func podTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x"}},
		Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "none"}}}}
}
