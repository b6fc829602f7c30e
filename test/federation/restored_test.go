// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestRestoredHostHoldsRemovals places objects in c2 after the host was backed up, and restores the host.
func TestRestoredHostHoldsRemovals(t *testing.T) {
	m := newMembers(t, 12*fleet.Patience, cluster.Options{WithoutControllerManager: true})
	m.configure(quickConfig)
	for name, running := range map[string]bool{"while a manager runs": true, "while no manager runs": false} {
		t.Run(name, func(t *testing.T) {
			m := m.forSubtest(t)
			m.forbidRemovals() // which the other run has allowed
			m.shop = shared.NewNamespace(m.ctx, t, nil)
			m.federateNamespace(m.shop)
			replica, life := shared.NewReplica(m.ctx, t), 0
			start := func() *cluster.Manager {
				life++
				manager, err := shared.StartLife(replica, life, cluster.ManagerOptions{Args: []string{"--controllers=federation", "--federation-unsafe-endpoints"}})
				assert.NoError(t, err)
				fleet.StopAtEnd(t, manager)
				t.Cleanup(func() { shared.FreeLease(t, manager) })
				return manager
			}
			manager, backup := start(), "backup-"+m.shop
			named := m.create("kind: FederatedConfigMap, metadata: {name: named}, spec: {template: {data: {a: b}}, placement: {clusters: [{name: c1}]}}")
			labelled := m.create("kind: FederatedConfigMap, metadata: {name: labelled}, spec: {template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {" + m.shop + ": ''}}}}")
			before := m.create("kind: FederatedConfigMap, metadata: {name: before}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
			m.waitForStatus(named, "c1=")
			m.waitForStatus(before, "c1= c2=")
			m.stop(manager.Process) // it would not survive a slow backup
			assert.NoError(t, shared.Backup(m.ctx, backup))
			manager = start()
			m.patch(named, `{"spec":{"placement":{"clusters":[{"name":"c1"},{"name":"c2"}]}}}`)
			m.patch(object(t, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"metadata":{"labels":{%q:""}}}`, m.shop))
			after := m.create("kind: FederatedConfigMap, metadata: {name: after}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
			m.waitForStatus(named, "c1= c2=")
			m.waitForStatus(labelled, "c2=")
			m.waitForStatus(after, "c1= c2=")
			tails := m.tailAudits()
			if !running {
				m.stop(manager.Process)
			}
			assert.NoError(t, shared.Restore(m.ctx, backup))
			if running {
				if err := manager.Wait(m.ctx); manager.ExitCode() != 1 {
					t.Errorf("the manager ended with %d (%v), want 1", manager.ExitCode(), err)
				}
			}
			start()
			m.waitForStatus(named, "c1= c2=RemovalHeld")
			m.waitForStatus(labelled, "c2=RemovalHeld")
			m.waitForStatus(before, "c1= c2=")
			m.waitForObject(m.c2, configMaps, m.shop, after.GetName(), func(u *unstructured.Unstructured) bool { return !managed(u) })
			fleet.Wait(m.ctx, quietTime)
			for _, w := range m.memberWrites(tails) {
				if strings.Contains(w, " delete ") {
					t.Error(w)
				}
			}
			m.allowRemovals()
			m.waitForObject(m.c2, configMaps, m.shop, named.GetName(), nil)
			m.waitForObject(m.c2, configMaps, m.shop, labelled.GetName(), nil)
			if _, err := client(after).Get(m.ctx, after.GetName(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("the host was not restored: %v", err)
			}
		})
	}
}
