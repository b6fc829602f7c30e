// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// hostileTexts returns annotations that a tenant may write: of 0, 1 and nearly 256 Ki bytes, which
// is the limit for all annotations of an object together, and of invalid UTF-8.
func hostileTexts() map[string]string {
	return map[string]string{"empty": "", "byte": "x", "large": strings.Repeat("x", 200<<10), "invalid": "\xff\xfe\x80", "brackets": strings.Repeat("[", 10_000), "null": "null"}
}

// hostileAnnotations returns the text as every annotation that somebody may parse.
func hostileAnnotations(text string) map[string]string {
	if len(text) > 10<<10 {
		return map[string]string{corev1.LastAppliedConfigAnnotation: text}
	}
	return map[string]string{
		corev1.LastAppliedConfigAnnotation: text, fleet.ReloadAnnotation: text, "quartermaster.dev/reload-state": text, "quartermaster.dev/reloaded-from": text,
		"reloader.stakater.com/auto": text, "configmap.reloader.stakater.com/reload": text, "reloader.stakater.com/last-reloaded-from": text,
		"examples.quartermaster.dev/greeting": text,
	}
}

// hostileData returns contents of ConfigMaps and Secrets.
func hostileData() map[string]map[string][]byte {
	many := map[string][]byte{}
	for i := range 10_000 {
		many[fmt.Sprint("key-", i)] = nil
	}
	return map[string]map[string][]byte{
		"none": nil, "empty": {"k": {}}, "byte": {"k": []byte("x")}, "large": {"k": []byte(strings.Repeat("x", 256<<10))},
		"many": many, "invalid": {"k": []byte("\xff\xfe\x80")},
	}
}

// createHostile creates every hostile object of every resource that a manager caches. Protobuf carries what
// JSON cannot.
func createHostile(ctx context.Context, t *testing.T, client kubernetes.Interface, namespace string) {
	t.Helper()
	must := func(_ any, err error) {
		t.Helper()
		assert.NoError(t, err)
	}
	for name, data := range hostileData() {
		m := metav1.ObjectMeta{Name: "data-" + name}
		must(client.CoreV1().Secrets(namespace).Create(ctx, &corev1.Secret{ObjectMeta: m, Data: data}, metav1.CreateOptions{}))
		must(client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: m, BinaryData: data}, metav1.CreateOptions{}))
	}
	for name, text := range hostileTexts() {
		m := metav1.ObjectMeta{Name: "text-" + name, Annotations: hostileAnnotations(text), Labels: map[string]string{"l": ""}}
		pod := corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": m.Name}, Annotations: m.Annotations},
			Spec:       cluster.NewDeployment(m.Name, "data-many", nil).Spec.Template.Spec,
		}
		selector := &metav1.LabelSelector{MatchLabels: pod.Labels}
		job := batchv1.JobSpec{Template: pod, Suspend: ptr.To(true)}
		job.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
		must(client.CoreV1().Secrets(namespace).Create(ctx, &corev1.Secret{ObjectMeta: m}, metav1.CreateOptions{}))
		must(client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: m}, metav1.CreateOptions{}))
		must(client.AppsV1().Deployments(namespace).Create(ctx, &appsv1.Deployment{ObjectMeta: m, Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](0), Selector: selector, Template: pod}}, metav1.CreateOptions{}))
		must(client.AppsV1().StatefulSets(namespace).Create(ctx, &appsv1.StatefulSet{ObjectMeta: m, Spec: appsv1.StatefulSetSpec{
			Replicas: ptr.To[int32](0), Selector: selector, Template: pod}}, metav1.CreateOptions{}))
		must(client.AppsV1().DaemonSets(namespace).Create(ctx, &appsv1.DaemonSet{ObjectMeta: m, Spec: appsv1.DaemonSetSpec{
			Selector: selector, Template: pod}}, metav1.CreateOptions{}))
		must(client.BatchV1().CronJobs(namespace).Create(ctx, &batchv1.CronJob{ObjectMeta: m, Spec: batchv1.CronJobSpec{
			Schedule: "0 0 1 1 *", Suspend: ptr.To(true), JobTemplate: batchv1.JobTemplateSpec{Spec: job}}}, metav1.CreateOptions{}))
		must(client.BatchV1().Jobs(namespace).Create(ctx, &batchv1.Job{ObjectMeta: m, Spec: job}, metav1.CreateOptions{}))
	}
}

func TestLongHostileObjectsEndNoManager(t *testing.T) {
	shared.InstallWith(fleet.Context(t), t, "compat-reloader")
	for _, contentType := range []string{"application/vnd.kubernetes.protobuf", "application/json"} {
		t.Run(contentType, func(t *testing.T) {
			ctx := fleet.Within(t.Context(), t, 4*time.Minute)
			s := shared.NewSample(ctx, t)
			config := rest.CopyConfig(shared.AdminConfig())
			config.ContentType = "application/vnd.kubernetes.protobuf"
			client, err := kubernetes.NewForConfig(config)
			assert.NoError(t, err)
			args := []string{"--kube-api-content-type=" + contentType, "--compat=reloader"}
			leader := shared.RunLeader(ctx, t, args...)
			s.WaitUntilKnown(ctx, t, "web")

			createHostile(ctx, t, client, s.Namespace) // by the watch
			standby := shared.RunStandby(ctx, t, args...)
			// The list, with objects deleted in the middle of it.
			late := shared.RunReplica(ctx, t, args...)
			assert.NoError(t, client.CoreV1().Secrets(s.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name!=db"}))
			fleet.Eventually(ctx, t, func() error { return fleet.Ready(late) })

			// All are alive, and the leader does its work.
			before := s.ReplicaSets(ctx, t, "web")
			s.Paint(ctx, t, "red")
			s.WaitForReplicaSets(ctx, t, "web", before+1)
			for _, m := range []*cluster.Manager{leader, standby, late} {
				select {
				case <-m.Done():
					t.Errorf("%s has ended:\n%s", m.Pod, m.Tail(20))
				default:
				}
				if err := fleet.Answers(m.SecureURL+"/healthz", "", 200); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
