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
	"a type that is switched off is not written until it is on again": func(p *scenario) {
		config := object(p.T, "kind: FederatedTypeConfig, metadata: {name: configmaps}")
		p.patch(config, `{"spec":{"propagation":"Disabled"}}`)
		p.waitForType("configmaps", "NotRunning")
		fleet.Wait(p.ctx, quietTime) // what is under way ends
		p.change("c", "")
		fleet.Wait(p.ctx, quietTime)
		p.forEachMember(func(member dynamic.Interface) { p.waitForContent(member, "b") })
		p.patch(config, `{"spec":{"propagation":"Enabled"}}`)
		p.forEachMember(func(member dynamic.Interface) { p.waitForContent(member, "c") })
	},
	"without the type of Namespaces nothing runs and nothing is removed": func(p *scenario) {
		config := object(p.T, "kind: FederatedTypeConfig, metadata: {name: namespaces}")
		existing, err := client(config).Get(p.ctx, "namespaces", metav1.GetOptions{})
		if err == nil {
			err = client(config).Delete(p.ctx, "namespaces", metav1.DeleteOptions{})
		}
		assert.NoError(p, err)
		p.waitForType("configmaps", "NotRunning")
		fleet.Wait(p.ctx, quietTime) // what is under way ends
		p.change("c", `,"placement":{"clusters":[{"name":"c1"}]}`)
		fleet.Wait(p.ctx, quietTime)
		p.forEachMember(func(member dynamic.Interface) { p.waitForContent(member, "b") })
		config.Object["spec"] = existing.Object["spec"]
		if _, err := client(config).Create(p.ctx, config, metav1.CreateOptions{}); err != nil {
			p.Fatal(err)
		}
		p.waitForContent(p.c1, "c")
		p.waitForObject(p.c2, configMaps, p.shop, "f", nil)
	},
	"a malformed selector removes nothing": func(p *scenario) {
		p.change("c", `,"placement":{"clusters":null,"clusterSelector":{"matchExpressions":[{"key":"a","operator":"Near"}]}}`)
		p.waitForReason(policy.ComputePlacementFailed)
		fleet.Wait(p.ctx, quietTime)
		p.forEachMember(func(member dynamic.Interface) { p.waitForContent(member, "b") })
	},
	"without a FederatedNamespace an object is removed": func(p *scenario) {
		u := object(p.T, "kind: FederatedNamespace, metadata: {name: "+p.shop+"}")
		u.SetNamespace(p.shop)
		assert.NoError(p, client(u).Delete(p.ctx, p.shop, metav1.DeleteOptions{}))
		p.waitForReason(policy.NamespaceNotFederated)
		p.forEachMember(func(member dynamic.Interface) { p.waitForObject(member, configMaps, p.shop, "f", nil) })
	},
	"the host's own Namespace stays when it is deselected": func(p *scenario) {
		u := object(p.T, "kind: FederatedNamespace, metadata: {name: "+p.shop+"}")
		u.SetNamespace(p.shop)
		p.patch(u, `{"spec":{"placement":{"clusters":[{"name":"c2"}]}}}`)
		p.waitForObject(p.c1, namespaces, "", p.shop, func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
		p.waitForObject(p.c1, configMaps, p.shop, "f", nil)
		p.waitForContent(p.c2, "b")
	},
	"a Namespace that was there before stays when it is deselected": func(p *scenario) {
		name := shared.NewNamespace(p.ctx, p.T, nil)
		if _, err := p.admin2.CoreV1().Namespaces().Create(p.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			p.Fatal(err)
		}
		u := p.federateNamespace(name)
		p.waitForObject(p.c2, namespaces, "", name, managed)
		p.patch(u, `{"spec":{"placement":{"clusters":[]}}}`)
		p.waitForObject(p.c2, namespaces, "", name, func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
	},
	"what a member adds to an object stays": func(p *scenario) {
		p.patchByHand(p.c2, configMaps, p.shop, "f", `{"metadata":{"annotations":{"x":"y"},"finalizers":["example.com/mine"]}}`)
		p.change("c", "")
		p.waitForContent(p.c2, "c")
		p.waitForObject(p.c2, configMaps, p.shop, "f", func(u *unstructured.Unstructured) bool {
			return u.GetAnnotations()["x"] == "y" && len(u.GetFinalizers()) == 1
		})
		p.patchByHand(p.c2, configMaps, p.shop, "f", `{"metadata":{"finalizers":null}}`)
	},
	"labels that a member gives its Namespace stay": func(p *scenario) {
		p.patchByHand(p.c2, namespaces, "", p.shop, `{"metadata":{"labels":{"x":"y"}}}`)
		u := object(p.T, "kind: FederatedNamespace, metadata: {name: "+p.shop+"}")
		u.SetNamespace(p.shop)
		p.patch(u, `{"spec":{"template":{"metadata":{"labels":{"team":"a"}}}}}`)
		p.waitForObject(p.c2, namespaces, "", p.shop, func(u *unstructured.Unstructured) bool {
			return managed(u) && u.GetLabels()["x"] == "y" && u.GetLabels()["team"] == "a"
		})
	},
	"annotations of an override are put back and others stay": func(p *scenario) {
		const revision = "deployment.kubernetes.io/revision"
		p.create(strings.Replace(deployment, "{path: /spec/replicas, value: 3}", "{op: add, path: /metadata/annotations, value: {foo: bar}}", 1))
		annotated := func(u *unstructured.Unstructured) bool {
			return u.GetAnnotations()["foo"] == "bar" && u.GetAnnotations()[revision] != ""
		}
		p.waitForObject(p.c2, deployments, p.shop, "d", annotated)
		fleet.Wait(p.ctx, quietTime)
		tails := p.tailAudits()
		p.patchByHand(p.c2, deployments, p.shop, "d", `{"metadata":{"annotations":{"foo":null}}}`)
		p.waitForObject(p.c2, deployments, p.shop, "d", annotated)
		fleet.Wait(p.ctx, quietTime)
		p.wantWrites(tails, "c2", 1)
	},
	"an override that fails stops its member only": func(p *scenario) {
		p.change("c", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"path":"/x/y","value":1}]}]`)
		p.waitForStatus(p.f, "c1=ApplyOverridesFailed c2=")
		p.waitForContent(p.c2, "c")
		p.waitForContent(p.c1, "b")
	},
	"an override leads to no other object": func(p *scenario) {
		for _, o := range []string{
			`"path":"/metadata","value":{"name":"f","namespace":"kube-system"}`, `"path":"x/kind","value":"Secret"`,
			`"path":"","value":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"f","namespace":"kube-system"}}`,
			`"path":"/metadata/resourceVersion","value":"1"`, `"path":"/apiVersion","value":"apps/v1"`,
		} {
			p.change("b", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{`+o+`}]}]`)
			p.waitForStatus(p.f, "c1=ApplyOverridesFailed c2=")
			p.change("b", `,"overrides":null`)
			p.waitForStatus(p.f, "c1= c2=")
		}
		p.waitForObject(p.c1, configMaps, "kube-system", "f", nil)
	},
	"an override cannot drop the label": func(p *scenario) {
		p.change("c", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"op":"add","path":"/metadata/labels","value":{"x":"y"}}]}]`)
		p.waitForContent(p.c1, "c") // and managed
	},
	"an object that was there is overwritten": func(p *scenario) {
		p.createStray("g", nil)
		p.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
		p.waitForObject(p.c2, configMaps, p.shop, "g", hasField("b", "data", "a"))
	},
	"an object that was there is not adopted if that is off": func(p *scenario) {
		p.configure(`{"syncController":{"adoptResources":"Disabled"}}`)
		p.createStray("g", nil)
		p.waitForStatus(p.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, "+bothMembers+"}"), "c1= c2=AlreadyExists")
		p.waitForObject(p.c2, configMaps, p.shop, "g", func(u *unstructured.Unstructured) bool { return !managed(u) })
	},
	"an object with the label false is left alone": func(p *scenario) {
		p.createStray("g", map[string]string{policy.ManagedLabel: "false"})
		p.waitForStatus(p.create("kind: FederatedConfigMap, metadata: {name: g}, spec: {template: {data: {a: b}}, "+bothMembers+"}"), "c1= c2=ManagedLabelFalse")
		p.waitForObject(p.c2, configMaps, p.shop, "g", func(u *unstructured.Unstructured) bool { return u.Object["data"] == nil })
	},
	"an override of one member writes nothing in another": func(p *scenario) {
		tails := p.tailAudits()
		p.change("b", `,"overrides":[{"clusterName":"c1","clusterOverrides":[{"path":"/data/a","value":"x"}]}]`)
		p.waitForContent(p.c1, "x")
		fleet.Wait(p.ctx, quietTime)
		p.wantWrites(tails, "c2", 0)
	},
	"a restart reads and writes nothing in members": func(p *scenario) {
		p.stop(p.fixture.manager.Process)
		tails := p.tailAudits()
		p.fixture.startLeader()
		token, err := shared.AdminToken(p.ctx)
		assert.NoError(p, err)
		fleet.Eventually(p.ctx, p.T, func() error { return checkIdle(p.fixture.manager, token, 2) })
		fleet.Wait(p.ctx, quietTime)
		for member, tails := range tails {
			for _, tail := range tails {
				events, err := tail.Read()
				assert.NoError(p, err)
				for _, e := range events {
					if e.User.Username == memberAccount && strings.Contains(e.RequestURI, "/namespaces/"+p.shop+"/") {
						p.Errorf("%s: %s %s", member, e.Verb, e.RequestURI)
					}
				}
			}
		}
	},
	"what somebody reverts each time is written ever less often": func(p *scenario) {
		tails := p.tailAudits()
		for range 5 {
			p.waitForContent(p.c2, "b")
			p.patchByHand(p.c2, configMaps, p.shop, "f", `{"data":{"a":"mine"}}`)
		}
		fleet.Eventually(p.ctx, p.T, func() error {
			list, err := shared.Admin.CoreV1().Events(p.shop).List(p.ctx, metav1.ListOptions{FieldSelector: "reason=" + policy.UpdateConflict})
			if err == nil && len(list.Items) == 0 {
				err = errors.New("no Event " + policy.UpdateConflict)
			}
			return err
		})
		fleet.Wait(p.ctx, quietTime)
		p.wantWrites(tails, "c2", 5)
	},
	"a malformed deleteoption waits": func(p *scenario) {
		p.patch(p.f, `{"metadata":{"annotations":{"kubefed.io/deleteoption":"{"}}}`)
		assert.NoError(p, client(p.f).Delete(p.ctx, "f", metav1.DeleteOptions{}))
		p.waitForStatus(p.f, "c1=WaitingForRemoval c2=WaitingForRemoval")
		p.forEachMember(func(member dynamic.Interface) { p.waitForContent(member, "b") })
		p.patch(p.f, `{"metadata":{"annotations":{"kubefed.io/deleteoption":null}}}`)
		p.forEachMember(func(member dynamic.Interface) { p.waitForObject(member, configMaps, p.shop, "f", nil) })
	},
	"many removals by a label wait until they are allowed": func(p *scenario) {
		last := p.federateMany()
		c2 := object(p.T, "kind: KubeFedCluster, metadata: {name: c2}")
		p.patch(c2, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, p.shop))
		p.waitForStatus(last, "c2=RemovalHeld")
		p.waitForObject(p.c2, configMaps, p.shop, last.GetName(), managed)
		p.allowRemovals()
		p.waitForObject(p.c2, configMaps, p.shop, last.GetName(), nil)
		p.waitForStatus(last, "")
	},
	"removals wait when the federation namespace is deleted and clusters join again without labels": func(p *scenario) {
		last := p.federateMany()
		p.fixture.reinstallFederation()
		p.waitForStatus(last, "c2=RemovalHeld")
		p.waitForObject(p.c2, configMaps, p.shop, last.GetName(), managed)
		p.waitForContent(p.c1, "b")
		p.allowRemovals()
	},
	"the status of objects in members is copied where gate and type ask for it": func(p *scenario) {
		p.configure(`{"featureGates":[{"name":"RawResourceStatusCollection","configuration":"Enabled"}]}`)
		config := object(p.T, "kind: FederatedTypeConfig, metadata: {name: deployments.apps}")
		p.patch(config, `{"spec":{"statusCollection":"Enabled"}}`)
		p.Cleanup(func() { p.patch(config, `{"spec":{"statusCollection":"Disabled"}}`) })
		d := p.create(deployment)
		p.waitForObject(p.c1, schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1beta1", Resource: "federateddeployments"}, p.shop, d.GetName(), func(u *unstructured.Unstructured) bool {
			clusters := policy.ReadFederated(u).Status.Clusters
			for _, c := range clusters {
				if status, _ := c.RemoteStatus.(map[string]any); status["observedGeneration"] == nil {
					return false
				}
			}
			return len(clusters) == 2
		})
	},
	"a type of one's own runs, reaches a member that gets it later, and stays when its federated type goes": func(p *scenario) {
		target := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
		w := p.defineType("Widget", "widgets", target)
		p.waitForStatus(w, "c1= c2=APINotAvailable")
		assert.NoError(p, fleet.DefineResource(p.ctx, p.c2, target, "Widget"))
		p.waitForStatus(w, "c1= c2=")
		p.forEachMember(func(member dynamic.Interface) { p.waitForObject(member, target, p.shop, "w", managed) })
		assert.NoError(p, p.c1.Resource(definitions).Delete(p.ctx, "federatedwidgets.types.kubefed.io", metav1.DeleteOptions{}))
		p.waitForObject(p.c1, definitions, "", "federatedwidgets.types.kubefed.io", nil)
		p.forEachMember(func(member dynamic.Interface) {
			p.waitForObject(member, target, p.shop, "w", func(u *unstructured.Unstructured) bool { return !managed(u) && u.GetDeletionTimestamp() == nil })
		})
	},
	"an override of the apiVersion reaches a member of another version": func(p *scenario) {
		target := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}
		older := target
		older.Version = "v1beta1"
		assert.NoError(p, fleet.DefineResource(p.ctx, p.c2, older, "Gadget"))
		w := p.defineType("Gadget", "gadgets", target)
		p.patch(w, `{"spec":{"overrides":[{"clusterName":"c2","clusterOverrides":[{"path":"/apiVersion","value":"example.com/v1beta1"}]}]}}`)
		p.waitForStatus(w, "c1= c2=")
		p.waitForObject(p.c2, older, p.shop, "w", managed)
	},
	"a type whose target is itself federated does not run": func(p *scenario) {
		p.createConfig(object(p.T, "kind: FederatedTypeConfig, metadata: {name: federatedconfigmaps.types.kubefed.io}, spec: {propagation: Enabled, targetType: {version: v1beta1, kind: FederatedConfigMap, "+
			"scope: Namespaced}, federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedSecret, scope: Namespaced}}"))
		p.waitForType("federatedconfigmaps.types.kubefed.io", "NotRunning")
	},
}

// TestFederatedObjectLifecycles goes through what can happen to an object, its types and its clusters, one
// scenario after the other.
func TestFederatedObjectLifecycles(t *testing.T) {
	s := &fixture{members: newMembers(t, 15*time.Minute, cluster.Options{})}
	s.configure(quickConfig)
	s.startLeader()
	s.waitForCondition("c1", "Ready=True")
	s.waitForCondition("c2", "Ready=True")
	for name, test := range scenarios {
		t.Run(name, func(t *testing.T) {
			p := &scenario{members: s.forSubtest(t), fixture: s}
			p.shop = shared.NewNamespace(p.ctx, t, nil)
			p.federateNamespace(p.shop)
			p.f = p.create("kind: FederatedConfigMap, metadata: {name: f}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
			p.waitForStatus(p.f, "c1= c2=")
			test(p)
		})
	}
}
