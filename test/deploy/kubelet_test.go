// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// kubelet runs the Pods of the manager's Deployment as processes on this machine, with their
// arguments, environment, ServiceAccount, ConfigMaps, readiness probe and grace period. It also
// acts as the scheduler.
type kubelet struct {
	node          string
	binaries      map[string]string // by image
	pods          map[types.UID]*podProcess
	lastHeartbeat time.Time // the last heartbeat of the node
	problems      []error
}

type podProcess struct {
	*cluster.Manager

	ready      bool
	terminated time.Time // when it was asked to terminate
}

const heartbeat = 5 * time.Second

// startKubelet starts a kubelet. The returned function stops it and returns its problems and the
// names of the Pods that it has run.
func startKubelet(ctx context.Context, t *testing.T, binaries map[string]string) (stop func() ([]string, error)) {
	t.Helper()
	k := &kubelet{node: "node-1", binaries: binaries, pods: map[types.UID]*podProcess{}}
	nodes := shared.Admin.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: k.node}}, metav1.CreateOptions{})
	if err == nil || apierrors.IsAlreadyExists(err) {
		_, err = nodes.PatchStatus(ctx, k.node, []byte(`{"status":{"conditions":[{"type":"Ready","status":"True","reason":"Test"}]}}`))
	}
	assert.NoError(t, err)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := k.syncPods(ctx); err != nil && ctx.Err() == nil {
				k.problems = append(k.problems, err)
			}
		}
	}()
	return func() ([]string, error) {
		cancel()
		<-done
		var names []string
		for _, p := range k.pods {
			names = append(names, p.Pod)
		}
		return names, errors.Join(k.problems...)
	}
}

// syncPods takes every Pod one step further.
func (k *kubelet) syncPods(ctx context.Context) error {
	if err := k.sendHeartbeat(ctx); err != nil {
		return err
	}
	list, err := shared.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster"})
	if err != nil {
		return err
	}
	var errs []error
	for i := range list.Items {
		pod := &list.Items[i]
		if metav1.GetControllerOf(pod) == nil {
			continue // belongs to another test
		}
		p := k.pods[pod.UID]
		switch {
		case pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil:
			err = shared.Admin.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: k.node}}, metav1.CreateOptions{})
		case p == nil && pod.DeletionTimestamp == nil:
			err = k.startPod(ctx, pod)
		case pod.DeletionTimestamp != nil:
			err = k.endPod(ctx, pod, p)
		case p.ExitCode() != -1:
			err = fmt.Errorf("%s ended with %d; its last lines:\n%s", pod.Name, p.ExitCode(), p.Tail(20))
		case !p.ready:
			err = k.probePod(ctx, pod, p)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// sendHeartbeat sends heartbeats, so that kube-controller-manager does not consider the node dead.
func (k *kubelet) sendHeartbeat(ctx context.Context) error {
	if time.Since(k.lastHeartbeat) < heartbeat {
		return nil
	}
	k.lastHeartbeat = time.Now()
	leases := shared.Admin.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: k.node},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &k.node, RenewTime: ptr.To(metav1.NowMicro()), LeaseDurationSeconds: ptr.To[int32](40)}}
	_, err := leases.Create(ctx, lease, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		renewal := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, lease.Spec.RenewTime.UTC().Format(metav1.RFC3339Micro))
		_, err = leases.Patch(ctx, k.node, types.MergePatchType, renewal, metav1.PatchOptions{})
	}
	return err
}

// startPod starts the Pod's process under the Pod's name, by which the audit log distinguishes
// processes.
func (k *kubelet) startPod(ctx context.Context, pod *corev1.Pod) error {
	container := pod.Spec.Containers[0]
	binary, ok := k.binaries[container.Image]
	if !ok {
		return fmt.Errorf("%s: no image %s", pod.Name, container.Image)
	}
	name := filepath.Join(shared.Dir(), pod.Name)
	if err := os.Symlink(binary, name); err != nil {
		return err
	}
	replica, err := shared.ReplicaOf(ctx, pod)
	if err != nil {
		return err
	}
	options, err := cluster.DeployedOptions(pod.Spec, replica, cluster.ManagerOptions{Binary: name})
	if err != nil {
		return err
	}
	if options.Args, err = mount(ctx, pod, options.Args); err != nil {
		return err
	}
	m, err := shared.StartBare(replica, options)
	if err == nil {
		k.pods[pod.UID] = &podProcess{Manager: m}
	}
	return err
}

// probePod runs the Pod's readiness probe, and updates the Pod's status when it succeeds.
func (k *kubelet) probePod(ctx context.Context, pod *corev1.Pod, p *podProcess) error {
	get := pod.Spec.Containers[0].ReadinessProbe.HTTPGet
	if get.Scheme != corev1.URISchemeHTTPS {
		return fmt.Errorf("%s: the probe uses %s", pod.Name, get.Scheme)
	}
	if fleet.Answers(p.SecureURL+get.Path, "", http.StatusOK) != nil {
		return nil // not yet
	}
	status := []byte(`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`)
	_, err := shared.Admin.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status")
	p.ready = err == nil
	return err
}

// endPod sends SIGTERM and, once the process has ended, removes the Pod.
func (k *kubelet) endPod(ctx context.Context, pod *corev1.Pod, p *podProcess) error {
	switch {
	case p == nil || p.ExitCode() != -1:
		if p != nil && p.ExitCode() != 0 {
			k.problems = append(k.problems, fmt.Errorf("%s ended with %d after SIGTERM; its last lines:\n%s", pod.Name, p.ExitCode(), p.Tail(20)))
		}
		err := shared.Admin.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	case p.terminated.IsZero():
		p.terminated = time.Now()
		return p.Signal(syscall.SIGTERM)
	case time.Since(p.terminated) > time.Duration(*pod.Spec.TerminationGracePeriodSeconds)*time.Second:
		p.Kill()
		return fmt.Errorf("%s has not ended within its grace period", pod.Name)
	}
	return nil
}
