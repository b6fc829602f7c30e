// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	bothMembers = "placement: {clusters: [{name: c1}, {name: c2}]}"
	deployment  = "kind: FederatedDeployment, metadata: {name: d}, spec: {template: {metadata: {labels: {app: d}}, spec: {replicas: 0, selector: {matchLabels: {app: d}}, " +
		"template: {metadata: {labels: {app: d}}, spec: {containers: [{name: c, image: example.com/c}]}}}}, " + bothMembers + ", overrides: [{clusterName: c2, clusterOverrides: [{path: /spec/replicas, value: 3}]}]}"
)

// expectRetained checks that what belongs to a member stays when the federated object changes.
func (m *members) expectRetained() {
	m.Helper()
	s := m.create("kind: FederatedService, metadata: {name: web}, spec: {template: {spec: {type: NodePort, ports: [{name: http, port: 80}]}}, " + bothMembers + "}")
	scaled, _, _ := strings.Cut(deployment, ", overrides") // which would win
	d := m.create(strings.NewReplacer("{name: d}", "{name: scaled}", "spec: {template: {metadata", "spec: {retainReplicas: true, template: {metadata").Replace(scaled) + "}")
	m.waitForStatus(s, "c1= c2=")
	m.waitForStatus(d, "c1= c2=")
	spec := func(member dynamic.Interface, resource schema.GroupVersionResource, name string) map[string]any {
		u, err := member.Resource(resource).Namespace("shop").Get(m.ctx, name, metav1.GetOptions{})
		assert.NoError(m, err)
		return u.Object["spec"].(map[string]any)
	}
	before := map[dynamic.Interface]map[string]any{}
	for _, member := range []dynamic.Interface{m.c1, m.c2} {
		before[member] = spec(member, services, "web")
		if _, err := member.Resource(deployments).Namespace("shop").Patch(m.ctx, "scaled", types.MergePatchType, []byte(`{"spec":{"replicas":7}}`), metav1.PatchOptions{}); err != nil {
			m.Fatal(err)
		}
	}
	m.patch(s, `{"spec":{"template":{"metadata":{"labels":{"x":"y"}}}}}`)
	m.patch(d, `{"spec":{"template":{"metadata":{"labels":{"x":"y"}}}}}`)
	changed := func(u *unstructured.Unstructured) bool { return managed(u) && u.GetLabels()["x"] == "y" }
	for member, before := range before {
		m.waitForObject(member, services, "shop", "web", changed)
		if after := spec(member, services, "web"); before["clusterIP"] == nil || !reflect.DeepEqual(before, after) {
			m.Errorf("the Service is %v, was %v", after, before)
		}
		m.waitForObject(member, deployments, "shop", "scaled", changed)
		if replicas := spec(member, deployments, "scaled")["replicas"]; replicas != int64(7) {
			m.Errorf("%v replicas", replicas)
		}
	}
}

