// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install tests the chart with Helm on a real API server.
package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/cli"
	"helm.sh/helm/v4/pkg/kube"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

var shared *cluster.Cluster

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var err error
	if shared, err = cluster.Start(ctx, cluster.Options{Progress: os.Stderr}); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		return 1
	}
	defer func() { _ = shared.Stop() }()
	return m.Run()
}

// TestReleaseFromInstallToReinstall does what a user does with Helm. No managers run: the test names
// the leader, and writes as one Pod and the other. The fence must tell them apart whenever it is
// installed, and Helm must leave alone what managers have written.
func TestReleaseFromInstallToReinstall(t *testing.T) {
	for _, home := range []string{"kube-system", "ops"} {
		t.Run(home, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			r := newRelease(t, home)
			r.install(t)
			r.recordLeader(ctx, t)
			r.expectFence(ctx, t)

			r.upgrade(t, map[string]any{"replicaCount": 3, "compat": []any{"reloader"}})
			deployment, err := r.admin.AppsV1().Deployments(home).Get(ctx, "quartermaster", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if *deployment.Spec.Replicas != 3 || !strings.Contains(fmt.Sprint(deployment.Spec.Template.Spec.Containers[0].Args), "--compat=reloader") {
				t.Errorf("not upgraded: %v", deployment.Spec)
			}
			r.expectState(ctx, t)
			r.expectFence(ctx, t)

			r.uninstall(t)
			r.expectNamespace(ctx, t)
			policies, err := r.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(ctx, metav1.ListOptions{})
			if err != nil || len(policies.Items) > 0 {
				t.Errorf("after helm uninstall there are %d policies (%v)", len(policies.Items), err)
			}
			if _, err := r.admin.AppsV1().Deployments(home).Get(ctx, "quartermaster", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("after helm uninstall the Deployment is there (%v)", err)
			}

			r.install(t)
			r.expectNewLease(ctx, t)
			r.expectFence(ctx, t)
			r.uninstall(t)
		})
	}
}

