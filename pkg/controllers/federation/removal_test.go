// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// TestRemovalGuardHoldsUntilRemovalsAreAllowed has a placement that would delete most of a cluster.
func TestRemovalGuardHoldsUntilRemovalsAreAllowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFed(t)
		for i := range 20 {
			f.Put(federated(t, "ConfigMap", fmt.Sprintf("f%d", i), "{template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {name: c2}}}}"))
		}
		f.Sleep(settleTime)
		if n := len(f.c2.Writes()); n != 21 {
			t.Fatalf("%d writes", n)
		}
		f.change(f.Host, "KubeFedCluster", namespace, "c2", func(u *unstructured.Unstructured) { u.SetLabels(nil) })
		f.Sleep(10 * time.Minute)
		f.expectWrites(f.c2)
		f.expectWarnings(policy.RemovalsHeld)
		f.expectStatus("FederatedConfigMap", "f7", "CheckClusters c2=RemovalHeld")
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
		f.expectStatus("FederatedConfigMap", "f7", "")
	})
}

// TestRemovalGuardCountsRemovalsOfTheLastMinute has placements that change one after the other.
func TestRemovalGuardCountsRemovalsOfTheLastMinute(t *testing.T) {
	for name, tc := range map[string]struct {
		interval  time.Duration
		deletions int
	}{
		"one soon after the other counts together": {400 * time.Millisecond, 20},
		"one long after the other counts alone":    {time.Minute, 40},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				for i := range 40 {
					f.Put(federated(t, "ConfigMap", fmt.Sprintf("f%d", i), "{template: {data: {a: b}}, placement: {clusters: [{name: c2}]}}"))
				}
				f.Sleep(settleTime)
				f.c2.Writes()
				for i := range 40 {
					f.set(f.Host, "FederatedConfigMap", "shop", fmt.Sprintf("f%d", i), "{clusters: []}", "spec", "placement")
					f.Sleep(tc.interval)
				}
				f.Sleep(10 * time.Minute)
				if n := len(f.c2.Writes()); n != tc.deletions {
					t.Errorf("%d deletions, want %d", n, tc.deletions)
				}
			})
		})
	}
}

// TestNamespaceLosesItsLabelOrIsDeleted has c1 as the host.
func TestNamespaceLosesItsLabelOrIsDeleted(t *testing.T) {
	for name, tc := range map[string]func(f *fed){
		"the host's own Namespace loses its label when it is deselected": func(f *fed) {
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusters: []}", "spec", "placement")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "patch namespaces shop")
			f.expectWrites(f.c2, "delete namespaces shop")
		},
		"an adopted Namespace loses its label when it is deselected": func(f *fed) {
			f.c2.Put(object(f.t, "{apiVersion: v1, kind: Namespace, metadata: {name: old}}"))
			u := federated(f.t, "Namespace", "old", "{placement: {clusters: [{name: c2}]}}")
			u.SetNamespace("old")
			f.Put(u)
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, "create namespaces old: AlreadyExists", "update namespaces old")
			f.set(f.Host, "FederatedNamespace", "old", "old", "{clusters: []}", "spec", "placement")
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, "patch namespaces old")
		},
		"protected ones are never written": func(f *fed) {
			u := federated(f.t, "Namespace", "kube-system", "{"+bothClusters+"}")
			u.SetNamespace("kube-system")
			f.Put(u)
			f.Sleep(time.Minute)
			f.expectWrites(f.c2)
		},
		"one with another name than its namespace": func(f *fed) {
			f.Put(federated(f.t, "Namespace", "other", "{"+bothClusters+"}"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c2)
			f.expectWarnings(policy.InvalidName)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				hostNamespace := f.get(f.Host, "Namespace", "", "shop")
				hostNamespace.SetLabels(map[string]string{policy.ManagedLabel: "true"})
				f.c1.OnWrite(func(controllertest.Request) error { return errors.New("not before the host's own Namespace is there") })
				f.c1.Delete(hostNamespace)
				f.c1.Put(hostNamespace)
				f.c1.OnWrite(nil)
				f.Sleep(time.Minute)
				f.c1.Writes()
				f.c2.Writes()
				f.Events() // federation may have tried to write meanwhile
				tc(f)
			})
		})
	}
}

