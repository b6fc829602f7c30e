// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const (
	created = "create configmaps shop/f"
	updated = "update configmaps shop/f"
	deleted = "delete configmaps shop/f"
	edited  = "patch configmaps shop/f"
)

// TestGivenThen has the rows of the specification, by their numbers. F is in both clusters.
func TestGivenThen(t *testing.T) {
	for name, test := range map[string]func(f *fed){
		"F is in both": func(f *fed) {
			f.status("FederatedConfigMap", "f", "c1= c2=")
			f.recorded("c1", "c2")
			f.has(f.c1, "managed")
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host)
			f.warned()
		},
		"F changes": func(f *fed) {
			f.setF("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			f.wrote(f.c2.Host, updated)
			f.status("FederatedConfigMap", "f", "c1= c2=")
		},
		"4: c1 hangs, and c2 goes on": func(f *fed) {
			f.c1.Hang()
			f.setF("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.wrote(f.c2.Host, updated)
			f.Sleep(2 * time.Minute)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=ClusterNotReady c2=")
			f.c1.Restore()
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			f.status("FederatedConfigMap", "f", "c1= c2=")
		},
		"4: the Secret of c1 is gone, and c2 goes on": func(f *fed) {
			f.Delete(secret("c1", "one"))
			f.Sleep(time.Second)
			f.setF("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host, updated)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=ClusterNotReady c2=")
			f.Put(secret("c1", "one"))
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
		},
		"5: a token is rotated": func(f *fed) {
			lists := 0
			f.c1.OnRead(func(r controllertest.Request) error {
				if r.Verb == "list" {
					lists++
				}
				return nil
			})
			f.Put(secret("c1", "other"))
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host)
			if lists > 0 {
				f.t.Errorf("%d lists", lists)
			}
		},
		"10: the type is switched off": func(f *fed) {
			f.set(f.Host, "FederatedTypeConfig", namespace, "configmaps", "Disabled", "spec", "propagation")
			f.Sleep(time.Second)
			f.setF("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host)
			f.set(f.Host, "FederatedTypeConfig", namespace, "configmaps", "Enabled", "spec", "propagation")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			f.wrote(f.c2.Host, updated)
		},
		"11: the FederatedTypeConfig of Namespaces is deleted": func(f *fed) {
			f.Delete(f.get(f.Host, "FederatedTypeConfig", namespace, "namespaces"))
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host)
			f.has(f.c1, "managed")
			f.warned("NamespaceTypeMissing")
		},
		"13: a malformed selector": func(f *fed) {
			f.setF("{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", "placement")
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host)
			f.status("FederatedConfigMap", "f", "ComputePlacementFailed")
		},
		"14: there is no FederatedNamespace": func(f *fed) {
			f.change(f.Host, "FederatedNamespace", "shop", "shop", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
			f.Delete(f.get(f.Host, "FederatedNamespace", "shop", "shop"))
			f.Sleep(settling)
			f.status("FederatedConfigMap", "f", "NamespaceNotFederated")
			f.has(f.c1, "gone")
			f.has(f.c2, "gone")
		},
		"15: c2 is deselected": func(f *fed) {
			f.setF("{clusters: [{name: c1}]}", "placement")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host, deleted)
			f.status("FederatedConfigMap", "f", "c1=")
			f.recorded("c1")
		},
		"19: a member adds an annotation and a finalizer": func(f *fed) {
			f.change(f.c1.Host, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) {
				u.SetAnnotations(map[string]string{"x": "y"})
				u.SetFinalizers([]string{"example.com/mine"})
			})
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated+" (unchanged)")
			u := f.get(f.c1.Host, "ConfigMap", "shop", "f")
			if u.GetAnnotations()["x"] != "y" || len(u.GetFinalizers()) != 1 {
				f.t.Errorf("%v", u.Object["metadata"])
			}
		},
		"20: a member labels its Namespace": func(f *fed) {
			f.change(f.c1.Host, "Namespace", "", "shop", func(u *unstructured.Unstructured) {
				u.SetLabels(map[string]string{policy.ManagedLabel: "true", "x": "y"})
			})
			f.Sleep(time.Minute)
			if u := f.get(f.c1.Host, "Namespace", "", "shop"); u.GetLabels()["x"] != "y" {
				f.t.Errorf("labels %v", u.GetLabels())
			}
		},
		"24: annotations are overridden": func(f *fed) {
			f.set(f.c1.Host, "ConfigMap", "shop", "f", "{revision: '7'}", "metadata", "annotations")
			f.Sleep(time.Minute)
			f.c1.Writes()
			f.setF("[{clusterName: c1, clusterOverrides: [{op: add, path: /metadata/annotations, value: {foo: bar}}]}]", "overrides")
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host, updated)
			f.wrote(f.c2.Host)
			if a := f.get(f.c1.Host, "ConfigMap", "shop", "f").GetAnnotations(); a["foo"] != "bar" || a["revision"] != "7" {
				f.t.Errorf("annotations %v", a)
			}
			f.change(f.c1.Host, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetAnnotations(map[string]string{"revision": "7"}) })
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host, updated)
		},
		"25: an override of a path that is not there": func(f *fed) {
			f.setF("[{clusterName: c1, clusterOverrides: [{path: /x/y, value: 1}]}]", "overrides")
			f.setF("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host, updated)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=ApplyOverridesFailed c2=")
			f.recorded("c2")
			f.warned("UpdateInClusterFailed")
		},
		"26: an override leads to another namespace": func(f *fed) {
			f.setF("[{clusterName: c1, clusterOverrides: [{path: /metadata, value: {name: f, namespace: kube-system}}]}]", "overrides")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=ApplyOverridesFailed c2=")
		},
		"27: an override drops the label": func(f *fed) {
			f.setF("[{clusterName: c1, clusterOverrides: [{path: /metadata/labels, value: {x: 'y'}}]}]", "overrides")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			if l := f.get(f.c1.Host, "ConfigMap", "shop", "f").GetLabels(); l[policy.ManagedLabel] != "true" || l["x"] != "y" {
				f.t.Errorf("labels %v", l)
			}
		},
		"29: the label is false": func(f *fed) {
			f.set(f.c1.Host, "ConfigMap", "shop", "f", "{kubefed.io/managed: 'false'}", "metadata", "labels")
			f.setF("c", "template", "data", "a")
			f.Sleep(20 * time.Minute)
			for _, w := range f.c1.Writes() {
				if !strings.HasSuffix(w, ": AlreadyExists") {
					f.t.Errorf("wrote %q", w)
				}
			}
			f.wrote(f.c2.Host, updated)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=ManagedLabelFalse c2=")
		},
		"30: the override of c1 changes": func(f *fed) {
			f.setF("[{clusterName: c1, clusterOverrides: [{path: /data/a, value: x}]}]", "overrides")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			f.wrote(f.c2.Host)
			f.recorded("c1", "c2")
		},
		"31: a restart": func(f *fed) {
			f.OnRead(func(r controllertest.Request) error {
				if r.Verb == "get" && r.Resource == "federatedconfigmaps.types.kubefed.io" {
					f.t.Errorf("the host is asked for %s", r)
				}
				return nil
			})
			for _, c := range []*controllertest.Cluster{f.c1, f.c2} {
				c.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" {
						f.t.Errorf("a cluster is asked for %s", r)
					}
					return nil
				})
			}
			f.Restart()
			f.Sleep(20 * time.Minute)
			f.OnRead(nil)
			f.wrote(f.c1.Host)
			f.wrote(f.c2.Host)
			for _, w := range f.Writes() {
				if !strings.HasPrefix(w, patched) {
					f.t.Errorf("wrote %q on the host", w)
				}
			}
		},
		"32: drift by hand": func(f *fed) {
			f.set(f.c1.Host, "ConfigMap", "shop", "f", "mine", "data", "a")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, updated)
			f.wrote(f.c2.Host)
			if u := f.get(f.c1.Host, "ConfigMap", "shop", "f"); u.Object["data"].(map[string]any)["a"] != "b" {
				f.t.Errorf("%v", u.Object)
			}
		},
		"33: somebody reverts each write": func(f *fed) {
			for range 20 {
				f.set(f.c1.Host, "ConfigMap", "shop", "f", "mine", "data", "a")
				f.Sleep(time.Second)
			}
			if n := len(f.c1.Writes()); n != 5 {
				f.t.Errorf("%d writes in 20 s, want 5", n)
			}
			f.Sleep(20 * time.Minute)
			f.warned("UpdateConflict")
			f.has(f.c1, "managed")
			f.status("FederatedConfigMap", "f", "c1= c2=")
		},
		"34: managed, without F": func(f *fed) {
			f.c1.Put(object(f.t, "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: shop, name: other, labels: {kubefed.io/managed: 'true', x: 'y'}}}"))
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, "patch configmaps shop/other")
			if l := f.get(f.c1.Host, "ConfigMap", "shop", "other").GetLabels(); len(l) != 1 {
				f.t.Errorf("labels %v", l)
			}
		},
		"35: F is deleted": func(f *fed) {
			f.Delete(configMap(f.t))
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, deleted)
			f.wrote(f.c2.Host, deleted)
			f.status("FederatedConfigMap", "f", "gone")
		},
		"F is deleted, and a member keeps its object for a while": func(f *fed) {
			f.change(f.c1.Host, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers([]string{"example.com/mine"}) })
			f.Sleep(time.Minute)
			f.Delete(configMap(f.t))
			f.Sleep(20 * time.Minute)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=WaitingForRemoval c2=")
			f.change(f.c1.Host, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
			f.Sleep(time.Minute)
			f.status("FederatedConfigMap", "f", "gone")
		},
		"36: F is deleted while c2 is away": func(f *fed) {
			f.c2.Cut()
			f.Sleep(time.Minute)
			f.Delete(configMap(f.t))
			f.Sleep(20 * time.Minute)
			f.has(f.c1, "gone")
			f.status("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady") // nothing is written off yet
			f.c2.Restore()
			f.Sleep(time.Minute)
			f.has(f.c2, "gone")
			f.status("FederatedConfigMap", "f", "gone")
		},
		"40: an orphan": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/orphan: 'true'}", "metadata", "annotations")
			f.Sleep(time.Second)
			f.Delete(configMap(f.t))
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, edited)
			f.has(f.c1, "unlabelled")
			f.has(f.c2, "unlabelled")
			f.status("FederatedConfigMap", "f", "gone")
		},
		"41: a malformed deleteoption": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/deleteoption: soon}", "metadata", "annotations")
			f.Sleep(time.Second)
			f.Delete(configMap(f.t))
			f.Sleep(20 * time.Minute)
			f.wrote(f.c1.Host)
			f.warned("InvalidDeleteOptions")
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/deleteoption: '{\"gracePeriodSeconds\":7}'}", "metadata", "annotations")
			var body string
			f.c1.OnWrite(func(r controllertest.Request) error { body = string(r.Body); return nil })
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, deleted)
			if !strings.Contains(body, `"gracePeriodSeconds":7`) || !strings.Contains(body, `"resourceVersion"`) || !strings.Contains(body, `"uid"`) {
				f.t.Error(body)
			}
			f.status("FederatedConfigMap", "f", "gone")
		},
		"51: a cluster leaves": func(f *fed) {
			f.Delete(kubeFedCluster(f.c2, "c2"))
			f.Sleep(20 * time.Minute)
			f.wrote(f.c2.Host)
			f.has(f.c2, "managed")
			f.status("FederatedConfigMap", "f", "c1=")
			f.recorded("c1")
		},
		"50: KubeFed begins to lead, and ends": func(f *fed) {
			lock := func(n int) {
				f.Put(object(f.t, fmt.Sprintf("{apiVersion: v1, kind: ConfigMap, metadata: {namespace: %s, name: %s, "+
					"annotations: {control-plane.alpha.kubernetes.io/leader: '%d'}}}", namespace, federation.KubeFedLock, n)))
			}
			lock(1)
			for n := range 30 {
				lock(n)
				f.Sleep(5 * time.Second)
				if n == 12 {
					f.setF("c", "template", "data", "a")
				}
			}
			f.wrote(f.c1.Host)
			f.Sleep(2 * time.Minute)
			f.wrote(f.c1.Host, updated)
		},
		"a write in a cluster fails, and is tried again": func(f *fed) {
			fail := true
			f.c1.OnWrite(func(controllertest.Request) error {
				if fail {
					return errors.New("no space left")
				}
				return nil
			})
			f.setF("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=UpdateFailed c2=")
			f.wrote(f.c2.Host, updated)
			f.warned("UpdateInClusterFailed")
			fail = false
			f.Sleep(20 * time.Minute)
			f.status("FederatedConfigMap", "f", "c1= c2=")
		},
		"a cluster answers 403 for a type": func(f *fed) {
			refuse := func(r controllertest.Request) error {
				if strings.HasPrefix(r.Resource, "configmaps") {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "", errors.New("no"))
				}
				return nil
			}
			f.c1.OnWrite(refuse)
			f.setF("c", "template", "data", "a")
			f.Put(federated(f.t, "Secret", "s", "{template: {stringData: {a: b}}, "+both+"}"))
			f.Sleep(5 * time.Second)
			f.status("FederatedConfigMap", "f", "CheckClusters c1=UpdateFailed c2=")
			if w := f.c2.Writes(); !slices.Contains(w, updated) || !slices.Contains(w, "create secrets shop/s") {
				f.t.Errorf("wrote %q", w)
			}
			if w := f.c1.Writes(); !slices.Contains(w, "create secrets shop/s") {
				f.t.Errorf("wrote %q", w)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { run(t, test) })
	}
}

