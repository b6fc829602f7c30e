// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// ReloadAnnotation with the value auto makes a Deployment roll when its ConfigMap changes.
	ReloadAnnotation = "quartermaster.dev/reload"
	// StateAnnotation is where the manager records on a Deployment what it knows of the ConfigMap.
	StateAnnotation = "quartermaster.dev/reload-state"
)

// Recorded returns the sources in a state annotation, without the version of the workload; nil if the text
// is not a state.
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
