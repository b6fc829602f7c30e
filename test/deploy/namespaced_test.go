// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestNamespacedInstallationNeedsNoClusterRole installs the component namespaced in its own
// namespace, adds a second namespace as docs/start/install.md describes, and leaves a third one
// unnamed. The audit log must show only requests in the first two.
func TestNamespacedInstallationNeedsNoClusterRole(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
	begin := time.Now()
	home, second, other := newTestNamespace(ctx, t), newTestNamespace(ctx, t), newTestNamespace(ctx, t)
	component := render(ctx, t, namespacedOverlay(t, home.namespace, "namespaced", "compat-reloader"))
	added := printRBAC(ctx, t, second.namespace, home.namespace, "--compat=reloader")
	kubectlApply(ctx, t, component)
	kubectlApply(ctx, t, added)

	account := "system:serviceaccount:" + home.namespace + ":quartermaster"
	granted := grantedPermissions(t, component+"---\n"+added)
	if len(granted) < 50 {
		t.Errorf("%d permissions are granted: the test does not see them", len(granted))
	}
	for p := range granted {
		if p.user != account || p.namespace == "" {
			t.Errorf("%s, in the cluster or to another account", p)
		}
	}

	leader, proxy := startInNamespace(ctx, t, component, home.namespace, "namespaced-1", "--namespaces="+second.namespace)
	for _, s := range []*testNamespace{other, home, second} {
		s.createAll(ctx, false)
	}
	for _, s := range []*testNamespace{home, second} {
		s.waitUntilKnown(ctx)
		s.disturb(ctx, proxy, func() { s.paint(ctx, "red") })
		other.paint(ctx, "red")
		s.reloadAll(ctx, 2)
	}
	startInNamespace(ctx, t, component, home.namespace, "namespaced-2", "--namespaces="+second.namespace)
	for _, path := range []string{"/livez", "/readyz", "/metrics"} {
		fleet.Eventually(ctx, t, func() error { return fleet.Answers(leader.InsecureURL+path, "", 200) })
	}
	home.deleteLease(ctx, home.namespace)

	fleet.Eventually(ctx, t, func() error {
		unused := maps.Clone(granted)
		for _, e := range shared.AuditSince(t, begin, fleet.Allowed) {
			request := requestPermission(e)
			maps.DeleteFunc(unused, func(p permission, _ bool) bool { return p.covers(request) })
		}
		if len(unused) > 0 {
			return fmt.Errorf("granted, but no request has used it: %v", slices.Collect(maps.Keys(unused)))
		}
		return nil
	})
	requests := 0
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return e.User.Username == account }) {
		requests++
		if !fleet.Allowed(e) {
			t.Errorf("refused: %s %s", e.Verb, e.RequestURI)
		}
		if ref := e.ObjectRef; ref != nil && ref.Namespace != home.namespace && ref.Namespace != second.namespace {
			t.Errorf("in the cluster or in another namespace: %s %s", e.Verb, e.RequestURI)
		}
	}
	t.Logf("%d permissions, %d requests", len(granted), requests)
	if requests == 0 {
		t.Error("the audit log has no request of the manager: nothing is judged")
	}
	if touched := other.recorded(ctx); len(touched) > 0 {
		t.Errorf("in a namespace that is not named, a manager has touched %q", touched)
	}
}

// TestNamespacedComponentGrantsWhatRBACPrints compares the component, which patches the default
// roles, with the output of the command.
func TestNamespacedComponentGrantsWhatRBACPrints(t *testing.T) {
	ctx := fleet.Context(t)
	for name, components := range map[string][]string{
		"alone":         {"namespaced"},
		"before others": {"namespaced", "argo-rollouts", "compat-reloader"},
		"after others":  {"argo-rollouts", "compat-reloader", "namespaced"},
	} {
		t.Run(name, func(t *testing.T) {
			flags := map[string]string{"argo-rollouts": "--config-reload-argo-rollouts", "compat-reloader": "--compat=reloader"}
			var args []string
			for _, c := range components {
				if flags[c] != "" {
					args = append(args, flags[c])
				}
			}
			got := grantedPermissions(t, render(ctx, t, namespacedOverlay(t, "team-a", components...)))
			want := grantedPermissions(t, printRBAC(ctx, t, "team-a", "team-a", args...))
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(permission{})); diff != "" || len(got) < 20 {
				t.Errorf("(-printed +granted):\n%s", diff)
			}
		})
	}
}

