// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// typesEnv has the ten types of deploy/federation, and one of the definitions as an object.
type typesEnv struct {
	host
	types, definitions map[string]*unstructured.Unstructured
}

func newTypesEnv(t *testing.T) *typesEnv {
	t.Helper()
	const deploy = "../../../deploy/federation/"
	e := &typesEnv{types: map[string]*unstructured.Unstructured{}, definitions: map[string]*unstructured.Unstructured{}}
	objects := controllertest.ReadYAML(t, deploy+"crds/core.yaml", deploy+"crds/federated.yaml", deploy+"types.yaml")
	for _, object := range objects {
		u := object.(*unstructured.Unstructured)
		if u.GetKind() == "FederatedTypeConfig" {
			e.types[u.GetName()] = u
		} else {
			e.definitions[u.GetName()] = u
		}
	}
	e.host = host{controllertest.NewHost(t, federation.Entry(), objects...), t}
	return e
}

func (e *typesEnv) get(name string) *unstructured.Unstructured {
	e.Helper()
	client, err := dynamic.NewForConfig(e.RESTConfig())
	assert.NoError(e, err)
	u, err := client.Resource(federation.FederatedTypeConfigs).Namespace(namespace).Get(e.Context(), name, metav1.GetOptions{})
	assert.NoError(e, err)
	return u
}

// change changes a field of the spec.
func (e *typesEnv) change(name, value string, path ...string) {
	e.Helper()
	u := e.get(name)
	assert.NoError(e, unstructured.SetNestedField(u.Object, value, append([]string{"spec"}, path...)...))
	e.Put(u)
	e.Settle()
}

// expectRunningExcept checks that these types do not run, and all others of the ten do, as their status says.
func (e *typesEnv) expectRunningExcept(names ...string) {
	e.Helper()
	var running []string
	for _, config := range federation.Running(e.Controller("federation")) {
		running = append(running, config.Name)
	}
	for name := range e.types {
		runs := !slices.Contains(names, name)
		if slices.Contains(running, name) != runs {
			e.Errorf("%s runs: %t", name, !runs)
		}
		u := e.get(name)
		if status := policy.ReadTypeConfig(u).Status; (status.PropagationController == "Running") != runs || status.ObservedGeneration != u.GetGeneration() {
			e.Errorf("%s has the status %+v", name, status)
		}
	}
}

func (e *typesEnv) expectWarnings(want ...string) {
	e.Helper()
	var got []string
	for _, event := range e.Events() {
		got = append(got, strings.Join(strings.Fields(event)[1:3], " "))
	}
	if !slices.Equal(got, want) {
		e.Errorf("Events %q, want %q", got, want)
	}
}

const typePatch = "patch federatedtypeconfigs.core.kubefed.io"

func TestEveryTypeOfKubeFedGetsAStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		e.expectRunningExcept()
		if writes := e.Writes(); len(writes) != 20 {
			t.Errorf("%d writes, want a finalizer and a status for each of ten: %q", len(writes), writes)
		}
		e.Restart()
		e.Settle()
		e.expectRunningExcept()
		e.expectWrites()
		e.expectWarnings()
	})
}

func TestTypeThatIsDisabledStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		e.Writes()
		e.change("secrets", "Disabled", "propagation")
		e.expectRunningExcept("secrets")
		e.change("secrets", "Enabled", "propagation")
		e.expectRunningExcept()
		e.expectWrites(typePatch+"/status "+namespace+"/secrets", typePatch+"/status "+namespace+"/secrets")
		e.expectWarnings()
	})
}

// TestTypeRunsWhileItsDefinitionExists is what follows the CustomResourceDefinitions.
func TestTypeRunsWhileItsDefinitionExists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		e.Delete(e.definitions["federatedsecrets.types.kubefed.io"])
		e.Settle()
		e.expectRunningExcept("secrets")
		e.expectWarnings("FederatedTypeMissing " + namespace + "/secrets:")
		e.Put(e.definitions["federatedsecrets.types.kubefed.io"])
		e.Settle()
		e.expectRunningExcept()
	})
}

// TestNamespacedTypesNeedTheTypeNamespaces deletes FederatedTypeConfigs. Without the FederatedTypeConfig
// namespaces, only types without namespaces run.
func TestNamespacedTypesNeedTheTypeNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		e.Writes()
		e.Delete(e.get("namespaces"))
		e.Settle()
		delete(e.types, "namespaces")
		others := []string{}
		for name := range e.types {
			if name != "clusterroles.rbac.authorization.k8s.io" {
				others = append(others, name)
			}
		}
		e.expectRunningExcept(others...)
		if writes := e.Writes(); !slices.Contains(writes, typePatch+" "+namespace+"/namespaces") || len(writes) != 9 {
			t.Errorf("%q, want the finalizer of namespaces to go, and eight statuses", writes)
		}
		if events := e.Events(); len(events) != 8 || !strings.HasPrefix(events[0], "Warning NamespaceTypeMissing ") {
			t.Errorf("Events %q", events)
		}
	})
}

func TestTypeMayNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		u := e.types["secrets"].DeepCopy()
		u.SetName("federatedconfigmaps.types.kubefed.io")
		u.SetResourceVersion("")
		for key, value := range map[string]string{"group": "types.kubefed.io", "version": "v1beta1", "kind": "FederatedConfigMap", "pluralName": "federatedconfigmaps"} {
			assert.NoError(t, unstructured.SetNestedField(u.Object, value, "spec", "targetType", key))
		}
		assert.NoError(t, unstructured.SetNestedField(u.Object, "federatedothers", "spec", "federatedType", "pluralName"))
		e.types[u.GetName()] = u
		e.Put(u)
		e.Settle()
		e.expectRunningExcept(u.GetName())
		e.expectWarnings("UnsupportedType " + namespace + "/" + u.GetName() + ":")
	})
}

// TestTwoTypesOfOneFederatedTypeDoNotRun has a FederatedTypeConfig that names the federated type of another.
// The other objects are those that clusters would lose, or be given.
func TestTwoTypesOfOneFederatedTypeDoNotRun(t *testing.T) {
	for name, ownKind := range map[string]string{"secrets": "FederatedSecret", "namespaces": "FederatedNamespace"} {
		t.Run(name, func(t *testing.T) {
			runWithConfigMap(t, func(f *fed) {
				f.Put(federated(t, "Secret", "f", "{template: {data: {a: Yg==}}, "+bothClusters+"}"))
				f.Sleep(settleTime)
				f.c1.Writes()
				f.c2.Writes()
				setFederatedKind := func(kind string) {
					f.change(f.Host, "FederatedTypeConfig", namespace, name, func(u *unstructured.Unstructured) {
						federatedType := u.Object["spec"].(map[string]any)["federatedType"].(map[string]any)
						federatedType["kind"], federatedType["pluralName"] = kind, strings.ToLower(kind)+"s"
					})
				}
				setFederatedKind("FederatedConfigMap")
				f.Sleep(settleTime)
				f.setSpec("{clusters: [{name: c1}]}", "placement")
				f.Sleep(time.Minute)
				f.expectWrites(f.c1)
				f.expectWrites(f.c2)
				for _, name := range []string{name, "configmaps"} {
					if !slices.ContainsFunc(f.Events(), func(event string) bool {
						return strings.HasPrefix(event, "Warning UnsupportedType "+namespace+"/"+name+": federatedconfigmaps.types.kubefed.io is the federated type of ")
					}) {
						t.Errorf("no Warning on %s: %q", name, f.Events())
					}
				}
				setFederatedKind(ownKind)
				f.Sleep(settleTime)
				f.expectWrites(f.c1)
				f.expectWrites(f.c2, configMapDelete)
			})
		})
	}
}

// TestGatePushReconcilerStopsEveryType is the gate PushReconciler.
func TestGatePushReconcilerStopsEveryType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		config := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"scope": "Cluster",
			"featureGates": []any{map[string]any{"name": "PushReconciler", "configuration": "Disabled"}}}}}
		config.SetGroupVersionKind(federation.KubeFedConfigs.GroupVersion().WithKind("KubeFedConfig"))
		config.SetNamespace(namespace)
		config.SetName(policy.ConfigName)
		e.Put(runtime.Object(config))
		e.Settle()
		var names []string
		for name := range e.types {
			names = append(names, name)
		}
		e.expectRunningExcept(names...)
		e.expectWarnings()
	})
}

// TestFinalizerOfOthersStays has one that somebody adds just before ours.
func TestFinalizerOfOthersStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTypesEnv(t)
		u := e.get("secrets")
		u.SetFinalizers([]string{"example.com/mine"})
		e.Lag(time.Second, "federatedtypeconfigs")
		e.Put(u)
		e.change("secrets", "Disabled", "propagation")
		e.Sleep(time.Minute)
		if got, want := e.get("secrets").GetFinalizers(), []string{"example.com/mine", policy.TypeFinalizer}; !slices.Equal(got, want) {
			t.Errorf("finalizers %v, want %v", got, want)
		}
	})
}
