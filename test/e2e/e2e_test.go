// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	local "github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// How long nobody may lead at most. The lease duration is 15 s.
const (
	afterRelease = 5 * time.Second
	afterCrash   = 20 * time.Second
	// afterInstall counts from the first container's start. A replica that has to wait until the Lease
	// expires needs 15 s.
	afterInstall = 10 * time.Second
)

// The steps, in this order. Each leaves two replicas behind, of which one leads.
var steps = []struct {
	name string
	do   func(context.Context, *testing.T, *cluster, installer)
}{
	{"installing", install},
	{"Pod Security restricted", podSecurity},
	{"manager status", status},
	{"the fence", fence},
	{"reloads", reloads},
	{"rollout restart", restart},
	{"the disruption budget", budget},
	{"a drain", drain},
	{"a crash", crash},
	{"a deletion by force", forceDelete},
	{"scaling to 1, 2 and 3", scale},
	{"upgrade and roll back", upgradeAndRollBack},
	{"uninstalling in order, and installing again", uninstallInOrder},
	{"uninstalling at once, and installing again", uninstallAtOnce},
}

func TestOnACluster(t *testing.T) {
	c := &cluster{kubeconfig: os.Getenv("E2E_KUBECONFIG"), image: os.Getenv("E2E_IMAGE"),
		workload: cmp.Or(os.Getenv("E2E_WORKLOAD"), "registry.k8s.io/e2e-test-images/busybox:1.36.1-1")}
	if c.kubeconfig == "" || c.image == "" {
		t.Skip("make test-e2e names a cluster and an image")
	}
	ctx := t.Context()
	c.connect(ctx, t)
	c.watch(ctx, t)
	for _, way := range []struct {
		name string
		installer
	}{{"kustomize", &kustomize{c, t.TempDir()}}, {"chart", &chart{c}}} {
		t.Run(way.name, func(t *testing.T) {
			t.Cleanup(func() {
				if err := way.uninstall(context.Background()); err != nil {
					t.Error(err)
				}
				c.waitUntilGone(fleet.Within(context.Background(), t, patience), t)
			})
			for i, step := range steps {
				ok := t.Run(step.name, func(t *testing.T) { step.do(fleet.Within(t.Context(), t, patience), t, c, way.installer) })
				if i == 0 && !ok {
					t.Fatal("nothing is installed")
				}
			}
		})
	}
}

// connect connects to the cluster. It refuses one with an installation, which the tests would replace.
func (c *cluster) connect(ctx context.Context, t *testing.T) {
	t.Helper()
	var err error
	if c.root, err = controlplane.Root(); err != nil {
		t.Fatal(err)
	}
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.kubeconfig); err != nil {
		t.Fatal(err)
	}
	c.config.QPS = -1
	if c.Clientset, err = kubernetes.NewForConfig(c.config); err != nil {
		t.Fatal(err)
	}
	nodes, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	assert.NoError(t, err)
	for _, node := range nodes.Items {
		if !node.Spec.Unschedulable && !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Effect == corev1.TaintEffectNoSchedule }) {
			c.nodes++
		}
	}
	if c.nodes == 0 {
		t.Fatal("the cluster has no node on which Pods may run")
	}
	if _, err := c.AppsV1().Deployments(home).Get(ctx, "quartermaster", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Fatalf("the cluster has an installation already, or does not say (%v)", err)
	}
}

func install(ctx context.Context, t *testing.T, c *cluster, method installer) {
	t.Helper()
	begin := time.Now()
	assert.NoError(t, method.install(ctx))
	c.waitForRollout(ctx, t, home, "quartermaster")
	c.expectLeaderSoon(ctx, t, begin)
	c.expectSpread(ctx, t)
}

// expectLeaderSoon checks how soon somebody leads after the first container of a new installation has
// started.
func (c *cluster) expectLeaderSoon(ctx context.Context, t *testing.T, begin time.Time) {
	t.Helper()
	started := time.Now()
	for _, pod := range c.replicas(ctx, t) {
		for _, s := range pod.Status.ContainerStatuses {
			if s.State.Running != nil && s.State.Running.StartedAt.Time.Before(started) {
				started = s.State.Running.StartedAt.Time // in whole seconds
			}
		}
	}
	h := c.expectHandover(ctx, t, begin, false, patience)
	if leads := h.at.Sub(started); leads > afterInstall {
		t.Errorf("somebody leads %s after the first container's start, more than %s", leads, afterInstall)
	}
	t.Logf("%s leads %s after the first container's start", h.to, h.at.Sub(started).Round(time.Millisecond))
}