// TestGuard is row 42: placement would delete most of a cluster.
func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFed(t)
		for i := range 20 {
			f.Put(federated(t, "ConfigMap", fmt.Sprintf("f%d", i), "{template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {name: c2}}}}"))
		}
		f.Sleep(settling)
		if n := len(f.c2.Writes()); n != 21 {
			t.Fatalf("%d writes", n)
		}
		f.change(f.Host, "KubeFedCluster", namespace, "c2", func(u *unstructured.Unstructured) { u.SetLabels(nil) })
		f.Sleep(10 * time.Minute)
		f.wrote(f.c2.Host)
		f.warned(policy.RemovalsHeld)
		f.status("FederatedConfigMap", "f7", "CheckClusters c2=RemovalHeld")
		if n := f.Metric(federation.MetricPrefix+"held_removals", "cluster", "c2"); n != 20 {
			t.Errorf("%v removals held", n)
		}
		f.change(f.Host, "KubeFedCluster", namespace, "c2", func(u *unstructured.Unstructured) {
			u.SetAnnotations(map[string]string{policy.AllowRemovalsAnnotation: time.Now().Add(time.Hour).UTC().Format(time.RFC3339)})
		})
		f.Sleep(10 * time.Second)
		if n := len(f.c2.Writes()); n != 20 {
			t.Errorf("%d writes after it was allowed", n)
		}
		f.status("FederatedConfigMap", "f7", "")
	})
}