// TestExistingObjectIsOverwrittenIfAdoptionIsOn has an object that was there before the federated one.
func TestExistingObjectIsOverwrittenIfAdoptionIsOn(t *testing.T) {
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
					f.expectWrites(f.c1, configMapCreate+": AlreadyExists", configMapUpdate)
					f.expectConfigMap(f.c1, "managed")
					return
				}
				f.expectWrites(f.c1, configMapCreate+": AlreadyExists")
				f.expectConfigMap(f.c1, "unlabelled")
				f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=AlreadyExists c2=")
			})
		})
	}
}

func definition(t *testing.T, kind, plural, group, version string) *unstructured.Unstructured {
	t.Helper()
	return object(t, fmt.Sprintf("{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: %[2]s.%[3]s}, spec: {group: %[3]s, "+
		"names: {kind: %[1]s, plural: %[2]s}, scope: Namespaced, versions: [{name: %[4]s, served: true, storage: true, subresources: {status: {}}}]}}", kind, plural, group, version))
}

// TestRemovalWaitsForLists has a new leader whose API server does not serve a type
// that is needed to know what is wanted: it lists nothing, and a GET finds nothing either.
func TestRemovalWaitsForLists(t *testing.T) {
	for plural, waitingStatus := range map[string]string{"federatedconfigmaps": "gone", "federatednamespaces": "c1= c2="} {
		t.Run(plural, func(t *testing.T) {
			runWithConfigMap(t, func(f *fed) {
				setServed := func(served bool) {
					f.change(f.Host, "CustomResourceDefinition", "", plural+".types.kubefed.io", func(u *unstructured.Unstructured) {
						versions := u.Object["spec"].(map[string]any)["versions"].([]any)
						versions[0].(map[string]any)["served"] = served
					})
				}
				f.Restart(func() { setServed(false) })
				f.Sleep(settleTime)
				f.set(f.c1, "ConfigMap", "shop", "f", "mine", "data", "a") // c1 looks at it
				f.Sleep(20 * time.Minute)
				f.expectWrites(f.c1)
				f.expectWrites(f.c2)
				f.expectStatus("FederatedConfigMap", "f", waitingStatus)
				setServed(true)
				f.setSpec("c", "template", "data", "a")
				f.Sleep(20 * time.Minute)
				f.expectWrites(f.c1, configMapUpdate)
				f.expectWrites(f.c2, configMapUpdate)
				f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
			})
		})
	}
}

