// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// Sample is a namespace with ConfigMap app-config, Secret db and Deployment web, which takes its
// environment from both and is rolled when they change.
type Sample struct {
	Namespace string

	fleet *Fleet
}

// NewSample creates a sample, which is deleted at the end of the test.
func (f *Fleet) NewSample(ctx context.Context, t testing.TB) Sample {
	t.Helper()
	s := Sample{f.NewNamespace(ctx, t, nil), f}
	s.CreateConfigMap(ctx, t, "app-config", nil)
	s.CreateSecret(ctx, t, "db", "", "first")
	s.Deploy(ctx, t, "web", map[string]string{ReloadAnnotation: "auto"})
	return s
}

// Deploy creates a Deployment with the annotations that takes its environment from app-config and
// db.
func (s Sample) Deploy(ctx context.Context, t testing.TB, name string, annotations map[string]string) {
	t.Helper()
	d := cluster.NewDeployment(name, "app-config", annotations)
	c := &d.Spec.Template.Spec.Containers[0]
	c.EnvFrom = append(c.EnvFrom, corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "db"}}})
	if _, err := s.fleet.Admin.AppsV1().Deployments(s.Namespace).Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// CreateConfigMap creates a ConfigMap with the annotations.
func (s Sample) CreateConfigMap(ctx context.Context, t testing.TB, name string, annotations map[string]string) {
	t.Helper()
	_, err := s.fleet.Admin.CoreV1().ConfigMaps(s.Namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Data:       map[string]string{"color": "blue"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// CreateSecret creates a Secret of a type with a value.
func (s Sample) CreateSecret(ctx context.Context, t testing.TB, name string, kind corev1.SecretType, value string) {
	t.Helper()
	_, err := s.fleet.Admin.CoreV1().Secrets(s.Namespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Type: kind, StringData: map[string]string{"value": value},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// Paint changes ConfigMap app-config.
func (s Sample) Paint(ctx context.Context, t testing.TB, color string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"data":{"color":%q}}`, color)
	if _, err := s.fleet.Admin.CoreV1().ConfigMaps(s.Namespace).Patch(ctx, "app-config", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// SetSecret changes the value of Secret db.
func (s Sample) SetSecret(ctx context.Context, t testing.TB, value string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"stringData":{"value":%q}}`, value)
	if _, err := s.fleet.Admin.CoreV1().Secrets(s.Namespace).Patch(ctx, "db", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// WaitUntilKnown waits until config-reload has recorded what the Deployment uses, so that it notices the
// next change, and until kube-controller-manager has seen the Deployment: a slow kube-controller-manager
// could see only the changed template, and make one ReplicaSet less.
func (s Sample) WaitUntilKnown(ctx context.Context, t testing.TB, name string) {
	t.Helper()
	Eventually(ctx, t, func() error {
		d, err := s.fleet.Admin.AppsV1().Deployments(s.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil && (d.Annotations[StateAnnotation] == "" || s.ReplicaSets(ctx, t, name) == 0) {
			err = fmt.Errorf("no state on Deployment %s, or no ReplicaSet of it", name)
		}
		return err
	})
}

// ReplicaSets counts the Deployment's ReplicaSets. kube-controller-manager creates one for each new
// template.
func (s Sample) ReplicaSets(ctx context.Context, t testing.TB, name string) int {
	t.Helper()
	list, err := s.fleet.Admin.AppsV1().ReplicaSets(s.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
	if err != nil {
		t.Fatal(err)
	}
	return len(list.Items)
}

// WaitForReplicaSets waits until there are n ReplicaSets.
func (s Sample) WaitForReplicaSets(ctx context.Context, t testing.TB, name string, n int) {
	t.Helper()
	Eventually(ctx, t, func() error {
		if got := s.ReplicaSets(ctx, t, name); got != n {
			return fmt.Errorf("%d ReplicaSets of Deployment %s, want %d", got, name, n)
		}
		return nil
	})
}

// CheckEvent returns an error unless there is an Event about an object of the name.
func (s Sample) CheckEvent(ctx context.Context, name, reason string) error {
	events, err := s.fleet.Admin.CoreV1().Events(s.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
	if err == nil && len(events.Items) == 0 {
		err = fmt.Errorf("no Event %s on %s", reason, name)
	}
	return err
}

// Greet asks the greeter of examples/ for a greeting and waits for it.
func (s Sample) Greet(ctx context.Context, t testing.TB, name string) {
	t.Helper()
	s.CreateConfigMap(ctx, t, name, map[string]string{"example.com/greet": "world"})
	Eventually(ctx, t, func() error { return s.CheckEvent(ctx, name, "Greeted") })
}

// NewNamespace creates a namespace, which is deleted at the end of the test.
func (f *Fleet) NewNamespace(ctx context.Context, t testing.TB, labels map[string]string) string {
	t.Helper()
	namespaces := f.Admin.CoreV1().Namespaces()
	ns, err := namespaces.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-", Labels: labels}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := namespaces.Delete(context.Background(), ns.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	return ns.Name
}