// TestNamespaces is rows 16, 17 and 18, with c1 as the host.
func TestNamespaces(t *testing.T) {
	for name, test := range map[string]func(f *fed){
		"16: the host's Namespace is deselected": func(f *fed) {
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusters: []}", "spec", "placement")
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, "patch namespaces shop")
			f.wrote(f.c2.Host, "delete namespaces shop")
		},
		"18: a Namespace that was there is deselected": func(f *fed) {
			f.c2.Put(object(f.t, "{apiVersion: v1, kind: Namespace, metadata: {name: old}}"))
			u := federated(f.t, "Namespace", "old", "{placement: {clusters: [{name: c2}]}}")
			u.SetNamespace("old")
			f.Put(u)
			f.Sleep(time.Minute)
			f.wrote(f.c2.Host, "create namespaces old: AlreadyExists", "update namespaces old")
			f.set(f.Host, "FederatedNamespace", "old", "old", "{clusters: []}", "spec", "placement")
			f.Sleep(time.Minute)
			f.wrote(f.c2.Host, "patch namespaces old")
		},
		"protected ones are never written": func(f *fed) {
			u := federated(f.t, "Namespace", "kube-system", "{"+both+"}")
			u.SetNamespace("kube-system")
			f.Put(u)
			f.Sleep(time.Minute)
			f.wrote(f.c2.Host)
		},
		"one with another name than its namespace": func(f *fed) {
			f.Put(federated(f.t, "Namespace", "other", "{"+both+"}"))
			f.Sleep(time.Minute)
			f.wrote(f.c2.Host)
			f.warned(policy.InvalidName)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				own := f.get(f.Host, "Namespace", "", "shop")
				own.SetLabels(map[string]string{policy.ManagedLabel: "true"})
				f.c1.Delete(own)
				f.c1.Put(own)
				f.Sleep(time.Minute)
				f.c1.Writes()
				f.c2.Writes()
				test(f)
			})
		})
	}
}