// TestFederatedNamespacesGoWithTheirDefinition deletes it as the API server does: with it go its objects, and
// it is gone when they are.
func TestFederatedNamespacesGoWithTheirDefinition(t *testing.T) {
	const definition = "federatednamespaces.types.kubefed.io"
	for name, lag := range map[string]time.Duration{"the cache learns of the definition at once": 0, "the cache learns of the definition later": 2 * time.Second} {
		t.Run(name, func(t *testing.T) {
			runWithConfigMap(t, func(f *fed) {
				f.Lag(lag, "customresourcedefinitions")
				f.change(f.Host, "CustomResourceDefinition", "", definition, func(u *unstructured.Unstructured) {
					u.SetFinalizers([]string{"customresourcecleanup.apiextensions.k8s.io"})
					u.SetDeletionTimestamp(&metav1.Time{Time: time.Now()})
				})
				f.Delete(f.get(f.Host, "FederatedNamespace", "shop", "shop"))
				<-time.After(settleTime) // removals are tried again and again
				f.change(f.Host, "CustomResourceDefinition", "", definition, func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
				f.Sleep(5 * time.Minute)
				for _, c := range []*controllertest.Cluster{f.c1, f.c2} {
					f.expectWrites(c, "patch namespaces shop")
					f.expectConfigMap(c, "managed")
				}
				f.expectStatus("FederatedNamespace", "shop", "gone")
			})
		})
	}
}

// addWidgets adds a type of its own, which c1 serves and c2 does not.
func addWidgets(f *fed) {
	f.t.Helper()
	f.c1.Put(definition(f.t, "Widget", "widgets", "example.com", "v1"))
	f.Put(definition(f.t, "FederatedWidget", "federatedwidgets", "types.kubefed.io", "v1"),
		object(f.t, "{apiVersion: core.kubefed.io/v1beta1, kind: FederatedTypeConfig, metadata: {namespace: "+namespace+", name: widgets.example.com}, spec: {propagation: Enabled, "+
			"targetType: {group: example.com, version: v1, kind: Widget, pluralName: widgets, scope: Namespaced}, "+
			"federatedType: {group: types.kubefed.io, version: v1, kind: FederatedWidget, pluralName: federatedwidgets, scope: Namespaced}}}"))
	u := federated(f.t, "Widget", "w", "{template: {spec: {a: b}}, "+bothClusters+"}")
	u.SetAPIVersion("types.kubefed.io/v1")
	f.Put(u)
	f.Sleep(settleTime)
}

func TestCustomTypeIsPropagated(t *testing.T) {
	resources["FederatedWidget"] = schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1", Resource: "federatedwidgets"}
	resources["Widget"] = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	for name, tc := range map[string]func(f *fed){
		"c2 gets its objects when it begins to serve the type": func(f *fed) {
			f.expectWrites(f.c1, "create widgets.example.com shop/w")
			f.expectStatus("FederatedWidget", "w", "CheckClusters c1= c2=APINotAvailable")
			f.c2.Put(definition(f.t, "Widget", "widgets", "example.com", "v1"))
			f.Sleep(10 * time.Minute)
			f.expectWrites(f.c2, "create widgets.example.com shop/w")
			f.expectStatus("FederatedWidget", "w", "c1= c2=")
		},
		"c2 gets the version that its override names": func(f *fed) {
			f.c2.Put(definition(f.t, "Widget", "widgets", "example.com", "v1beta1"))
			f.set(f.Host, "FederatedWidget", "shop", "w", "[{clusterName: c2, clusterOverrides: [{path: /apiVersion, value: example.com/v1beta1}]}]", "spec", "overrides")
			f.Sleep(10 * time.Minute)
			f.expectWrites(f.c2, "create widgets.example.com shop/w")
			f.expectStatus("FederatedWidget", "w", "c1= c2=")
			f.set(f.Host, "FederatedWidget", "shop", "w", "c", "spec", "template", "spec", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, "update widgets.example.com shop/w")
			f.Delete(f.get(f.Host, "FederatedWidget", "shop", "w"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, "delete widgets.example.com shop/w")
			f.expectStatus("FederatedWidget", "w", "gone")
		},
		"F is deleted while c2 lacks the API": func(f *fed) {
			f.Delete(f.get(f.Host, "FederatedWidget", "shop", "w"))
			f.Sleep(time.Minute)
			f.expectStatus("FederatedWidget", "w", "gone")
		},
		"objects lose their label when the federated type's definition is deleted": func(f *fed) {
			f.c1.Writes()
			f.Lag(2*time.Second, "customresourcedefinitions") // the cache learns of the definition after the object
			f.change(f.Host, "CustomResourceDefinition", "", "federatedwidgets.types.kubefed.io", func(u *unstructured.Unstructured) {
				u.SetFinalizers([]string{"customresourcecleanup.apiextensions.k8s.io"})
				u.SetDeletionTimestamp(&metav1.Time{Time: time.Now()})
			})
			f.Delete(f.get(f.Host, "FederatedWidget", "shop", "w")) // as the API server does next
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "patch widgets.example.com shop/w")
			f.expectStatus("FederatedWidget", "w", "gone")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.c1.Writes()
				f.c2.Writes()
				addWidgets(f)
				tc(f)
			})
		})
	}
}