// namespacedOverlay writes the overlay of docs/start/install.md.
func namespacedOverlay(t *testing.T, namespace string, components ...string) string {
	t.Helper()
	dir := overlay(t, components...)
	file, err := os.OpenFile(filepath.Join(dir, "kustomization.yaml"), os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(file, "namespace: %s\n", namespace)
		err = errors.Join(err, file.Close())
	}
	assert.NoError(t, err)
	return dir
}

// printRBAC runs manager rbac for one namespace and an installation in another.
func printRBAC(ctx context.Context, t *testing.T, namespace, home string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(ctx, shared.Binary, append([]string{"rbac", "--namespaces=" + namespace,
		"--leader-elect-resource-namespace=" + home, "--secure-port=0"}, args...)...)
	out, err := cmd.Output()
	assert.NoError(t, err)
	return string(out)
}

// kubectlApply applies manifests except for the Deployment, whose Pods no kubelet would run.
func kubectlApply(ctx context.Context, t *testing.T, manifests string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifests.yaml")
	assert.NoError(t, os.WriteFile(file, []byte(manifests), 0o600))
	assert.NoError(t, shared.ApplyDir(ctx, file, "Deployment"))
}

// startInNamespace runs a manager like the Deployment of the manifests, behind a proxy, with args
// after the Deployment's arguments.
func startInNamespace(ctx context.Context, t *testing.T, manifests, namespace, name string, args ...string) (*cluster.Manager, *faultproxy.Proxy) {
	t.Helper()
	spec := findDeployment(t, manifests).Spec.Template.Spec
	container := &spec.Containers[0]
	for i := range container.Env {
		if from := container.Env[i].ValueFrom; from != nil && from.FieldRef != nil && from.FieldRef.FieldPath == "metadata.namespace" {
			container.Env[i] = corev1.EnvVar{Name: container.Env[i].Name, Value: namespace}
		}
	}
	for i := range container.Args {
		container.Args[i] = strings.ReplaceAll(container.Args[i], "$(POD_NAMESPACE)", namespace)
	}
	pod, err := shared.Admin.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{ServiceAccountName: spec.ServiceAccountName,
			Containers: []corev1.Container{{Name: "manager", Image: "quartermaster"}}}}, metav1.CreateOptions{})
	assert.NoError(t, err)
	replica, err := shared.ReplicaOf(ctx, pod)
	assert.NoError(t, err)
	proxy, err := faultproxy.Start(shared.AdminConfig())
	assert.NoError(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	assert.NoError(t, replica.Via(proxy.URL(), proxy.CA()))
	o, err := cluster.DeployedOptions(spec, replica, cluster.ManagerOptions{Binary: shared.Binary,
		Args: slices.Concat([]string{"--secure-port=0", "--config-reload-quiet-period=0"}, fleet.ShortTimings, args)})
	assert.NoError(t, err)
	m, err := shared.StartBare(replica, o)
	assert.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, m.Tail(60))
		}
		_ = m.Signal(syscall.SIGTERM)
		_ = m.Stop(context.Background(), 30*time.Second)
	})
	return m, proxy
}

// recorded returns the workloads on which a manager has recorded something.
func (s *testNamespace) recorded(ctx context.Context) (names []string) {
	s.t.Helper()
	for _, resource := range s.workloads {
		o, err := shared.Objects.Resource(resource).Namespace(s.namespace).Get(ctx, resource.Resource, metav1.GetOptions{})
		assert.NoError(s.t, err)
		if _, recorded := o.GetAnnotations()[fleet.StateAnnotation]; recorded {
			names = append(names, resource.Resource)
		}
	}
	return names
}