// TestObjectsArePropagated goes through the life of federated objects.
func TestObjectsArePropagated(t *testing.T) {
	// c2 has no batch/v1 and lets the manager have no Secrets.
	m := newMembers(t, 4*fleet.Patience, cluster.Options{WithoutControllerManager: true, APIServerArgs: []string{"--runtime-config=batch/v1=false"}},
		"namespaces", "configmaps", "services", "serviceaccounts", "deployments", "replicasets", "ingresses", "clusterroles", "jobs")
	m.configure(quickConfig)
	shared.RunLeader(m.ctx, t, "--controllers=*,federation", "--federation-unsafe-endpoints")
	m.join("c3", "https://127.0.0.1:1", nil, " ") // its Secret has no token
	m.waitForCondition("c1", "Ready=True")
	m.waitForCondition("c2", "Ready=True")
	m.waitForCondition("c3", "ConfigMalformed=True")
	if _, err := shared.Admin.CoreV1().Namespaces().Create(m.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const all = "placement: {clusters: [{name: c1}, {name: c2}, {name: c3}]}"
	federatedNamespace := m.create("kind: FederatedNamespace, metadata: {name: shop}, spec: {" + all + "}")
	m.waitForObject(m.c1, namespaces, "", "shop", managed)
	m.waitForObject(m.c2, namespaces, "", "shop", managed)
	m.waitForStatus(federatedNamespace, "c1= c2= c3=ClusterNotReady")

	f := m.create("kind: FederatedConfigMap, metadata: {name: f}, spec: {template: {data: {a: b}}, " + all + "}")
	m.waitForObject(m.c1, configMaps, "shop", "f", hasField("b", "data", "a"))
	m.waitForObject(m.c2, configMaps, "shop", "f", hasField("b", "data", "a"))
	m.waitForStatus(f, "c1= c2= c3=ClusterNotReady")
	m.patch(f, `{"spec":{"template":{"data":{"a":"c"}},`+`"placement":{"clusters":[{"name":"c1"},{"name":"c2"}]}}}`)
	m.waitForObject(m.c2, configMaps, "shop", "f", hasField("c", "data", "a"))
	m.waitForStatus(f, "c1= c2=")

	d := m.create(deployment)
	m.waitForObject(m.c1, deployments, "shop", "d", hasField(0, "spec", "replicas"))
	m.waitForObject(m.c2, deployments, "shop", "d", hasField(3, "spec", "replicas"))
	m.waitForStatus(d, "c1= c2=")

	// A type that a member lacks, and one that it refuses.
	j := m.create("kind: FederatedJob, metadata: {name: j}, spec: {template: {spec: {suspend: true, template: {spec: {restartPolicy: Never, containers: [{name: c, image: example.com/c}]}}}}, " + bothMembers + "}")
	m.waitForObject(m.c1, jobs, "shop", "j", managed)
	m.waitForStatus(j, "c1= c2=APINotAvailable")
	m.patch(j, `{"spec":{"template":{"metadata":{"labels":{"x":"y"}}}}}`)
	m.waitForObject(m.c1, jobs, "shop", "j", func(u *unstructured.Unstructured) bool { return managed(u) && u.GetLabels()["x"] == "y" })
	s := m.create("kind: FederatedSecret, metadata: {name: s}, spec: {template: {stringData: {a: b}}, " + bothMembers + "}")
	m.waitForObject(m.c1, secrets, "shop", "s", managed)
	m.waitForStatus(s, "c1= c2=RetrievalFailed")

	// These members, and c3, stop no write in another.
	var extra []*unstructured.Unstructured
	for i := range 20 {
		for _, kind := range []string{"Job", "Secret"} {
			extra = append(extra, m.create(fmt.Sprintf("kind: Federated%s, metadata: {name: more-%d}, spec: {%s, %s}", kind, i, migratedSpecs[kind], all)))
		}
	}
	for _, u := range extra {
		m.waitForObject(m.c1, map[string]schema.GroupVersionResource{"FederatedJob": jobs, "FederatedSecret": secrets}[u.GetKind()], "shop", u.GetName(), managed)
		m.patch(u, `{"spec":{"placement":{"clusters":[{"name":"c1"}]}}}`) // the end of the Namespace would wait for the others
	}

	m.expectRetained()

	// Drift is put right, and a managed object of nobody loses its label.
	if _, err := m.c2.Resource(configMaps).Namespace("shop").Patch(m.ctx, "f", types.MergePatchType, []byte(`{"data":{"a":"mine"}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	m.waitForObject(m.c2, configMaps, "shop", "f", hasField("c", "data", "a"))
	stray := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "stray", "labels": map[string]any{policy.ManagedLabel: "true"}}}}
	if _, err := m.c2.Resource(configMaps).Namespace("shop").Create(m.ctx, stray, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	m.waitForObject(m.c2, configMaps, "shop", "stray", func(u *unstructured.Unstructured) bool { return !managed(u) })

	// Placement removes, and so does deletion, with its options.
	m.patch(f, `{"spec":{"placement":{"clusters":[{"name":"c1"}]}}}`)
	m.waitForObject(m.c2, configMaps, "shop", "f", nil)
	m.waitForObject(m.c1, configMaps, "shop", "f", managed)
	m.waitForStatus(f, "c1=")
	m.patch(d, `{"metadata":{"annotations":{"kubefed.io/orphan":"true"}}}`)
	for _, u := range []*unstructured.Unstructured{f, d} {
		assert.NoError(t, client(u).Delete(m.ctx, u.GetName(), metav1.DeleteOptions{}))
	}
	m.waitForObject(m.c1, configMaps, "shop", "f", nil)
	for _, u := range []*unstructured.Unstructured{f, d} {
		fleet.Eventually(m.ctx, t, func() error {
			if _, err := client(u).Get(m.ctx, u.GetName(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return errors.Join(errors.New(u.GetName()+" is not gone"), err)
			}
			return nil
		})
	}
	m.waitForObject(m.c2, deployments, "shop", "d", func(u *unstructured.Unstructured) bool { return !managed(u) })

	// What an annotation says of the deletion reaches the member: its ReplicaSet stays.
	// Only in c1, since nobody in c2 collects garbage.
	o := m.create(strings.NewReplacer("{name: d}", "{name: o}", "{name: c1}, {name: c2}", "{name: c1}").Replace(deployment))
	m.waitForObject(m.c1, deployments, "shop", "o", managed)
	replicaSets := func() int {
		list, err := shared.Admin.AppsV1().ReplicaSets("shop").List(m.ctx, metav1.ListOptions{})
		assert.NoError(t, err)
		return len(list.Items)
	}
	before := replicaSets()
	m.patch(o, `{"metadata":{"annotations":{"kubefed.io/deleteoption":"{\"propagationPolicy\":\"Orphan\"}"}}}`)
	assert.NoError(t, client(o).Delete(m.ctx, "o", metav1.DeleteOptions{}))
	m.waitForObject(m.c1, deployments, "shop", "o", nil)
	if after := replicaSets(); after < before {
		t.Errorf("%d ReplicaSets are left of %d", after, before)
	}

	// The host's own Namespace ends although its FederatedNamespace waits for c2.
	// Of clusters that are away or refuse the type, it would be waited for.
	m.patch(s, `{"spec":{"placement":{"clusters":[{"name":"c1"}]}}}`)
	m.waitForStatus(s, "c1=")
	m.patch(federatedNamespace, `{"spec":{"placement":{"clusters":[{"name":"c1"},{"name":"c2"}]}}}`)
	m.waitForStatus(federatedNamespace, "c1= c2=")
	assert.NoError(t, shared.Admin.CoreV1().Namespaces().Delete(m.ctx, "shop", metav1.DeleteOptions{}))
	m.waitForObject(m.c2, namespaces, "", "shop", func(u *unstructured.Unstructured) bool { return u.GetDeletionTimestamp() != nil })
	// Nobody else in c2 ends Namespaces.
	ending := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}
	if _, err := m.admin2.CoreV1().Namespaces().Finalize(m.ctx, ending, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	m.waitForObject(m.c2, namespaces, "", "shop", nil)
	m.waitForObject(m.c1, namespaces, "", "shop", nil)
}