// TestReleaseTakesOverFromKustomize follows the chart's README.
func TestReleaseTakesOverFromKustomize(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	r := newRelease(t, "kube-system")
	if _, err := shared.Kubectl(ctx, "apply", "-k", filepath.Join("..", "..", "..", "deploy")); err != nil {
		t.Fatal(err)
	}
	r.recordLeader(ctx, t)
	before, err := r.admin.AppsV1().Deployments(r.home).Get(ctx, "quartermaster", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	r.install(t, func(install *action.Install) { install.TakeOwnership, install.ForceConflicts = true, true })
	after, err := r.admin.AppsV1().Deployments(r.home).Get(ctx, "quartermaster", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if after.UID != before.UID {
		t.Error("the Deployment is another one")
	}
	r.expectState(ctx, t)
	r.expectFence(ctx, t)

	// kubectl still owns the fields.
	values := map[string]any{"replicaCount": 3}
	if err := r.tryUpgrade(t, values, false); err == nil || !strings.Contains(err.Error(), "conflict") {
		t.Errorf("an upgrade without --force-conflicts: %v", err)
	}
	if err := r.tryUpgrade(t, values, true); err != nil {
		t.Error(err)
	}
	r.uninstall(t)
	r.expectNamespace(ctx, t)
}

// TestReleaseTakesOverWhatUninstallingKeeps follows the chart's README.
func TestReleaseTakesOverWhatUninstallingKeeps(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	r := newRelease(t, "ops")
	r.install(t)
	r.recordLeader(ctx, t)
	r.uninstall(t)

	takeOwnership := func(install *action.Install) { install.TakeOwnership = true }
	r.name = "another"
	r.install(t, takeOwnership)
	r.expectNewLease(ctx, t)
	r.expectFence(ctx, t)
	r.uninstall(t)

	r.name = "quartermaster" // for the tests that follow
	r.install(t, takeOwnership)
	r.uninstall(t)
	r.expectNamespace(ctx, t)
}

// release is a release of the chart.
type release struct {
	name                  string
	home, leaderNamespace string
	admin                 kubernetes.Interface
	config                *action.Configuration
}

const (
	leaderAnnotation = "quartermaster.dev/leader-pod"
	leaderPod        = "leader_0b7d8d5c-5a53-4b7e-8f2c-3b7a3f1f9f10"
)

func newRelease(t *testing.T, home string) *release {
	t.Helper()
	settings := cli.New()
	settings.KubeConfig = filepath.Join(t.TempDir(), "kubeconfig")
	settings.SetNamespace(home)
	if err := shared.WriteKubeconfig(settings.KubeConfig); err != nil {
		t.Fatal(err)
	}
	r := &release{name: "quartermaster", home: home, leaderNamespace: "quartermaster-leader", config: action.NewConfiguration()}
	if home != "kube-system" {
		r.leaderNamespace += "-" + home
	}
	if err := r.config.Init(settings.RESTClientGetter(), home, "secret"); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.admin, err = kubernetes.NewForConfig(shared.AdminConfig()); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *release) install(t *testing.T, options ...func(*action.Install)) {
	t.Helper()
	install := action.NewInstall(r.config)
	install.ReleaseName, install.Namespace, install.CreateNamespace = r.name, r.home, true
	install.WaitStrategy = kube.HookOnlyStrategy
	for _, option := range options {
		option(install)
	}
	chart, err := loader.LoadDir(filepath.Join("..", "..", "..", "deploy", "helm", "quartermaster"))
	if err == nil {
		_, err = install.Run(chart, nil)
	}
	if err != nil {
		t.Fatal("helm install:", err)
	}
}

func (r *release) upgrade(t *testing.T, values map[string]any) {
	t.Helper()
	if err := r.tryUpgrade(t, values, false); err != nil {
		t.Fatal("helm upgrade:", err)
	}
}

func (r *release) tryUpgrade(t *testing.T, values map[string]any, force bool) error {
	t.Helper()
	upgrade := action.NewUpgrade(r.config)
	upgrade.Namespace, upgrade.WaitStrategy, upgrade.ForceConflicts = r.home, kube.HookOnlyStrategy, force
	chart, err := loader.LoadDir(filepath.Join("..", "..", "..", "deploy", "helm", "quartermaster"))
	if err == nil {
		_, err = upgrade.Run(r.name, chart, values)
	}
	return err
}

func (r *release) uninstall(t *testing.T) {
	t.Helper()
	uninstall := action.NewUninstall(r.config)
	uninstall.WaitStrategy = kube.StatusWatcherStrategy
	uninstall.Timeout = time.Minute
	if _, err := uninstall.Run(r.name); err != nil {
		t.Fatal("helm uninstall:", err)
	}
}

// recordLeader writes what a manager writes that begins to lead.
func (r *release) recordLeader(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := r.admin.CoordinationV1().Leases(r.home).Patch(ctx, "quartermaster", types.MergePatchType,
		[]byte(`{"spec":{"holderIdentity":"`+leaderPod+`","leaseDurationSeconds":15}}`), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.admin.CoreV1().Namespaces().Patch(ctx, r.leaderNamespace, types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"`+leaderAnnotation+`":"`+leaderPod+`"}}}`), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// expectState checks that what lead has written is there.
func (r *release) expectState(ctx context.Context, t *testing.T) {
	t.Helper()
	lease, err := r.admin.CoordinationV1().Leases(r.home).Get(ctx, "quartermaster", metav1.GetOptions{})
	if err != nil {
		t.Error(err)
	} else if ptr.Deref(lease.Spec.HolderIdentity, "") != leaderPod {
		t.Errorf("the holder of the Lease is %v", lease.Spec.HolderIdentity)
	}
	r.expectNamespace(ctx, t)
}

// expectNewLease checks that nobody holds the Lease of a new installation, so that its first replica
// leads at once.
func (r *release) expectNewLease(ctx context.Context, t *testing.T) {
	t.Helper()
	lease, err := r.admin.CoordinationV1().Leases(r.home).Get(ctx, "quartermaster", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity != nil {
		t.Errorf("after an installation the Lease is %v (%v)", lease.Spec, err)
	}
}

// expectNamespace checks that the Namespace of the fence is there, as lead has left it.
func (r *release) expectNamespace(ctx context.Context, t *testing.T) {
	t.Helper()
	namespace, err := r.admin.CoreV1().Namespaces().Get(ctx, r.leaderNamespace, metav1.GetOptions{})
	if err != nil {
		t.Error(err)
	} else if namespace.Annotations[leaderAnnotation] != leaderPod || namespace.DeletionTimestamp != nil {
		t.Errorf("the Namespace of the fence is %v", namespace.ObjectMeta)
	}
}

// expectFence checks that the leader may write a Deployment, and that the fence refuses a standby.
func (r *release) expectFence(ctx context.Context, t *testing.T) {
	t.Helper()
	shop := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "shop-" + r.home, Namespace: "default"}, Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To[int32](0), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "shop"}},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "shop"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "shop", Image: "shop"}}}}}}
	if _, err := r.admin.AppsV1().Deployments("default").Create(ctx, shop, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	write := func(client kubernetes.Interface) error {
		_, err := client.AppsV1().Deployments("default").Patch(ctx, shop.Name, types.MergePatchType,
			[]byte(`{"metadata":{"annotations":{"by":"a manager"}}}`), metav1.PatchOptions{})
		return err
	}
	leader, standby := r.podClient(ctx, t, "leader"), r.podClient(ctx, t, "standby")
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		// The API server needs a moment for a policy, and for roles.
		refused := write(standby)
		return refused != nil && strings.Contains(refused.Error(), "quartermaster-fence: written by Pod standby, the leader is '"+leaderPod+"'"), nil
	})
	if err != nil {
		t.Fatalf("the fence does not refuse a standby: %v", errors.Join(err, write(standby)))
	}
	if err := write(leader); err != nil {
		t.Errorf("the leader may not write: %v", err)
	}
}

// podClient returns a client with the token of a Pod of the manager.
func (r *release) podClient(ctx context.Context, t *testing.T, name string) kubernetes.Interface {
	t.Helper()
	pods := r.admin.CoreV1().Pods(r.home)
	// An earlier Pod of this name belongs to the ServiceAccount of an earlier release.
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	pod, err := pods.Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		ServiceAccountName: "quartermaster", Containers: []corev1.Container{{Name: "manager", Image: "quartermaster"}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token, err := r.admin.CoreV1().ServiceAccounts(r.home).CreateToken(ctx, "quartermaster", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: name, UID: pod.UID}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(shared.AdminConfig())
	config.BearerToken = token.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}
