// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	home     = "kube-system"
	replicas = "app.kubernetes.io/name=quartermaster"

	patience = 4 * time.Minute // of a step: images may have to be pulled
)

// cluster is the cluster under test, and what was seen of the manager's Pods and its Lease.
type cluster struct {
	*kubernetes.Clientset

	config                            *rest.Config
	root, kubeconfig, image, workload string
	nodes                             int // on which Pods may run

	mu     sync.Mutex
	pods   []version[*corev1.Pod]
	leases []version[*coordinationv1.Lease]
}

// watch records every version of the replicas and of the Lease from now on.
func (c *cluster) watch(ctx context.Context, t *testing.T) {
	t.Helper()
	pods := informers.NewSharedInformerFactoryWithOptions(c, 0, informers.WithNamespace(home),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = replicas }))
	leases := informers.NewSharedInformerFactoryWithOptions(c, 0, informers.WithNamespace(home),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + fleet.LeaseName }))
	recordVersions(t, c, pods.Core().V1().Pods().Informer(), &c.pods)
	recordVersions(t, c, leases.Coordination().V1().Leases().Informer(), &c.leases)
	for _, f := range []informers.SharedInformerFactory{pods, leases} {
		f.Start(ctx.Done())
		f.WaitForCacheSync(ctx.Done())
		t.Cleanup(f.Shutdown)
	}
}

// recordVersions appends each version that the informer shows.
func recordVersions[T any](t *testing.T, c *cluster, informer cache.SharedIndexInformer, versions *[]version[T]) {
	t.Helper()
	add := func(object any, deleted bool) {
		if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = unknown.Obj
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		*versions = append(*versions, version[T]{at: time.Now(), deleted: deleted, object: object.(T)})
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { add(o, false) }, UpdateFunc: func(_, o any) { add(o, false) }, DeleteFunc: func(o any) { add(o, true) }})
	assert.NoError(t, err)
}

// recorded returns what was seen so far.
func (c *cluster) recorded() ([]version[*corev1.Pod], []version[*coordinationv1.Lease]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.pods), slices.Clone(c.leases)
}

// replicas returns the replicas that run.
func (c *cluster) replicas(ctx context.Context, t *testing.T) (live []corev1.Pod) {
	t.Helper()
	list, err := c.CoreV1().Pods(home).List(ctx, metav1.ListOptions{LabelSelector: replicas})
	assert.NoError(t, err)
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return !isLive(&pod) })
}

// leader returns the leader's Pod, and a standby's if there is one.
func (c *cluster) leader(ctx context.Context, t *testing.T) (leader, standby *corev1.Pod) {
	t.Helper()
	lease, err := c.CoordinationV1().Leases(home).Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	assert.NoError(t, err)
	for _, pod := range c.replicas(ctx, t) {
		if pod.Name == holderPod(lease) {
			leader = &pod
		} else {
			standby = &pod
		}
	}
	if leader == nil {
		t.Fatalf("the Lease names %q, which is no replica", holderPod(lease))
	}
	return leader, standby
}

// waitForRollout waits until a Deployment has been rolled out and none of its old Pods is left.
func (c *cluster) waitForRollout(ctx context.Context, t *testing.T, namespace, name string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		d, err := c.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		want := *d.Spec.Replicas
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.Replicas != want || s.UpdatedReplicas != want || s.AvailableReplicas != want {
			return fmt.Errorf("the rollout of %s has not ended: %+v", name, s)
		}
		pods, err := c.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(d.Spec.Selector)})
		if err == nil && len(pods.Items) != int(want) {
			err = fmt.Errorf("%s has %d Pods, not %d", name, len(pods.Items), want)
		}
		return err
	})
}

// expectHandover waits for the first handover after since, and checks whether the Lease was released before
// and that it took no longer than the bar.
func (c *cluster) expectHandover(ctx context.Context, t *testing.T, since time.Time, released bool, bar time.Duration) handover {
	t.Helper()
	var h handover
	fleet.Eventually(ctx, t, func() (err error) {
		_, leases := c.recorded()
		h, err = firstHandover(leases, since)
		return err
	})
	t.Logf("%s followed %q (released: %t) after %s", h.to, h.from, h.released, h.took.Round(time.Millisecond))
	if h.took > bar || released && !h.released {
		t.Errorf("this should take %s at most, released: %t", bar, released)
	}
	return h
}

// expectGoodEnds checks that every manager that ended since then ended with code 0.
func (c *cluster) expectGoodEnds(t *testing.T, since time.Time) {
	t.Helper()
	pods, _ := c.recorded()
	for _, bad := range failedExits(pods, since) {
		t.Error(bad)
	}
}

// expectSpread checks that replicas share a node only if there are too few nodes.
func (c *cluster) expectSpread(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := checkSpread(c.replicas(ctx, t), c.nodes); err != nil {
		t.Error(err)
	}
}

// podClient returns a client with the token of a Pod.
func (c *cluster) podClient(ctx context.Context, t *testing.T, pod *corev1.Pod) kubernetes.Interface {
	t.Helper()
	token, err := c.CoreV1().ServiceAccounts(home).CreateToken(ctx, pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}}}, metav1.CreateOptions{})
	assert.NoError(t, err)
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token.Status.Token
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	return client
}
