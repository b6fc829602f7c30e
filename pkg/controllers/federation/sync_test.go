// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const (
	configMapCreate = "create configmaps shop/f"
	configMapUpdate = "update configmaps shop/f"
	configMapDelete = "delete configmaps shop/f"
	configMapPatch  = "patch configmaps shop/f"
)

// TestClustersFollowTheFederatedObject begins with the federated object in both clusters.
func TestClustersFollowTheFederatedObject(t *testing.T) {
	for name, tc := range map[string]func(f *fed){
		"F is in both": func(f *fed) {
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
			f.expectPropagated("c1", "c2")
			f.expectConfigMap(f.c1, "managed")
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2)
			f.expectWarnings()
		},
		"F changes": func(f *fed) {
			f.setSpec("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectWrites(f.c2, configMapUpdate)
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
		},
		"the loop of c1 ends early and is started again": func(f *fed) {
			restart := federation.EndLoop(f.Controller(federation.Name), "c1")
			f.setSpec("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2, configMapUpdate)
			restart(f.t.Context())
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"c1 hangs, and c2 goes on": func(f *fed) {
			f.c1.Hang()
			f.setSpec("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.expectWrites(f.c2, configMapUpdate)
			f.Sleep(2 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=ClusterNotReady c2=")
			f.c1.Restore()
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
		},
		"a new leader finds that c2 does not answer": func(f *fed) {
			f.Restart(f.c2.Cut)
			f.Sleep(45 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
		},
		"a new cluster is not ready": func(f *fed) {
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {}}", "spec", "placement")
			f.setSpec("{clusterSelector: {}}", "placement")
			f.Sleep(time.Minute)
			f.Put(kubeFedCluster(f.c1, "c3"))
			f.Sleep(10 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2= c3=ClusterNotReady")
		},
		"the Secret of c1 is gone, and c2 goes on": func(f *fed) {
			f.Delete(secret("c1", "one"))
			f.Sleep(time.Second)
			f.setSpec("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2, configMapUpdate)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=ClusterNotReady c2=")
			f.Put(secret("c1", "one"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"a rotated token is used at the next request": func(f *fed) {
			lists := func() float64 { return f.Metric("quartermaster_informer_lists_total", "cluster", "c1") }
			before := lists()
			f.Put(secret("c1", "other"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			if after := lists(); before == 0 || after != before {
				f.t.Errorf("%v lists, before %v", after, before)
			}
			f.setSpec("c", "template", "data", "a")
			f.Sleep(time.Second)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"a type that is switched off writes nothing": func(f *fed) {
			f.set(f.Host, "FederatedTypeConfig", namespace, "configmaps", "Disabled", "spec", "propagation")
			f.Sleep(time.Second)
			f.setSpec("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			f.set(f.Host, "FederatedTypeConfig", namespace, "configmaps", "Enabled", "spec", "propagation")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectWrites(f.c2, configMapUpdate)
		},
		"types with namespaces stop without the FederatedTypeConfig of Namespaces": func(f *fed) {
			f.Delete(f.get(f.Host, "FederatedTypeConfig", namespace, "namespaces"))
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2)
			f.expectConfigMap(f.c1, "managed")
			f.expectWarnings("NamespaceTypeMissing")
		},
		"a malformed selector changes nothing in the clusters": func(f *fed) {
			f.setSpec("{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", "placement")
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2)
			f.expectStatus("FederatedConfigMap", "f", "ComputePlacementFailed")
		},
		"nothing is placed without a FederatedNamespace": func(f *fed) {
			f.change(f.Host, "FederatedNamespace", "shop", "shop", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
			f.Delete(f.get(f.Host, "FederatedNamespace", "shop", "shop"))
			f.Sleep(settleTime)
			f.expectStatus("FederatedConfigMap", "f", "NamespaceNotFederated")
			f.expectConfigMap(f.c1, "gone")
			f.expectConfigMap(f.c2, "gone")
		},
		"the object in c2 is deleted when c2 is deselected": func(f *fed) {
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2, configMapDelete)
			f.expectStatus("FederatedConfigMap", "f", "c1=")
			f.expectPropagated("c1")
		},
		"a cluster's annotations and finalizers stay": func(f *fed) {
			f.change(f.c1, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) {
				u.SetAnnotations(map[string]string{"x": "y"})
				u.SetFinalizers([]string{"example.com/mine"})
			})
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate+" (unchanged)")
			u := f.get(f.c1, "ConfigMap", "shop", "f")
			if u.GetAnnotations()["x"] != "y" || len(u.GetFinalizers()) != 1 {
				f.t.Errorf("%v", u.Object["metadata"])
			}
		},
		"a cluster's labels of its Namespace stay": func(f *fed) {
			f.change(f.c1, "Namespace", "", "shop", func(u *unstructured.Unstructured) {
				u.SetLabels(map[string]string{policy.ManagedLabel: "true", "x": "y"})
			})
			f.Sleep(time.Minute)
			if u := f.get(f.c1, "Namespace", "", "shop"); u.GetLabels()["x"] != "y" {
				f.t.Errorf("labels %v", u.GetLabels())
			}
		},
		"overridden annotations are written and restored": func(f *fed) {
			f.set(f.c1, "ConfigMap", "shop", "f", "{revision: '7'}", "metadata", "annotations")
			f.Sleep(time.Minute)
			f.c1.Writes()
			f.setSpec("[{clusterName: c1, clusterOverrides: [{op: add, path: /metadata/annotations, value: {foo: bar}}]}]", "overrides")
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectWrites(f.c2)
			if a := f.get(f.c1, "ConfigMap", "shop", "f").GetAnnotations(); a["foo"] != "bar" || a["revision"] != "7" {
				f.t.Errorf("annotations %v", a)
			}
			f.change(f.c1, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetAnnotations(map[string]string{"revision": "7"}) })
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"an override of a missing path fails in its own cluster only": func(f *fed) {
			f.setSpec("[{clusterName: c1, clusterOverrides: [{path: /x/y, value: 1}]}]", "overrides")
			f.setSpec("c", "template", "data", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2, configMapUpdate)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=ApplyOverridesFailed c2=")
			f.expectPropagated("c1", "c2")
			f.expectWarnings("UpdateInClusterFailed")
		},
		"an override to another namespace is refused": func(f *fed) {
			f.setSpec("[{clusterName: c1, clusterOverrides: [{path: /metadata, value: {name: f, namespace: kube-system}}]}]", "overrides")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=ApplyOverridesFailed c2=")
		},
		"an override cannot drop the managed label": func(f *fed) {
			f.setSpec("[{clusterName: c1, clusterOverrides: [{path: /metadata/labels, value: {x: 'y'}}]}]", "overrides")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			if l := f.get(f.c1, "ConfigMap", "shop", "f").GetLabels(); l[policy.ManagedLabel] != "true" || l["x"] != "y" {
				f.t.Errorf("labels %v", l)
			}
		},
		"an object labelled as not managed is left alone": func(f *fed) {
			f.set(f.c1, "ConfigMap", "shop", "f", "{kubefed.io/managed: 'false'}", "metadata", "labels")
			f.setSpec("c", "template", "data", "a")
			f.Sleep(20 * time.Minute)
			for _, w := range f.c1.Writes() {
				if !strings.HasSuffix(w, ": AlreadyExists") {
					f.t.Errorf("wrote %q", w)
				}
			}
			f.expectWrites(f.c2, configMapUpdate)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=ManagedLabelFalse c2=")
		},
		"a changed override of c1 writes in c1 alone": func(f *fed) {
			f.setSpec("[{clusterName: c1, clusterOverrides: [{path: /data/a, value: x}]}]", "overrides")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectWrites(f.c2)
			f.expectPropagated("c1", "c2")
		},
		"a restart writes nothing": func(f *fed) {
			f.OnRead(func(r controllertest.Request) error {
				if r.Verb == "get" && r.Resource == "federatedconfigmaps.types.kubefed.io" {
					f.t.Errorf("the host is asked for %s", r)
				}
				return nil
			})
			for _, c := range []*controllertest.Cluster{f.c1, f.c2} {
				c.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" && r.String() != "get namespaces kube-system" {
						f.t.Errorf("a cluster is asked for %s", r)
					}
					return nil
				})
			}
			f.Restart()
			f.Sleep(20 * time.Minute)
			f.OnRead(nil)
			f.expectWrites(f.c1)
			f.expectWrites(f.c2)
			for _, w := range f.Writes() {
				if !strings.HasPrefix(w, statusPatch) {
					f.t.Errorf("wrote %q on the host", w)
				}
			}
		},
		"drift is put right with one write": func(f *fed) {
			f.set(f.c1, "ConfigMap", "shop", "f", "mine", "data", "a")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
			f.expectWrites(f.c2)
			if u := f.get(f.c1, "ConfigMap", "shop", "f"); u.Object["data"].(map[string]any)["a"] != "b" {
				f.t.Errorf("%v", u.Object)
			}
		},
		"a write that somebody reverts each time is made ever more seldom": func(f *fed) {
			for range 20 {
				f.set(f.c1, "ConfigMap", "shop", "f", "mine", "data", "a")
				f.Sleep(time.Second)
			}
			if n := len(f.c1.Writes()); n != 5 {
				f.t.Errorf("%d writes in 20 s, want 5", n)
			}
			f.Sleep(20 * time.Minute)
			f.expectWarnings("UpdateConflict")
			f.expectConfigMap(f.c1, "managed")
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
		},
		"a managed object without a federated object loses its label": func(f *fed) {
			f.c1.Put(object(f.t, "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: shop, name: other, labels: {kubefed.io/managed: 'true', x: 'y'}}}"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "patch configmaps shop/other")
			if l := f.get(f.c1, "ConfigMap", "shop", "other").GetLabels(); len(l) != 1 {
				f.t.Errorf("labels %v", l)
			}
		},
		"deleting F deletes its objects in all clusters": func(f *fed) {
			f.Delete(configMap(f.t))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapDelete)
			f.expectWrites(f.c2, configMapDelete)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"F is deleted, and a cluster keeps its object for a while": func(f *fed) {
			f.change(f.c1, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers([]string{"example.com/mine"}) })
			f.Sleep(time.Minute)
			f.Delete(configMap(f.t))
			f.Sleep(20 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=WaitingForRemoval c2=")
			f.change(f.c1, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
			f.Sleep(time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"deleting an orphaning F leaves its objects": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/orphan: 'true'}", "metadata", "annotations")
			f.Sleep(time.Second)
			f.Delete(configMap(f.t))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapPatch)
			f.expectConfigMap(f.c1, "unlabelled")
			f.expectConfigMap(f.c2, "unlabelled")
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"a malformed deleteoption deletes nothing": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/deleteoption: soon}", "metadata", "annotations")
			f.Sleep(time.Second)
			f.Delete(configMap(f.t))
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c1)
			f.expectWarnings("InvalidDeleteOptions")
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/deleteoption: '{\"gracePeriodSeconds\":7}'}", "metadata", "annotations")
			var body string
			f.c1.OnWrite(func(r controllertest.Request) error { body = string(r.Body); return nil })
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, configMapDelete)
			if !strings.Contains(body, `"gracePeriodSeconds":7`) || !strings.Contains(body, `"resourceVersion"`) || !strings.Contains(body, `"uid"`) {
				f.t.Error(body)
			}
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"a cluster that leaves keeps its objects": func(f *fed) {
			f.Delete(kubeFedCluster(f.c2, "c2"))
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c2)
			f.expectConfigMap(f.c2, "managed")
			f.expectStatus("FederatedConfigMap", "f", "c1=")
			f.expectPropagated("c1")
		},
		"federation rests while KubeFed leads": func(f *fed) {
			renewLock := func(n int) {
				f.Put(object(f.t, fmt.Sprintf("{apiVersion: v1, kind: ConfigMap, metadata: {namespace: %s, name: %s, "+
					"annotations: {control-plane.alpha.kubernetes.io/leader: '%d'}}}", namespace, federation.KubeFedLock, n)))
			}
			renewLock(1)
			for n := range 30 {
				renewLock(n)
				f.Sleep(5 * time.Second)
				if n == 12 {
					f.setSpec("c", "template", "data", "a")
				}
			}
			f.expectWrites(f.c1)
			f.Sleep(2 * time.Minute)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"a lock that KubeFed has left long ago delays no leader": func(f *fed) {
			f.Put(object(f.t, fmt.Sprintf("{apiVersion: v1, kind: ConfigMap, metadata: {namespace: %s, name: %s, "+
				"annotations: {control-plane.alpha.kubernetes.io/leader: '{\"renewTime\":%q}'}}}", namespace, federation.KubeFedLock, time.Now().Add(-2*time.Hour).UTC().Format(time.RFC3339))))
			f.Restart(func() { f.setSpec("c", "template", "data", "a") })
			f.Sleep(10 * time.Second)
			f.expectWrites(f.c1, configMapUpdate)
		},
		"a write in a cluster fails, and is tried again": func(f *fed) {
			f.c1.OnWrite(func(controllertest.Request) error { return errors.New("no space left") })
			f.setSpec("c", "template", "data", "a")
			f.Sleep(5 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=UpdateFailed c2=")
			f.expectWrites(f.c2, configMapUpdate)
			f.expectWarnings("UpdateInClusterFailed")
			f.c1.OnWrite(nil)
			f.Sleep(20 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
		},
		"a cluster answers 403 for a type": func(f *fed) {
			refuse := func(r controllertest.Request) error {
				if strings.HasPrefix(r.Resource, "configmaps") {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "", errors.New("no"))
				}
				return nil
			}
			f.c1.OnWrite(refuse)
			f.setSpec("c", "template", "data", "a")
			f.Put(federated(f.t, "Secret", "s", "{template: {stringData: {a: b}}, "+bothClusters+"}"))
			f.Sleep(5 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=UpdateFailed c2=")
			if w := f.c2.Writes(); !slices.Contains(w, configMapUpdate) || !slices.Contains(w, "create secrets shop/s") {
				f.t.Errorf("wrote %q", w)
			}
			if w := f.c1.Writes(); !slices.Contains(w, "create secrets shop/s") {
				f.t.Errorf("wrote %q", w)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { runWithConfigMap(t, tc) })
	}
}
