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
	w := &typesEnv{types: map[string]*unstructured.Unstructured{}, definitions: map[string]*unstructured.Unstructured{}}
	objects := controllertest.ReadYAML(t, deploy+"crds/core.yaml", deploy+"crds/federated.yaml", deploy+"types.yaml")
	for _, object := range objects {
		u := object.(*unstructured.Unstructured)
		if u.GetKind() == "FederatedTypeConfig" {
			w.types[u.GetName()] = u
		} else {
			w.definitions[u.GetName()] = u
		}
	}
	w.host = host{controllertest.NewHost(t, federation.Entry(), objects...), t}
	return w
}

func (w *typesEnv) get(name string) *unstructured.Unstructured {
	w.Helper()
	client, err := dynamic.NewForConfig(w.RESTConfig())
	if err != nil {
		w.Fatal(err)
	}
	u, err := client.Resource(federation.FederatedTypeConfigs).Namespace(namespace).Get(w.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return u
}

// change changes a field of the spec.
func (w *typesEnv) change(name, value string, path ...string) {
	w.Helper()
	u := w.get(name)
	if err := unstructured.SetNestedField(u.Object, value, append([]string{"spec"}, path...)...); err != nil {
		w.Fatal(err)
	}
	w.Put(u)
	w.Settle()
}

// doNotRun checks that these types do not run, and all others of the ten do, as their status says.
func (w *typesEnv) doNotRun(names ...string) {
	w.Helper()
	var running []string
	for _, of := range federation.Running(w.Controller("federation")) {
		running = append(running, of.Name)
	}
	for name := range w.types {
		runs := !slices.Contains(names, name)
		if slices.Contains(running, name) != runs {
			w.Errorf("%s runs: %t", name, !runs)
		}
		u := w.get(name)
		if status := policy.ReadTypeConfig(u).Status; (status.PropagationController == "Running") != runs || status.ObservedGeneration != u.GetGeneration() {
			w.Errorf("%s has the status %+v", name, status)
		}
	}
	if !slices.IsSorted(running) {
		w.Errorf("not sorted: %v", running)
	}
}

func (w *typesEnv) warned(want ...string) {
	w.Helper()
	var got []string
	for _, event := range w.Events() {
		got = append(got, strings.Join(strings.Fields(event)[1:3], " "))
	}
	if !slices.Equal(got, want) {
		w.Errorf("Events %q, want %q", got, want)
	}
}

const typePatch = "patch federatedtypeconfigs.core.kubefed.io"

func TestTypesRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		w.doNotRun()
		if writes := w.Writes(); len(writes) != 20 {
			t.Errorf("%d writes, want a finalizer and a status for each of ten: %q", len(writes), writes)
		}
		w.Restart()
		w.Settle()
		w.doNotRun()
		w.wrote()
		w.warned()
	})
}

func TestTypeSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		w.Writes()
		w.change("secrets", "Disabled", "propagation")
		w.doNotRun("secrets")
		w.change("secrets", "Enabled", "propagation")
		w.doNotRun()
		w.wrote(typePatch+"/status "+namespace+"/secrets", typePatch+"/status "+namespace+"/secrets")
		w.warned()
	})
}

// TestDefinitionGoesAndComes is what follows the CustomResourceDefinitions.
func TestDefinitionGoesAndComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		w.Delete(w.definitions["federatedsecrets.types.kubefed.io"])
		w.Settle()
		w.doNotRun("secrets")
		w.warned("FederatedTypeMissing " + namespace + "/secrets:")
		w.Put(w.definitions["federatedsecrets.types.kubefed.io"])
		w.Settle()
		w.doNotRun()
	})
}

// TestTypeDeleted deletes FederatedTypeConfigs. Without the FederatedTypeConfig namespaces, only types
// without namespaces run.
func TestTypeDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		w.Writes()
		w.Delete(w.get("namespaces"))
		w.Settle()
		delete(w.types, "namespaces")
		rest := []string{}
		for name := range w.types {
			if name != "clusterroles.rbac.authorization.k8s.io" {
				rest = append(rest, name)
			}
		}
		w.doNotRun(rest...)
		if writes := w.Writes(); !slices.Contains(writes, typePatch+" "+namespace+"/namespaces") || len(writes) != 9 {
			t.Errorf("%q, want the finalizer of namespaces to go, and eight statuses", writes)
		}
		if events := w.Events(); len(events) != 8 || !strings.HasPrefix(events[0], "Warning NamespaceTypeMissing ") {
			t.Errorf("Events %q", events)
		}
	})
}

func TestTypeMayNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		u := w.types["secrets"].DeepCopy()
		u.SetName("federatedconfigmaps.types.kubefed.io")
		u.SetResourceVersion("")
		for key, value := range map[string]string{"group": "types.kubefed.io", "version": "v1beta1", "kind": "FederatedConfigMap", "pluralName": "federatedconfigmaps"} {
			if err := unstructured.SetNestedField(u.Object, value, "spec", "targetType", key); err != nil {
				t.Fatal(err)
			}
		}
		w.types[u.GetName()] = u
		w.Put(u)
		w.Settle()
		w.doNotRun(u.GetName())
		w.warned("UnsupportedType " + namespace + "/" + u.GetName() + ":")
	})
}

// TestFederationSwitchedOff is the gate PushReconciler.
func TestFederationSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		config := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"scope": "Cluster",
			"featureGates": []any{map[string]any{"name": "PushReconciler", "configuration": "Disabled"}}}}}
		config.SetGroupVersionKind(federation.KubeFedConfigs.GroupVersion().WithKind("KubeFedConfig"))
		config.SetNamespace(namespace)
		config.SetName(policy.ConfigName)
		w.Put(runtime.Object(config))
		w.Settle()
		var names []string
		for name := range w.types {
			names = append(names, name)
		}
		w.doNotRun(names...)
		w.warned()
	})
}

// TestFinalizerOfOthersStays has one that somebody adds just before ours.
func TestFinalizerOfOthersStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTypesEnv(t)
		u := w.get("secrets")
		u.SetFinalizers([]string{"example.com/mine"})
		w.Lag(time.Second, "federatedtypeconfigs")
		w.Put(u)
		w.change("secrets", "Disabled", "propagation")
		w.Sleep(time.Minute)
		if got, want := w.get("secrets").GetFinalizers(), []string{"example.com/mine", policy.TypeFinalizer}; !slices.Equal(got, want) {
			t.Errorf("finalizers %v, want %v", got, want)
		}
	})
}
