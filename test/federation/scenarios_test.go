// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const quietTime = 3 * time.Second // in which nothing may happen

var scenarios = map[string]func(*scenario){
	"a type that is switched off is not written until it is on again": func(s *scenario) {
		config := object(s.T, "kind: FederatedTypeConfig, metadata: {name: configmaps}")
		s.patch(config, `{"spec":{"propagation":"Disabled"}}`)
		s.waitForType("configmaps", "NotRunning")
		fleet.Wait(s.ctx, quietTime) // what is under way ends
		s.change("c", "")
		fleet.Wait(s.ctx, quietTime)
		s.forEachMember(func(member dynamic.Interface) { s.waitForContent(member, "b") })
		s.patch(config, `{"spec":{"propagation":"Enabled"}}`)
		s.forEachMember(func(member dynamic.Interface) { s.waitForContent(member, "c") })
	},
	"without the type of Namespaces nothing runs and nothing is removed": func(s *scenario) {
		config := object(s.T, "kind: FederatedTypeConfig, metadata: {name: namespaces}")
		existing, err := client(config).Get(s.ctx, "namespaces", metav1.GetOptions{})
		if err == nil {
			err = client(config).Delete(s.ctx, "namespaces", metav1.DeleteOptions{})
		}
		assert.NoError(s, err)
		s.waitForType("configmaps", "NotRunning")
		fleet.Wait(s.ctx, quietTime) // what is under way ends
		s.change("c", `,"placement":{"clusters":[{"name":"c1"}]}`)
		fleet.Wait(s.ctx, quietTime)
		s.forEachMember(func(member dynamic.Interface) { s.waitForContent(member, "b") })
		config.Object["spec"] = existing.Object["spec"]
		if _, err := client(config).Create(s.ctx, config, metav1.CreateOptions{}); err != nil {
			s.Fatal(err)
		}
		s.waitForContent(s.c1, "c")
		s.waitForObject(s.c2, configMaps, s.shop, "f", nil)
	},
	"a malformed selector removes nothing": func(s *scenario) {
		s.change("c", `,"placement":{"clusters":null,"clusterSelector":{"matchExpressions":[{"key":"a","operator":"Near"}]}}`)
		s.waitForReason(policy.ComputePlacementFailed)
		fleet.Wait(s.ctx, quietTime)
		s.forEachMember(func(member dynamic.Interface) { s.waitForContent(member, "b") })
	},
	"without a FederatedNamespace an object is removed": func(s *scenario) {
		u := object(s.T, "kind: FederatedNamespace, metadata: {name: "+s.shop+"}")
		u.SetNamespace(s.shop)
		assert.NoError(s, client(u).Delete(s.ctx, s.shop, metav1.DeleteOptions{}))
		s.waitForReason(policy.NamespaceNotFederated)
		s.forEachMember(func(member dynamic.Interface) { s.waitForObject(member, configMaps, s.shop, "f", nil) })
	},
	"the host's own Namespace stays when it is deselected": func(s *scenario) {
		u := object(s.T, "kind: FederatedNamespace, metadata: {name: "+s.shop+"}")
		u.SetNamespace(s.shop)
		s.patch(u, `{"spec":{"placement":{"clusters":[{"name":"c2"}]}}}`)
		s.waitForObject(s.c1, namespaces, "", s.shop, func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
		s.waitForObject(s.c1, configMaps, s.shop, "f", nil)
		s.waitForContent(s.c2, "b")
	},
	"a Namespace that was there before stays when it is deselected": func(s *scenario) {
		name := shared.NewNamespace(s.ctx, s.T, nil)
		if _, err := s.admin2.CoreV1().Namespaces().Create(s.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			s.Fatal(err)
		}
		u := s.federateNamespace(name)
		s.waitForObject(s.c2, namespaces, "", name, managed)
		s.patch(u, `{"spec":{"placement":{"clusters":[]}}}`)
		s.waitForObject(s.c2, namespaces, "", name, func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
	},
	"what a member adds to an object stays": func(s *scenario) {
		s.patchByHand(s.c2, configMaps, s.shop, "f", `{"metadata":{"annotations":{"x":"y"},"finalizers":["example.com/mine"]}}`)
		s.change("c", "")
		s.waitForContent(s.c2, "c")
		s.waitForObject(s.c2, configMaps, s.shop, "f", func(u *unstructured.Unstructured) bool {
			return u.GetAnnotations()["x"] == "y" && len(u.GetFinalizers()) == 1
		})
		s.patchByHand(s.c2, configMaps, s.shop, "f", `{"metadata":{"finalizers":null}}`)
	},
	"labels that a member gives its Namespace stay": func(s *scenario) {
		s.patchByHand(s.c2, namespaces, "", s.shop, `{"metadata":{"labels":{"x":"y"}}}`)
		u := object(s.T, "kind: FederatedNamespace, metadata: {name: "+s.shop+"}")
		u.SetNamespace(s.shop)
		s.patch(u, `{"spec":{"template":{"metadata":{"labels":{"team":"a"}}}}}`)
		s.waitForObject(s.c2, namespaces, "", s.shop, func(u *unstructured.Unstructured) bool {
			return managed(u) && u.GetLabels()["x"] == "y" && u.GetLabels()["team"] == "a"
		})
	},
	"annotations of an override are put back and others stay": func(s *scenario) {
		const revision = "deployment.kubernetes.io/revision"
		s.create(strings.Replace(deployment, "{path: /spec/replicas, value: 3}", "{op: add, path: /metadata/annotations, value: {foo: bar}}", 1))
		annotated := func(u *unstructured.Unstructured) bool {
			return u.GetAnnotations()["foo"] == "bar" && u.GetAnnotations()[revision] != ""
		}
		s.waitForObject(s.c2, deployments, s.shop, "d", annotated)
		fleet.Wait(s.ctx, quietTime)
		tails := s.tailAudits()
		s.patchByHand(s.c2, deployments, s.shop, "d", `{"metadata":{"annotations":{"foo":null}}}`)
		s.waitForObject(s.c2, deployments, s.shop, "d", annotated)
		fleet.Wait(s.ctx, quietTime)
		s.expectWrites(tails, "c2", 1)
	},
	"an override that fails stops its member only": func(s *scenario) {
		s.change("c", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"path":"/x/y","value":1}]}]`)
		s.waitForStatus(s.f, "c1=ApplyOverridesFailed c2=")
		s.waitForContent(s.c2, "c")
		s.waitForContent(s.c1, "b")
	},
	"an override leads to no other object": func(s *scenario) {
		for _, o := range []string{
			`"path":"/metadata","value":{"name":"f","namespace":"kube-system"}`, `"path":"x/kind","value":"Secret"`,
			`"path":"","value":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"f","namespace":"kube-system"}}`,
			`"path":"/metadata/resourceVersion","value":"1"`, `"path":"/apiVersion","value":"apps/v1"`,
		} {
			s.change("b", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{`+o+`}]}]`)
			s.waitForStatus(s.f, "c1=ApplyOverridesFailed c2=")
			s.change("b", `,"overrides":null`)
			s.waitForStatus(s.f, "c1= c2=")
		}
		s.waitForObject(s.c1, configMaps, "kube-system", "f", nil)
	},
	"an override cannot drop the label": func(s *scenario) {
		s.change("c", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"op":"add","path":"/metadata/labels","value":{"x":"y"}}]}]`)
		s.waitForContent(s.c1, "c") // and managed
	},
	"an object that was there is overwritten": func(s *scenario) {
		s.createStray("g", nil)
		s.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
		s.waitForObject(s.c2, configMaps, s.shop, "g", hasField("b", "data", "a"))
	},
	"an object that was there is not adopted if that is off": func(s *scenario) {
		s.configure(`{"syncController":{"adoptResources":"Disabled"}}`)
		s.createStray("g", nil)
		s.waitForStatus(s.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, "+bothMembers+"}"), "c1= c2=AlreadyExists")
		s.waitForObject(s.c2, configMaps, s.shop, "g", func(u *unstructured.Unstructured) bool { return !managed(u) })
	},
	"an object with the label false is left alone": func(s *scenario) {
		s.createStray("g", map[string]string{policy.ManagedLabel: "false"})
		s.waitForStatus(s.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, "+bothMembers+"}"), "c1= c2=ManagedLabelFalse")
		s.waitForObject(s.c2, configMaps, s.shop, "g", func(u *unstructured.Unstructured) bool { return u.Object["data"] == nil })
	},
	"an override of one member writes nothing in another": func(s *scenario) {
		tails := s.tailAudits()
		s.change("b", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"path":"/data/a","value":"x"}]}]`)
		s.waitForContent(s.c1, "x")
		fleet.Wait(s.ctx, quietTime)
		s.expectWrites(tails, "c2", 0)
	},
	"a restart reads and writes nothing in members": func(s *scenario) {
		s.stop(s.fixture.manager.Process)
		tails := s.tailAudits()
		s.fixture.startLeader()
		token, err := shared.AdminToken(s.ctx)
		assert.NoError(s, err)
		fleet.Eventually(s.ctx, s.T, func() error { return checkIdle(s.fixture.manager, token, 2) })
		fleet.Wait(s.ctx, quietTime)
		for member, tails := range tails {
			for _, tail := range tails {
				events, err := tail.Read()
				assert.NoError(s, err)
				for _, e := range events {
					if e.User.Username == memberAccount && strings.Contains(e.RequestURI, "/namespaces/"+s.shop+"/") {
						s.Errorf("%s: %s %s", member, e.Verb, e.RequestURI)
					}
				}
			}
		}
	},
	"what somebody reverts each time is written ever less often": func(s *scenario) {
		tails := s.tailAudits()
		for range 5 {
			s.waitForContent(s.c2, "b")
			s.patchByHand(s.c2, configMaps, s.shop, "f", `{"data":{"a":"mine"}}`)
		}
		fleet.Eventually(s.ctx, s.T, func() error {
			list, err := shared.Admin.CoreV1().Events(s.shop).List(s.ctx, metav1.ListOptions{FieldSelector: "reason=" + policy.UpdateConflict})
			if err == nil && len(list.Items) == 0 {
				err = errors.New("no Event " + policy.UpdateConflict)
			}
			return err
		})
		fleet.Wait(s.ctx, quietTime)
		s.expectWrites(tails, "c2", 5)
	},
	"a malformed deleteoption waits": func(s *scenario) {
		s.patch(s.f, `{"metadata":{"annotations":{"kubefed.io/deleteoption":"{"}}}`)
		assert.NoError(s, client(s.f).Delete(s.ctx, "f", metav1.DeleteOptions{}))
		s.waitForStatus(s.f, "c1=WaitingForRemoval c2=WaitingForRemoval")
		s.forEachMember(func(member dynamic.Interface) { s.waitForContent(member, "b") })
		s.patch(s.f, `{"metadata":{"annotations":{"kubefed.io/deleteoption":null}}}`)
		s.forEachMember(func(member dynamic.Interface) { s.waitForObject(member, configMaps, s.shop, "f", nil) })
	},
	"many removals by a label wait until they are allowed": func(s *scenario) {
		last := s.federateMany()
		c2 := object(s.T, "kind: KubeFedCluster, metadata: {name: c2}")
		s.patch(c2, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, s.shop))
		s.waitForStatus(last, "c2=RemovalHeld")
		s.waitForObject(s.c2, configMaps, s.shop, last.GetName(), managed)
		s.allowRemovals()
		s.waitForObject(s.c2, configMaps, s.shop, last.GetName(), nil)
		s.waitForStatus(last, "")
	},
	"removals wait when the federation namespace is deleted and clusters join again without labels": func(s *scenario) {
		last := s.federateMany()
		s.fixture.reinstallFederation()
		s.waitForStatus(last, "c2=RemovalHeld")
		s.waitForObject(s.c2, configMaps, s.shop, last.GetName(), managed)
		s.waitForContent(s.c1, "b")
		s.allowRemovals()
	},
	"the status of objects in members is copied where gate and type ask for it": func(s *scenario) {
		s.configure(`{"featureGates":[{"name":"RawResourceStatusCollection","configuration":"Enabled"}]}`)
		config := object(s.T, "kind: FederatedTypeConfig, metadata: {name: deployments.apps}")
		s.patch(config, `{"spec":{"statusCollection":"Enabled"}}`)
		s.Cleanup(func() { s.patch(config, `{"spec":{"statusCollection":"Disabled"}}`) })
		d := s.create(deployment)
		s.waitForObject(s.c1, schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1beta1", Resource: "federateddeployments"}, s.shop, d.GetName(), func(u *unstructured.Unstructured) bool {
			clusters := policy.ReadFederated(u).Status.Clusters
			for _, c := range clusters {
				if status, _ := c.RemoteStatus.(map[string]any); status["observedGeneration"] == nil {
					return false
				}
			}
			return len(clusters) == 2
		})
	},
	"a type of one's own runs, reaches a member that gets it later, and stays when its federated type goes": func(s *scenario) {
		target := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
		w := s.defineType("Widget", "widgets", target)
		s.waitForStatus(w, "c1= c2=APINotAvailable")
		assert.NoError(s, fleet.DefineResource(s.ctx, s.c2, target, "Widget"))
		s.waitForStatus(w, "c1= c2=")
		s.forEachMember(func(member dynamic.Interface) { s.waitForObject(member, target, s.shop, "w", managed) })
		assert.NoError(s, s.c1.Resource(definitions).Delete(s.ctx, "federatedwidgets.types.kubefed.io", metav1.DeleteOptions{}))
		s.waitForObject(s.c1, definitions, "", "federatedwidgets.types.kubefed.io", nil)
		s.forEachMember(func(member dynamic.Interface) {
			s.waitForObject(member, target, s.shop, "w", func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
		})
	},
	"an override of the apiVersion reaches a member of another version": func(s *scenario) {
		target := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}
		older := target
		older.Version = "v1beta1"
		assert.NoError(s, fleet.DefineResource(s.ctx, s.c2, older, "Gadget"))
		w := s.defineType("Gadget", "gadgets", target)
		s.patch(w, `{"spec":{"overrides":[{"clusterName":"c2","clusterOverrides":[{"path":"/apiVersion","value":"example.com/v1beta1"}]}]}}`)
		s.waitForStatus(w, "c1= c2=")
		s.waitForObject(s.c2, older, s.shop, "w", managed)
	},
	"a type whose target is itself federated does not run": func(s *scenario) {
		s.createConfig(object(s.T, "kind: FederatedTypeConfig, metadata: {name: federatedconfigmaps.types.kubefed.io}, spec: {propagation: Enabled, targetType: {version: v1beta1, kind: FederatedConfigMap, "+
			"scope: Namespaced}, federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedSecret, scope: Namespaced}}"))
		s.waitForType("federatedconfigmaps.types.kubefed.io", "NotRunning")
	},
}

// TestFederatedObjectLifecycles goes through what can happen to an object, its types and its clusters, one
// scenario after the other.
func TestFederatedObjectLifecycles(t *testing.T) {
	f := &fixture{members: newMembers(t, 15*time.Minute, cluster.Options{})}
	f.configure(quickConfig)
	f.startLeader()
	f.waitForCondition("c1", "Ready=True")
	f.waitForCondition("c2", "Ready=True")
	for name, tc := range scenarios {
		t.Run(name, func(t *testing.T) {
			s := &scenario{members: f.forSubtest(t), fixture: f}
			s.shop = shared.NewNamespace(s.ctx, t, nil)
			s.federateNamespace(s.shop)
			s.f = s.create("kind: FederatedConfigMap, metadata: {name: f}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
			s.waitForStatus(s.f, "c1= c2=")
			tc(s)
		})
	}
}
