// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// objectsPerType is how many objects of each type migrate.
const objectsPerType = 20

const podTemplate = "selector: {matchLabels: {app: x}}, template: {metadata: {labels: {app: x}}, spec: {containers: [{name: c, image: example.com/c}]}}"

// migratedSpecs are the specs of federated objects by their kinds. Overrides are of all sorts that
// KubeFed and federation take in the same way.
var migratedSpecs = map[string]string{
	"Namespace":      "template: {metadata: {labels: {team: a}}}",
	"ConfigMap":      "template: {data: {a: b}}, overrides: [{clusterName: c2, clusterOverrides: [{path: /data/a, value: c}, {op: add, path: /metadata/annotations, value: {x: 'y'}}]}]",
	"Secret":         "template: {type: Opaque, stringData: {a: b}}",
	"Service":        "template: {spec: {type: NodePort, selector: {app: x}, ports: [{name: http, port: 80}]}}",
	"ServiceAccount": "template: {automountServiceAccountToken: false}",
	"Deployment":     "retainReplicas: true, template: {metadata: {labels: {app: x}}, spec: {replicas: 1, " + podTemplate + "}}, overrides: [{clusterName: c1, clusterOverrides: [{path: /spec/template/spec/containers/0/image, value: example.com/d}]}]",
	"ReplicaSet":     "template: {spec: {replicas: 0, " + podTemplate + "}}, overrides: [{clusterName: c2, clusterOverrides: [{path: /spec/replicas, value: 1}]}]",
	"Job":            "template: {spec: {manualSelector: true, suspend: true, " + strings.Replace(podTemplate, "spec: {", "spec: {restartPolicy: Never, ", 1) + "}}",
	"Ingress":        "template: {spec: {defaultBackend: {service: {name: x, port: {number: 80}}}}}",
	"ClusterRole":    "template: {rules: [{apiGroups: [''], resources: [pods], verbs: [get]}]}, overrides: [{clusterName: c2, clusterOverrides: [{op: add, path: /metadata/labels, value: {a: b}}]}]",
}

// federateAll creates all federated objects.
func (k *kubefed) federateAll() (objects []*unstructured.Unstructured) {
	k.Helper()
	for i := range objectsPerType {
		name := fmt.Sprintf("shop-%d", i)
		if _, err := shared.Admin.CoreV1().Namespaces().Create(k.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			k.Fatal(err)
		}
		for kind, spec := range migratedSpecs {
			u := object(k.T, fmt.Sprintf("kind: Federated%s, metadata: {name: %s}, spec: {%s, placement: {clusterSelector: {}}}", kind, name, spec))
			if kind != "ClusterRole" {
				u.SetNamespace(name)
			}
			created, err := client(u).Create(k.ctx, u, metav1.CreateOptions{})
			assert.NoError(k, err)
			objects = append(objects, created)
		}
	}
	return objects
}

// waitUntilPropagated waits until the objects are well in both members, in their present generation, and
// returns the generations.
func (k *kubefed) waitUntilPropagated(objects []*unstructured.Unstructured) map[string]int64 {
	k.Helper()
	generations := map[string]int64{}
	for _, u := range objects {
		fleet.Eventually(fleet.Within(k.ctx, k.T, fleet.Patience), k.T, func() error {
			current, err := client(u).Get(k.ctx, u.GetName(), metav1.GetOptions{})
			if err != nil {
				return err
			}
			status := policy.ReadFederated(current).Status
			if status.ObservedGeneration != current.GetGeneration() || len(status.Conditions) != 1 || status.Conditions[0].Status != "True" || len(status.Clusters) != 2 {
				return fmt.Errorf("%s %s: %v", current.GetKind(), current.GetName(), current.Object["status"])
			}
			generations[current.GetKind()+" "+current.GetName()] = current.GetGeneration()
			return nil
		})
	}
	return generations
}

// expectTakeover checks that a manager that has begun to lead writes nothing in the members, changes no
// spec, and then propagates a change of an object of each type.
func (k *kubefed) expectTakeover(objects []*unstructured.Unstructured, tails map[string][]*cluster.AuditTail, before map[string]int64, label string) {
	k.Helper()
	// In this time each looks at all objects, and after availableDelay once more.
	fleet.Wait(k.ctx, 45*time.Second)
	if writes := k.memberWrites(tails); len(writes) > 0 {
		k.Errorf("%d writes in members:\n%s", len(writes), strings.Join(writes, "\n"))
	}
	if after := k.waitUntilPropagated(objects); !maps.Equal(before, after) {
		k.Errorf("specs have changed: %v, before %v", after, before)
	}
	for _, u := range objects[:len(migratedSpecs)] {
		k.patch(u, fmt.Sprintf(`{"spec":{"template":{"metadata":{"labels":{"by":%q}}}}}`, label))
	}
	k.waitUntilPropagated(objects)
	const want = 2 * 10
	if writes := k.memberWrites(tails); len(writes) != want || slices.ContainsFunc(writes, func(w string) bool { return !strings.Contains(w, "shop-0") }) {
		k.Errorf("%d writes in members after a change of an object of each type, want %d:\n%s", len(writes), want, strings.Join(writes, "\n"))
	}
	k.Logf("%s has taken over %d objects", label, len(objects))
}

// TestLongKubeFedMigration hands over what KubeFed's manager has propagated, and back.
func TestLongKubeFedMigration(t *testing.T) {
	k := newKubeFed(t)
	kubeFedManager := k.runKubeFed()
	k.waitForCondition("c1", "Ready=True")
	k.waitForCondition("c2", "Ready=True")
	objects := k.federateAll()
	k.waitUntilPropagated(objects)
	fleet.Wait(k.ctx, 30*time.Second) // until it has looked at all again
	before := k.waitUntilPropagated(objects)
	assert.NoError(t, kubeFedManager.Stop(k.ctx, 30*time.Second))
	tails := k.tailAudits()
	manager := k.runOurs()
	token, err := shared.AdminToken(k.ctx)
	assert.NoError(t, err)
	fleet.Eventually(k.ctx, t, func() error { return checkIdle(manager, token, 2) })
	k.expectTakeover(objects, tails, before, "federation")

	before = k.waitUntilPropagated(objects)
	if err := manager.Stop(k.ctx, 30*time.Second); err != nil || manager.ExitCode() != 0 {
		t.Fatalf("%v, exit code %d", err, manager.ExitCode())
	}
	shared.FreeLease(t, manager)
	tails = k.tailAudits()
	k.runKubeFed()
	k.expectTakeover(objects, tails, before, "KubeFed")
}

// checkIdle returns nil if a manager has listed all types in its members and has nothing to do there.
func checkIdle(m *cluster.Manager, token string, members int) error {
	_, body, err := fleet.Get(m.SecureURL+"/debug/controllers/federation", token)
	if err != nil {
		return err
	}
	var status struct {
		Details struct {
			Clusters []struct {
				Ready bool
				Types map[string]string
				Queue int
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &status); err != nil {
		return err
	}
	ready := 0
	for _, c := range status.Details.Clusters {
		synced := 0
		for _, state := range c.Types {
			if state == "Synced" {
				synced++
			}
		}
		if c.Ready && synced == len(migratedSpecs) && c.Queue == 0 {
			ready++
		}
	}
	if ready != members {
		return fmt.Errorf("it does not work in all members yet: %s", body)
	}
	return nil
}
