// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// shop is a namespace with ConfigMap app-config, Secret db and Deployment web, which uses both and asks to be rolled.
type shop struct{ namespace string }

func newNamespace(ctx context.Context, t *testing.T) string {
	t.Helper()
	ns, err := admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := admin.CoreV1().Namespaces().Delete(context.Background(), ns.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	return ns.Name
}

func newShop(ctx context.Context, t *testing.T) shop {
	t.Helper()
	s := shop{newNamespace(ctx, t)}
	s.configMap(ctx, t, "app-config", nil)
	s.secret(ctx, t, "db", "", "first")
	labels := map[string]string{"app": "web"}
	_, err := admin.AppsV1().Deployments(s.namespace).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{"quartermaster.dev/reload": "auto"}},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](1),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec()},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func podSpec() corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{
		Name: "web", Image: "web",
		EnvFrom: []corev1.EnvFromSource{
			{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}}},
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}}},
		},
	}}}
}

func (s shop) configMap(ctx context.Context, t *testing.T, name string, annotations map[string]string) {
	t.Helper()
	_, err := admin.CoreV1().ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Data:       map[string]string{"color": "blue"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func (s shop) secret(ctx context.Context, t *testing.T, name string, kind corev1.SecretType, value string) {
	t.Helper()
	_, err := admin.CoreV1().Secrets(s.namespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Type:       kind,
		StringData: map[string]string{"value": value},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// paint changes the ConfigMap.
func (s shop) paint(ctx context.Context, t *testing.T, color string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"data":{"color":%q}}`, color)
	if _, err := admin.CoreV1().ConfigMaps(s.namespace).Patch(ctx, "app-config", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// setSecret changes a Secret.
func (s shop) setSecret(ctx context.Context, t *testing.T, name, value string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"stringData":{"value":%q}}`, value)
	if _, err := admin.CoreV1().Secrets(s.namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// waitUntilKnown waits until config-reload has recorded what the Deployment uses, so that a change is one.
func (s shop) waitUntilKnown(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, func() error {
		d, err := admin.AppsV1().Deployments(s.namespace).Get(ctx, "web", metav1.GetOptions{})
		if err == nil && d.Annotations["quartermaster.dev/reload-state"] == "" {
			err = fmt.Errorf("no state on Deployment web")
		}
		return err
	})
}

// waitForReplicaSets waits until the Deployment has n: kube-controller-manager makes one for each new template.
func (s shop) waitForReplicaSets(ctx context.Context, t *testing.T, n int) {
	t.Helper()
	eventually(ctx, t, func() error {
		list, err := admin.AppsV1().ReplicaSets(s.namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != n {
			err = fmt.Errorf("Deployment web has %d ReplicaSets, not %d", len(list.Items), n)
		}
		return err
	})
}

// greet asks the greeter for a greeting and waits for it.
func (s shop) greet(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	s.configMap(ctx, t, name, map[string]string{"example.com/greet": "world"})
	eventually(ctx, t, func() error {
		events, err := admin.CoreV1().Events(s.namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=Greeted"})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("%s was not greeted", name)
		}
		return err
	})
}
