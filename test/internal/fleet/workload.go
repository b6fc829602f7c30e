// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const (
	// ReloadAnnotation with the value auto makes a Deployment roll when its ConfigMap changes.
	ReloadAnnotation = "quartermaster.dev/reload"
	// StateAnnotation is where the manager records on a Deployment what it knows of the ConfigMap.
	StateAnnotation = "quartermaster.dev/reload-state"
)

// Recorded returns what a state annotation says, without the version of the workload that it was
// recorded on; nil if it is none.
func Recorded(annotation string) map[string]string {
	var state map[string]string
	if err := json.Unmarshal([]byte(annotation), &state); err != nil {
		return nil
	}
	delete(state, "version")
	return state
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

// NewDeployment returns a Deployment that takes its environment from a ConfigMap.
func NewDeployment(name, configMap string, annotations map[string]string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](1),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{
					Name: "web", Image: "web",
					EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
						LocalObjectReference: corev1.LocalObjectReference{Name: configMap}}}},
				}}},
			},
		},
	}
}
