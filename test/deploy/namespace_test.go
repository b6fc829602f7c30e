// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// testNamespace is a namespace with ConfigMap app-config and one workload of each kind that uses it, named
// like its resource. Its methods end the test on an error.
type testNamespace struct {
	t         *testing.T
	namespace string
	workloads []schema.GroupVersionResource
}

func newTestNamespace(ctx context.Context, t *testing.T) *testNamespace {
	t.Helper()
	s := &testNamespace{t: t, namespace: shared.NewNamespace(ctx, t, nil)}
	s.createConfigMap(ctx, "app-config")
	return s
}

func (s *testNamespace) createConfigMap(ctx context.Context, name string) {
	s.t.Helper()
	_, err := shared.Admin.CoreV1().ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"color": "blue"}}, metav1.CreateOptions{})
	assert.NoError(s.t, err)
}

// createAll creates the workloads.
func (s *testNamespace) createAll(ctx context.Context, rollouts bool) {
	s.t.Helper()
	template := map[string]any{
		"metadata": map[string]any{"labels": map[string]any{"app": "web"}},
		"spec": map[string]any{"containers": []any{map[string]any{"name": "web", "image": "web",
			"envFrom": []any{map[string]any{"configMapRef": map[string]any{"name": "app-config"}}}}}},
	}
	selector := map[string]any{"matchLabels": map[string]any{"app": "web"}}
	once := map[string]any{"metadata": template["metadata"], "spec": map[string]any{"restartPolicy": "Never", "containers": template["spec"].(map[string]any)["containers"]}}
	apps := schema.GroupVersion{Group: "apps", Version: "v1"}
	batch := batchv1.SchemeGroupVersion
	s.create(ctx, apps.WithResource("deployments"), "Deployment", map[string]any{"selector": selector, "template": template})
	s.create(ctx, apps.WithResource("statefulsets"), "StatefulSet", map[string]any{"selector": selector, "template": template, "serviceName": "web"})
	s.create(ctx, apps.WithResource("daemonsets"), "DaemonSet", map[string]any{"selector": selector, "template": template})
	s.create(ctx, batch.WithResource("jobs"), "Job", map[string]any{"template": once})
	s.create(ctx, batch.WithResource("cronjobs"), "CronJob", map[string]any{"schedule": "0 0 1 1 *", "jobTemplate": map[string]any{"spec": map[string]any{"template": once}}})
	if rollouts {
		argo := schema.GroupVersion{Group: "argoproj.io", Version: "v1alpha1"}
		s.create(ctx, argo.WithResource("rollouts"), "Rollout", map[string]any{"selector": selector, "template": template})
	}
}

