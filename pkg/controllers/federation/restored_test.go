// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// restoreHost puts the host back to before c2 was placed.
func (f *fed) restoreHost() {
	f.t.Helper()
	f.change(f.Host, "PropagatedVersion", "shop", "configmap-f", func(u *unstructured.Unstructured) {
		recorded := policy.ReadPropagated(u)
		assert.NoError(f.t, unstructured.SetNestedSlice(u.Object, []any{map[string]any{"clusterName": "c1", "version": recorded.Clusters["c1"]}}, "status", "clusterVersions"))
	})
	f.setSpec("{clusters: [{name: c1}]}", "placement")
}

// allowRemovals allows removals in c2 for an hour.
func (f *fed) allowRemovals() {
	f.t.Helper()
	f.set(f.Host, "KubeFedCluster", namespace, "c2", time.Now().Add(time.Hour).UTC().Format("'"+time.RFC3339+"'"), "metadata", "annotations", policy.AllowRemovalsAnnotation)
}

// expectRemovalHeld checks that c2 keeps its object until that may be deleted, and then loses it.
func (f *fed) expectRemovalHeld() {
	f.t.Helper()
	f.Sleep(20 * time.Minute)
	f.expectWrites(f.c2)
	f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=RemovalHeld")
	f.expectWarnings(policy.RemovalsHeld)
	f.allowRemovals()
	f.Sleep(10 * time.Second)
	f.expectWrites(f.c2, configMapDelete)
	f.expectStatus("FederatedConfigMap", "f", "c1=")
	f.expectPropagated("c1")
}