// TestWhatWasThere is row 28.
func TestWhatWasThere(t *testing.T) {
	for name, adopt := range map[string]bool{"it is overwritten": true, "adoption is off": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.Writes()
				if !adopt {
					f.Put(object(t, "{apiVersion: core.kubefed.io/v1beta1, kind: KubeFedConfig, metadata: {namespace: "+namespace+", name: kubefed}, "+
						"spec: {scope: Cluster, syncController: {adoptResources: Disabled}}}"))
				}
				f.c1.Put(object(t, "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: shop, name: f}, data: {mine: x}}"))
				f.c1.Writes()
				f.Put(configMap(t))
				f.Sleep(20 * time.Minute)
				if adopt {
					f.wrote(f.c1.Host, created+": AlreadyExists", updated)
					f.has(f.c1, "managed")
					return
				}
				f.wrote(f.c1.Host, created+": AlreadyExists")
				f.has(f.c1, "unlabelled")
				f.status("FederatedConfigMap", "f", "CheckClusters c1=AlreadyExists c2=")
			})
		})
	}
}

// widgets is a type of its own, which c1 serves and c2 does not.
func widgets(f *fed) {
	f.t.Helper()
	definition := func(kind, plural, group string) *unstructured.Unstructured {
		return object(f.t, fmt.Sprintf("{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: %[2]s.%[3]s}, spec: {group: %[3]s, "+
			"names: {kind: %[1]s, plural: %[2]s}, scope: Namespaced, versions: [{name: v1, served: true, storage: true, subresources: {status: {}}}]}}", kind, plural, group))
	}
	f.c1.Put(definition("Widget", "widgets", "example.com"))
	f.Put(definition("FederatedWidget", "federatedwidgets", "types.kubefed.io"),
		object(f.t, "{apiVersion: core.kubefed.io/v1beta1, kind: FederatedTypeConfig, metadata: {namespace: "+namespace+", name: widgets.example.com}, spec: {propagation: Enabled, "+
			"targetType: {group: example.com, version: v1, kind: Widget, pluralName: widgets, scope: Namespaced}, "+
			"federatedType: {group: types.kubefed.io, version: v1, kind: FederatedWidget, pluralName: federatedwidgets, scope: Namespaced}}}"))
	u := federated(f.t, "Widget", "w", "{template: {spec: {a: b}}, "+both+"}")
	u.SetAPIVersion("types.kubefed.io/v1")
	f.Put(u)
	f.Sleep(settling)
}