// podSecurity has the API server check a Pod of the Deployment in a namespace that is restricted.
func podSecurity(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	d, err := c.AppsV1().Deployments(home).Get(ctx, "quartermaster", metav1.GetOptions{})
	assert.NoError(t, err)
	namespace := c.newNamespace(ctx, t)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: d.Spec.Template.Spec.ServiceAccountName}}
	_, err = c.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{})
	assert.NoError(t, err)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "manager"}, Spec: d.Spec.Template.Spec}
	pod.Spec.PriorityClassName = "" // many clusters admit it in kube-system only
	if _, err := c.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Error(err)
	}
}

// newNamespace creates a namespace in which Pods are restricted.
func (c *cluster) newNamespace(ctx context.Context, t *testing.T) string {
	t.Helper()
	f := fleet.Fleet{Cluster: &local.Cluster{Admin: c.Clientset}}
	return f.NewNamespace(ctx, t, map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
}

func status(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	text, err := c.run(ctx, "", "go", "run", "./cmd/manager", "status")
	assert.NoError(t, err)
	leader, standby := c.leader(ctx, t)
	for _, want := range []string{"Leader:        " + leader.Name + " ", leader.Spec.NodeName, standby.Name, "Installed"} {
		if !strings.Contains(text, want) {
			t.Errorf("manager status does not say %q:\n%s", want, text)
		}
	}
}

// fence writes with the tokens of the leader and of a standby.
func fence(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	leader, standby := c.leader(ctx, t)
	write := func(pod *corev1.Pod) error {
		_, err := c.podClient(ctx, t, pod).AppsV1().Deployments(home).Patch(ctx, "quartermaster", types.MergePatchType,
			[]byte(`{"metadata":{"annotations":{"by":"a test"}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	if err := write(leader); err != nil {
		t.Errorf("the leader may not write: %v", err)
	}
	if err := write(standby); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), apifence.PolicyName+": written by Pod "+standby.Name) {
		t.Errorf("the write of a standby: %v", err)
	}
}

func restart(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	begin := time.Now()
	c.roll(ctx, t)
	c.expectHandover(ctx, t, begin, true, afterRelease)
	c.expectGoodEnds(t, begin)
	c.expectSpread(ctx, t)
}

func (c *cluster) roll(ctx context.Context, t *testing.T) {
	t.Helper()
	assert.NoError(t, c.kubectl(ctx, "-n="+home, "rollout", "restart", "deployment/quartermaster"))
	c.waitForRollout(ctx, t, home, "quartermaster")
}

// budget evicts both replicas at the same time.
func budget(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	begin, evicted := time.Now(), 0
	for _, pod := range c.replicas(ctx, t) {
		err := c.PolicyV1().Evictions(home).Evict(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: pod.Name}})
		if err == nil {
			evicted++
		} else if !apierrors.IsTooManyRequests(err) {
			t.Error(err)
		}
	}
	if evicted != 1 {
		t.Errorf("%d of 2 replicas were evicted at the same time", evicted)
	}
	c.waitForRollout(ctx, t, home, "quartermaster")
	c.expectGoodEnds(t, begin)
}

// drain drains the leader's node. Then, of two nodes, one has both replicas, until the next rollout.
func drain(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	if c.nodes < 2 {
		t.Skip("the cluster has one node")
	}
	leader, _ := c.leader(ctx, t)
	begin := time.Now()
	t.Cleanup(func() { assert.NoError(t, c.kubectl(context.Background(), "uncordon", leader.Spec.NodeName)) })
	assert.NoError(t, c.kubectl(ctx, "drain", leader.Spec.NodeName, "--pod-selector="+replicas, "--ignore-daemonsets"))
	c.expectHandover(ctx, t, begin, true, afterRelease)
	c.waitForRollout(ctx, t, home, "quartermaster")
	c.expectGoodEnds(t, begin)
	assert.NoError(t, c.kubectl(ctx, "uncordon", leader.Spec.NodeName))
	for range 3 {
		c.roll(ctx, t)
		c.expectSpread(ctx, t)
	}
}

// crash ends the leader's process. A signal of another container cannot kill process 1, but Go ends
// after SIGQUIT without any clean-up.
func crash(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	leader, _ := c.leader(ctx, t)
	security := unprivileged()
	security.RunAsUser = leader.Spec.SecurityContext.RunAsUser
	leader.Spec.EphemeralContainers = append(leader.Spec.EphemeralContainers, corev1.EphemeralContainer{
		EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "crash", Image: c.workload, Command: []string{"kill", "-QUIT", "1"}, SecurityContext: security},
		TargetContainerName:      "manager"})
	begin := time.Now()
	_, err := c.CoreV1().Pods(home).UpdateEphemeralContainers(ctx, leader.Name, leader, metav1.UpdateOptions{})
	assert.NoError(t, err)
	if h := c.expectHandover(ctx, t, begin, false, afterCrash); h.released {
		t.Error("the leader has released the Lease")
	}
	fleet.Eventually(ctx, t, func() error {
		pods, _ := c.recorded()
		if bad := failedExits(pods, begin); len(bad) != 1 {
			return fmt.Errorf("not one crash, but %q", bad)
		}
		return nil
	})
	c.waitForRollout(ctx, t, home, "quartermaster")
}

func forceDelete(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	leader, _ := c.leader(ctx, t)
	begin := time.Now()
	assert.NoError(t, c.CoreV1().Pods(home).Delete(ctx, leader.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	c.expectHandover(ctx, t, begin, false, afterCrash)
	c.waitForRollout(ctx, t, home, "quartermaster")
}

func scale(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	for _, n := range []int{1, 2, 3, 2} {
		begin := time.Now()
		assert.NoError(t, c.kubectl(ctx, "-n="+home, "scale", "deployment/quartermaster", fmt.Sprint("--replicas=", n)))
		c.waitForRollout(ctx, t, home, "quartermaster")
		c.expectGoodEnds(t, begin)
		fleet.Eventually(ctx, t, func() error {
			lease, err := c.CoordinationV1().Leases(home).Get(ctx, fleet.LeaseName, metav1.GetOptions{})
			if err == nil && !slices.ContainsFunc(c.replicas(ctx, t), func(pod corev1.Pod) bool { return pod.Name == holderPod(lease) }) {
				err = fmt.Errorf("of %d replicas none leads", n)
			}
			return err
		})
	}
}

func upgradeAndRollBack(ctx context.Context, t *testing.T, c *cluster, method installer) {
	for _, step := range []struct {
		do           func(context.Context) error
		wantUpgraded bool
	}{{method.upgrade, true}, {method.rollBack, false}} {
		begin := time.Now()
		assert.NoError(t, step.do(ctx))
		c.waitForRollout(ctx, t, home, "quartermaster")
		for _, pod := range c.replicas(ctx, t) {
			if slices.Contains(pod.Spec.Containers[0].Args, upgradeFlag) != step.wantUpgraded {
				t.Errorf("%s has the arguments %q", pod.Name, pod.Spec.Containers[0].Args)
			}
		}
		c.expectHandover(ctx, t, begin, true, afterRelease)
		c.expectGoodEnds(t, begin)
	}
}

// waitUntilGone waits until no replica is left.
func (c *cluster) waitUntilGone(ctx context.Context, t *testing.T) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		pods, err := c.CoreV1().Pods(home).List(ctx, metav1.ListOptions{LabelSelector: replicas})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d replicas are left", len(pods.Items))
		}
		return err
	})
}

// uninstallInOrder follows docs/operate/uninstall.md.
func uninstallInOrder(ctx context.Context, t *testing.T, c *cluster, method installer) {
	begin := time.Now()
	assert.NoError(t, c.kubectl(ctx, "-n="+home, "delete", "deployment/quartermaster", "--cascade=foreground"))
	c.waitUntilGone(ctx, t)
	c.expectGoodEnds(t, begin)
	lease, err := c.CoordinationV1().Leases(home).Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	if err != nil || holderPod(lease) != "" {
		t.Errorf("the Lease still names %q (%v)", holderPod(lease), err)
	}
	c.reinstall(ctx, t, method)
}

func uninstallAtOnce(ctx context.Context, t *testing.T, c *cluster, method installer) {
	c.reinstall(ctx, t, method)
}

// reinstall uninstalls and installs.
func (c *cluster) reinstall(ctx context.Context, t *testing.T, method installer) {
	t.Helper()
	assert.NoError(t, method.uninstall(ctx))
	install(ctx, t, c, method)
	fence(ctx, t, c, method)
}