func (s *testNamespace) create(ctx context.Context, resource schema.GroupVersionResource, kind string, spec map[string]any) {
	s.t.Helper()
	s.workloads = append(s.workloads, resource)
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": resource.GroupVersion().String(), "kind": kind,
		"metadata": map[string]any{"name": resource.Resource, "annotations": map[string]any{fleet.ReloadAnnotation: "auto"}},
		"spec":     spec,
	}}
	if _, err := shared.Objects.Resource(resource).Namespace(s.namespace).Create(ctx, o, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// waitUntilKnown waits until the manager has recorded what the workloads use, so that it notices
// the next change.
func (s *testNamespace) waitUntilKnown(ctx context.Context) {
	s.t.Helper()
	fleet.Eventually(ctx, s.t, func() error {
		var errs []error
		for _, resource := range s.workloads {
			if resource.Resource == "jobs" { // the manager keeps it in memory, see reloadAll
				continue
			}
			o, err := shared.Objects.Resource(resource).Namespace(s.namespace).Get(ctx, resource.Resource, metav1.GetOptions{})
			if err == nil && o.GetAnnotations()[fleet.StateAnnotation] == "" {
				err = fmt.Errorf("no state on %s", resource.Resource)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// paint changes the ConfigMap.
func (s *testNamespace) paint(ctx context.Context, color string) {
	s.t.Helper()
	patch := fmt.Appendf(nil, `{"data":{"color":%q}}`, color)
	if _, err := shared.Admin.CoreV1().ConfigMaps(s.namespace).Patch(ctx, "app-config", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// disturb calls change, and then writes to each workload before the manager's patch arrives. It
// leaves out Jobs and CronJobs, which the manager reads again in any case, and whose patches would
// exceed its four workers.
func (s *testNamespace) disturb(ctx context.Context, proxy *faultproxy.Proxy, change func()) {
	s.t.Helper()
	release := make(chan struct{})
	patches := map[schema.GroupVersionResource]*faultproxy.ActiveRule{}
	for _, resource := range s.workloads {
		if resource.Group != batchv1.GroupName {
			patches[resource] = proxy.Add(faultproxy.Rule{Hold: release, Times: 1,
				Match: faultproxy.Path(http.MethodPatch, "/namespaces/"+s.namespace+"/"+resource.Resource+"/")})
		}
	}
	change()
	for resource, patch := range patches {
		if err := patch.WaitHits(ctx, 1); err != nil {
			s.t.Fatalf("no patch of %s: %v", resource.Resource, err)
		}
		body := []byte(`{"metadata":{"annotations":{"example.com/somebody":"else"}}}`)
		if _, err := shared.Objects.Resource(resource).Namespace(s.namespace).Patch(ctx, resource.Resource, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
			s.t.Fatal(err)
		}
	}
	close(release)
}

// reloadAll changes the ConfigMap until each workload has had n Events of reloads. One change is
// not enough if a Job was not known yet.
func (s *testNamespace) reloadAll(ctx context.Context, n int32) {
	s.t.Helper()
	var painted time.Time
	fleet.Eventually(ctx, s.t, func() error {
		err := s.reloaded(ctx, n)
		if err != nil && time.Since(painted) > 5*time.Second {
			painted = time.Now()
			s.paint(ctx, painted.String())
		}
		return err
	})
}

// reloaded returns nil once each workload has had n Events of reloads.
func (s *testNamespace) reloaded(ctx context.Context, n int32) error {
	events, err := shared.Admin.CoreV1().Events(s.namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=Reloaded"})
	if err != nil {
		return err
	}
	got := map[string]int32{}
	for _, e := range events.Items {
		got[strings.ToLower(e.InvolvedObject.Kind)+"s"] += max(e.Count, 1)
	}
	var errs []error
	for _, resource := range s.workloads {
		if got[resource.Resource] < n {
			errs = append(errs, fmt.Errorf("%d Events Reloaded of %s, want %d", got[resource.Resource], resource.Resource, n))
		}
	}
	return errors.Join(errs...)
}

// deleteLease deletes the Lease and waits until a standby has created it again.
func (s *testNamespace) deleteLease(ctx context.Context, namespace string) {
	s.t.Helper()
	leases := shared.Admin.CoordinationV1().Leases(namespace)
	before, err := leases.Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	if err == nil {
		err = leases.Delete(ctx, fleet.LeaseName, metav1.DeleteOptions{})
	}
	assert.NoError(s.t, err)
	fleet.Eventually(ctx, s.t, func() error {
		lease, err := leases.Get(ctx, fleet.LeaseName, metav1.GetOptions{})
		if err == nil && (lease.UID == before.UID || lease.Spec.LeaseTransitions == nil || *lease.Spec.LeaseTransitions == 0) {
			err = errors.New("nobody leads on a new lease")
		}
		return err
	})
}

// startManager calls shared.Run for a manager that acts on a change at once.
func startManager(t *testing.T, r *cluster.Replica, args ...string) *cluster.Manager {
	t.Helper()
	return shared.Run(t, r, cluster.ManagerOptions{Args: append([]string{"--config-reload-quiet-period=0"}, args...)})
}
