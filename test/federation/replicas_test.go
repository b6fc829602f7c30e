// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// runPods waits until a member has so many Pods, and plays scheduler and kubelet: so many are ready, and the
// others have had no Node for long.
func (m *members) runPods(admin kubernetes.Interface, pods, ready int) {
	m.Helper()
	fleet.Eventually(fleet.Within(m.ctx, m.T, fleet.Patience), m.T, func() error {
		list, err := admin.CoreV1().Pods(m.shop).List(m.ctx, metav1.ListOptions{LabelSelector: "app=d"})
		if err != nil {
			return err
		}
		if len(list.Items) != pods {
			return fmt.Errorf("%d Pods, want %d", len(list.Items), pods)
		}
		for i := range list.Items {
			status := &list.Items[i].Status
			status.Phase, status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			if i >= ready {
				status.Phase, status.Conditions = corev1.PodPending, []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
					Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.NewTime(time.Now().Add(-5 * time.Minute))}}
			}
			if _, err := admin.CoreV1().Pods(m.shop).UpdateStatus(m.ctx, &list.Items[i], metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestReplicasThatFindNoNodeMove spreads replicas, and moves those that find no Node.
func TestReplicasThatFindNoNodeMove(t *testing.T) {
	m := newMembers(t, 4*fleet.Patience, cluster.Options{}, "namespaces", "deployments", "pods")
	shared.RunLeader(m.ctx, t, "--controllers=*,federation", "--federation-unsafe-endpoints")
	m.waitForCondition("c1", "Ready=True")
	m.waitForCondition("c2", "Ready=True")
	m.shop = shared.NewNamespace(m.ctx, t, nil)
	m.federateNamespace(m.shop)
	placed, _, _ := strings.Cut(deployment, ", "+bothMembers)
	d := m.create(placed + ", placement: {}}")
	preference := m.create("kind: ReplicaSchedulingPreference, metadata: {name: d}, spec: {targetKind: FederatedDeployment, totalReplicas: 4}")
	m.waitForObject(m.c1, deployments, m.shop, "d", hasField(2, "spec", "replicas"))
	m.waitForObject(m.c2, deployments, m.shop, "d", hasField(2, "spec", "replicas"))
	m.waitForStatus(d, "c1= c2=")

	m.runPods(shared.Admin, 2, 2)
	m.runPods(m.admin2, 2, 1)
	m.waitForObject(m.c1, deployments, m.shop, "d", hasField(2, "status", "readyReplicas"))
	m.waitForObject(m.c2, deployments, m.shop, "d", hasField(1, "status", "readyReplicas"))
	m.patch(preference, `{"spec":{"totalReplicas":5}}`) // or what runs is read after two minutes
	m.waitForObject(m.c1, deployments, m.shop, "d", hasField(4, "spec", "replicas"))
	m.waitForObject(m.c2, deployments, m.shop, "d", hasField(1, "spec", "replicas"))
}