// TestPlacementDeletesWhatIsRecorded begins with the federated object in both clusters.
func TestPlacementDeletesWhatIsRecorded(t *testing.T) {
	for name, tc := range map[string]func(f *fed){
		"the host is restored to before c2 was placed while the manager runs": func(f *fed) {
			f.restoreHost()
			f.expectRemovalHeld()
		},
		"the host is restored to before c2 was placed while no manager runs": func(f *fed) {
			f.Restart(f.restoreHost)
			f.expectRemovalHeld()
		},
		"the cache has the record that a restore has lost": func(f *fed) {
			f.Lag(time.Minute, "propagatedversions")
			f.restoreHost()
			<-time.After(settleTime)
			f.Lag(0, "propagatedversions")
			f.Sleep(time.Second)
			f.expectWrites(f.c2)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=RemovalHeld")
		},
		"the host is restored to before F was created": func(f *fed) {
			f.Restart(func() {
				f.Delete(f.get(f.Host, "PropagatedVersion", "shop", "configmap-f"))
				f.change(f.Host, "FederatedConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
				f.Delete(configMap(f.t))
			})
			f.Sleep(settleTime)
			f.expectWrites(f.c2, configMapPatch)
			f.expectConfigMap(f.c2, "unlabelled")
		},
		"somebody deletes the record": func(f *fed) {
			f.Delete(f.get(f.Host, "PropagatedVersion", "shop", "configmap-f"))
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.expectRemovalHeld()
		},
		"the record belongs to another object of the name of F": func(f *fed) {
			f.change(f.Host, "PropagatedVersion", "shop", "configmap-f", func(u *unstructured.Unstructured) {
				owners := u.GetOwnerReferences()
				owners[0].UID = "another"
				u.SetOwnerReferences(owners)
			})
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.expectRemovalHeld()
		},
		"F is placed in c2 again, and its record is written again": func(f *fed) {
			f.restoreHost()
			f.Sleep(settleTime)
			f.setSpec("{clusters: [{name: c1}, {name: c2}]}", "placement")
			f.Sleep(settleTime)
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
			f.expectPropagated("c1", "c2")
			f.c2.Writes()
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.Sleep(settleTime)
			f.expectWrites(f.c2, configMapDelete)
		},
		"c2 is deselected while it is away, and a new leader finds the record": func(f *fed) {
			f.c2.Cut()
			f.Sleep(time.Minute)
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.setSpec("c", "template", "data", "a")
			f.Sleep(10 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
			f.Restart()
			f.c2.Restore()
			f.Sleep(2 * time.Minute)
			f.expectWrites(f.c2, configMapDelete)
			f.expectStatus("FederatedConfigMap", "f", "c1=")
			f.expectPropagated("c1")
		},
		"c2 is deselected before its object is recorded": func(f *fed) {
			f.Put(federated(f.t, "ConfigMap", "g", "{template: {data: {a: b}}, "+bothClusters+"}"))
			f.c1.Hang() // until it has a result, nothing is recorded
			f.Sleep(time.Second)
			f.expectWrites(f.c2, "create configmaps shop/g")
			f.set(f.Host, "FederatedConfigMap", "shop", "g", "{clusters: [{name: c1}]}", "spec", "placement")
			f.Sleep(settleTime)
			f.expectWrites(f.c2, "delete configmaps shop/g")
		},
		"c2 is deselected between two leaders, when c1 has hung since g was created": func(f *fed) {
			f.c1.Hang()
			f.Put(federated(f.t, "ConfigMap", "g", "{template: {data: {a: b}}, "+bothClusters+"}"))
			f.Sleep(time.Second)
			f.expectWrites(f.c2, "create configmaps shop/g")
			f.Restart(func() {
				f.set(f.Host, "FederatedConfigMap", "shop", "g", "{clusters: [{name: c1}]}", "spec", "placement")
			})
			f.Sleep(2 * time.Minute)
			f.expectWrites(f.c2, "delete configmaps shop/g")
		},
		"F has the record of an earlier F, which the garbage collector deletes later": func(f *fed) {
			earlierRecord := f.get(f.Host, "PropagatedVersion", "shop", "configmap-f")
			f.Delete(configMap(f.t))
			f.Sleep(settleTime)
			earlierRecord.SetResourceVersion("")
			f.Put(earlierRecord, configMap(f.t))
			f.Sleep(settleTime)
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
			f.expectPropagated("c1", "c2")
			record := f.get(f.Host, "PropagatedVersion", "shop", "configmap-f")
			if uid := f.get(f.Host, "FederatedConfigMap", "shop", "f").GetUID(); record.GetUID() == earlierRecord.GetUID() || policy.ReadPropagated(record).Owner != uid {
				f.t.Errorf("the record is %v of %v", record.GetUID(), record.GetOwnerReferences())
			}
			f.c2.Writes()
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.Sleep(settleTime)
			f.expectWrites(f.c2, configMapDelete)
			f.expectPropagated("c1")
		},
		"F is replaced by another of its name": func(f *fed) {
			f.Delete(configMap(f.t))
			f.Sleep(settleTime)
			if f.get(f.Host, "PropagatedVersion", "shop", "configmap-f") != nil {
				f.t.Error("the record has outlived F")
			}
		},
	} {
		t.Run(name, func(t *testing.T) { runWithConfigMap(t, tc) })
	}
}

// TestClustersJoinAgainWithoutLabels has few objects, so that the guard does not hold their removal.
func TestClustersJoinAgainWithoutLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFed(t)
		for i := range 5 {
			f.Put(federated(t, "ConfigMap", fmt.Sprintf("f%d", i), "{template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {name: c2}}}}"))
		}
		f.Sleep(settleTime)
		f.c2.Writes()
		c2 := f.get(f.Host, "KubeFedCluster", namespace, "c2")
		f.Delete(c2)
		f.Sleep(time.Minute)
		f.Put(newKubeFedCluster("c2", policy.ClusterSpec{APIEndpoint: f.c2.Address}))
		f.Sleep(10 * time.Minute)
		f.expectWrites(f.c2, "update namespaces shop (unchanged)")
		f.expectStatus("FederatedConfigMap", "f3", "CheckClusters c2=RemovalHeld")
		f.allowRemovals()
		f.Sleep(10 * time.Second)
		if n := len(f.c2.Writes()); n != 5 {
			t.Errorf("%d writes after it was allowed", n)
		}
	})
}
