// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package manager tests managers as processes on a real control plane, judged from outside: by objects, by the audit
// log, by exit codes and by what the ports answer.
package manager

import (
	"context"
	"fmt"
	"os"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the control plane of all tests of the package, with everything of deploy/ but the Deployment.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, cluster.Options{}, true))
}

// shop is a namespace with ConfigMap app-config and Deployment web that uses it and asks to be rolled.
type shop struct{ namespace string }

func newShop(ctx context.Context, t *testing.T) shop {
	t.Helper()
	ns, err := shared.Admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := shared.Admin.CoreV1().Namespaces().Delete(context.Background(), ns.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	s := shop{ns.Name}
	_, err = shared.Admin.CoreV1().ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "app-config"},
		Data:       map[string]string{"color": "blue"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.deploy(ctx, t, "web", map[string]string{fleet.ReloadAnnotation: "auto"})
	return s
}

// deploy creates a Deployment with the annotations that takes its environment from app-config.
func (s shop) deploy(ctx context.Context, t *testing.T, name string, annotations map[string]string) {
	t.Helper()
	_, err := shared.Admin.AppsV1().Deployments(s.namespace).Create(ctx, fleet.NewDeployment(name, "app-config", annotations), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func (s shop) deployment(ctx context.Context, t *testing.T, name string) *appsv1.Deployment {
	t.Helper()
	d, err := shared.Admin.AppsV1().Deployments(s.namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// waitUntilKnown waits until the manager has recorded what the Deployment uses, so that a change is one.
func (s shop) waitUntilKnown(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		if s.deployment(ctx, t, name).Annotations[fleet.StateAnnotation] == "" {
			return fmt.Errorf("no state on Deployment %s", name)
		}
		return nil
	})
}

// paint changes the ConfigMap.
func (s shop) paint(ctx context.Context, t *testing.T, color string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"data":{"color":%q}}`, color)
	if _, err := shared.Admin.CoreV1().ConfigMaps(s.namespace).Patch(ctx, "app-config", "application/merge-patch+json", patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// replicaSets counts the Deployment's ReplicaSets: kube-controller-manager makes one for each new template.
func (s shop) replicaSets(ctx context.Context, t *testing.T, name string) int {
	t.Helper()
	list, err := shared.Admin.AppsV1().ReplicaSets(s.namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
	if err != nil {
		t.Fatal(err)
	}
	return len(list.Items)
}

// waitForReplicaSets waits until there are n.
func (s shop) waitForReplicaSets(ctx context.Context, t *testing.T, name string, n int) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		if got := s.replicaSets(ctx, t, name); got != n {
			return fmt.Errorf("Deployment %s has %d ReplicaSets, not %d", name, got, n)
		}
		return nil
	})
}