// TestATypeOfItsOwn is rows 8 and 45.
func TestATypeOfItsOwn(t *testing.T) {
	resources["FederatedWidget"] = schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1", Resource: "federatedwidgets"}
	resources["Widget"] = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	resources["CustomResourceDefinition"] = federation.CustomResourceDefinitions
	for name, test := range map[string]func(f *fed){
		"8: c2 lacks the API, and gets it": func(f *fed) {
			f.wrote(f.c1.Host, "create widgets.example.com shop/w")
			f.status("FederatedWidget", "w", "CheckClusters c1= c2=APINotAvailable")
			f.c2.Put(object(f.t, "{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: widgets.example.com}, spec: {group: example.com, "+
				"names: {kind: Widget, plural: widgets}, scope: Namespaced, versions: [{name: v1, served: true, storage: true}]}}"))
			f.Sleep(10 * time.Minute)
			f.wrote(f.c2.Host, "create widgets.example.com shop/w")
			f.status("FederatedWidget", "w", "c1= c2=")
		},
		"F is deleted while c2 lacks the API": func(f *fed) {
			f.Delete(f.get(f.Host, "FederatedWidget", "shop", "w"))
			f.Sleep(time.Minute)
			f.status("FederatedWidget", "w", "gone")
		},
		"45: the CustomResourceDefinition of F is being deleted": func(f *fed) {
			f.c1.Writes()
			f.change(f.Host, "CustomResourceDefinition", "", "federatedwidgets.types.kubefed.io", func(u *unstructured.Unstructured) {
				u.SetFinalizers([]string{"customresourcecleanup.apiextensions.k8s.io"})
				u.SetDeletionTimestamp(&metav1.Time{Time: time.Now()})
			})
			f.Delete(f.get(f.Host, "FederatedWidget", "shop", "w")) // as the API server does next
			f.Sleep(time.Minute)
			f.wrote(f.c1.Host, "patch widgets.example.com shop/w")
			f.status("FederatedWidget", "w", "gone")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.c1.Writes()
				f.c2.Writes()
				widgets(f)
				test(f)
			})
		})
	}
}
