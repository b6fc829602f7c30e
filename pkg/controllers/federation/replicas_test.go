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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
)

const (
	spreadUpdate     = "update federateddeployments.types.kubefed.io shop/d"
	deploymentDelete = "delete deployments.apps shop/d"
)

// preference is a ReplicaSchedulingPreference for the federated object d.
func preference(t *testing.T, spec string) *unstructured.Unstructured {
	t.Helper()
	return object(t, "{apiVersion: scheduling.kubefed.io/v1alpha1, kind: ReplicaSchedulingPreference, metadata: {namespace: shop, name: d}, spec: {"+spec+"}}")
}

// deploymentTarget begins the spec of a preference for a FederatedDeployment.
const deploymentTarget = "targetKind: FederatedDeployment, "

// federatedDeployment is a federated Deployment, which no cluster is to have before it has a preference.
func federatedDeployment(t *testing.T, spec string) *unstructured.Unstructured {
	t.Helper()
	return federated(t, "Deployment", "d", "{template: {spec: {selector: {matchLabels: {app: d}}}}, "+spec+"}")
}

// spread returns where a federated object is placed, and the replicas in its overrides, such as "c1=5 c2=5".
func (f *fed) spread(kind string) string {
	f.t.Helper()
	u := f.get(f.Host, kind, "shop", "d")
	replicas := map[any]string{}
	overrides, _, _ := unstructured.NestedSlice(u.Object, "spec", "overrides")
	for _, item := range overrides {
		operations, _ := item.(map[string]any)["clusterOverrides"].([]any)
		for _, o := range operations {
			operation := o.(map[string]any)
			replicas[item.(map[string]any)["clusterName"]] += strings.TrimPrefix(fmt.Sprint(operation["path"], "=", operation["value"]), "/spec/replicas")
		}
	}
	var texts []string
	placed, _, _ := unstructured.NestedSlice(u.Object, "spec", "placement", "clusters")
	for _, item := range placed {
		name := item.(map[string]any)["name"]
		texts = append(texts, fmt.Sprint(name, replicas[name]))
		delete(replicas, name)
	}
	for name, n := range replicas {
		texts = append(texts, fmt.Sprint("not in ", name, n))
	}
	return strings.Join(texts, " ")
}

// expectSpread checks where the federated Deployment is placed, and its replicas.
func (f *fed) expectSpread(want string) {
	f.t.Helper()
	if got := f.spread("FederatedDeployment"); got != want {
		f.t.Errorf("%s, want %s", got, want)
	}
}

// setReady makes replicas of the Deployment ready, as its controller does, and shows the rest as Pods without
// a Node.
func (f *fed) setReady(c *controllertest.Cluster, ready int64) {
	f.t.Helper()
	u := f.get(c, "Deployment", "shop", "d")
	replicas, _, _ := unstructured.NestedInt64(u.Object, "spec", "replicas")
	for i := range replicas {
		status := "{phase: Running, conditions: [{type: Ready, status: 'True'}]}"
		if i >= ready {
			status = fmt.Sprintf("{phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, lastTransitionTime: '%s'}]}", time.Now().UTC().Format(time.RFC3339))
		}
		c.Put(object(f.t, fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {namespace: shop, name: d%d, labels: {app: d}}, status: %s}", i, status)))
	}
	f.set(c, "Deployment", "shop", "d", fmt.Sprint(min(ready, replicas)), "status", "readyReplicas")
}

// setAllReady makes all replicas ready that are asked for.
func (f *fed) setAllReady(clusters ...*controllertest.Cluster) {
	f.t.Helper()
	for _, c := range clusters {
		f.setReady(c, 1000)
	}
}

// countWrites returns how often the host or a cluster was written in this way since the last call, and
// forgets the rest.
func countWrites(server apiServer, write string) int {
	n := 0
	for _, text := range server.Writes() {
		if text == write {
			n++
		}
	}
	return n
}

// expectDeploymentWrites checks the Deployment's writes in a cluster since the last call, without repeats.
func (f *fed) expectDeploymentWrites(c *controllertest.Cluster, want ...string) {
	f.t.Helper()
	writes := slices.DeleteFunc(c.Writes(), func(text string) bool { return !strings.Contains(text, "deployments.apps") })
	if got := slices.Compact(writes); !slices.Equal(got, want) {
		f.t.Errorf("wrote %q, want %q", got, want)
	}
}

// TestReplicasFollowThePreference has a federated Deployment that is placed nowhere until a preference says
// where.
func TestReplicasFollowThePreference(t *testing.T) {
	for name, tc := range map[string]func(f *fed){
		"equal parts by default": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.expectSpread("c1=5 c2=4")
			f.expectDeploymentWrites(f.c1, "create deployments.apps shop/d")
			if n := countWrites(f.Host, spreadUpdate); n != 1 {
				f.t.Errorf("%d writes", n)
			}
			f.setAllReady(f.c1, f.c2)
			f.Sleep(20 * time.Minute)
			if n := countWrites(f.Host, spreadUpdate); n != 0 {
				f.t.Errorf("%d writes without a change", n)
			}
			if n := f.Metric(federation.MetricPrefix + "replica_writes_total"); n != 1 {
				f.t.Errorf("the metric is %v", n)
			}
		},
		"a preference that changes": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.Put(preference(f.t, deploymentTarget+"totalReplicas: 9, clusters: {c1: {weight: 1, maxReplicas: 2}, '*': {weight: 1}}"))
			f.Sleep(time.Minute)
			f.expectSpread("c1=2 c2=7")
		},
		"a preference that goes leaves all as it is": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.Delete(preference(f.t, "x: y"))
			f.Sleep(time.Minute)
			f.expectSpread("c1=5 c2=4")
		},
		"other overrides stay, in their order": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {clusters: [{name: c9}]}, overrides: [{clusterName: c9, clusterOverrides: [{path: /spec/replicas, value: 3}, {path: /spec/paused, value: true}]}, "+
				"{clusterName: c2, clusterOverrides: [{path: /spec/replicas, value: 1}, {path: /spec/paused, value: true}]}]"),
				preference(f.t, deploymentTarget+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.expectSpread("c1=1 c2=1/spec/paused=true not in c9/spec/paused=true")
			if n := countWrites(f.Host, spreadUpdate); n != 1 {
				f.t.Errorf("%d writes", n)
			}
		},
		"somebody else changes the replicas": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.set(f.Host, "FederatedDeployment", "shop", "d", "[]", "spec", "overrides")
			f.Sleep(10 * time.Second)
			f.expectSpread("c1=1 c2=1")
		},
		"the selectors of F and its namespace": func(f *fed) {
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusters: [{name: c1}, {name: c2}], clusterSelector: {}}", "spec", "placement")
			f.Put(federatedDeployment(f.t, "placement: {clusterSelector: {matchLabels: {name: c2}}}"), preference(f.t, deploymentTarget+"totalReplicas: 9, intersectWithClusterSelector: true"))
			f.Sleep(time.Minute)
			f.expectSpread("c2=9")
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchLabels: {name: c1}}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.expectSpread("c2=9") // no cluster, no write
			f.change(f.Host, "KubeFedCluster", namespace, "c1", func(u *unstructured.Unstructured) { u.SetLabels(map[string]string{"name": "c2"}) })
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchLabels: {name: c2}}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.expectSpread("c1=5 c2=4")
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.expectWarnings("ComputePlacementFailed", "InvalidPreference")
			f.expectSpread("c1=5 c2=4")
		},
		"numbers that are wrong": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {clusters: [{name: c1}]}"), preference(f.t, deploymentTarget+"totalReplicas: 9, clusters: {c1: {weight: -1}}"))
			f.Sleep(time.Minute)
			f.set(f.Host, "FederatedDeployment", "shop", "d", "true", "spec", "retainReplicas") // it is decided on again
			f.Sleep(time.Minute)
			f.expectSpread("c1")
			f.expectWarnings("InvalidPreference")
			if n := len(slices.DeleteFunc(f.Events(), func(text string) bool { return !strings.Contains(text, "InvalidPreference") })); n != 1 {
				f.t.Errorf("%d Events", n)
			}
		},
		"the gate is off, then on": func(f *fed) {
			setGate := func(state string) {
				f.Put(object(f.t, "{apiVersion: core.kubefed.io/v1beta1, kind: KubeFedConfig, metadata: {namespace: "+namespace+", name: kubefed}, "+
					"spec: {scope: Cluster, featureGates: [{name: SchedulerPreferences, configuration: "+state+"}]}}"))
			}
			setGate("Disabled")
			f.Settle() // the cache may learn of the preference first
			f.Put(federatedDeployment(f.t, "placement: {clusters: [{name: c1}]}"), preference(f.t, deploymentTarget+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.expectSpread("c1")
			setGate("Enabled")
			f.Sleep(10 * time.Second)
			f.expectSpread("c1=1 c2=1")
		},
		"the federated object comes later": func(f *fed) {
			f.Put(preference(f.t, deploymentTarget+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.Put(federatedDeployment(f.t, "placement: {}"))
			f.Sleep(10 * time.Second)
			f.expectSpread("c1=1 c2=1")
		},
		"a FederatedReplicaSet": func(f *fed) {
			f.Put(federated(f.t, "ReplicaSet", "d", "{template: {spec: {selector: {matchLabels: {app: d}}}}}"), federatedDeployment(f.t, "placement: {}"),
				preference(f.t, "targetKind: FederatedReplicaSet, totalReplicas: 2"))
			f.Sleep(time.Minute)
			if got := f.spread("FederatedReplicaSet"); got != "c1=1 c2=1" {
				f.t.Error(got)
			}
			f.expectSpread("")
		},
		"a cluster is joined": func(f *fed) {
			c3 := f.AddCluster("c3")
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 9, rebalance: true"), secret("c3", "three"))
			f.Sleep(time.Minute)
			f.Put(kubeFedCluster(c3, "c3"))
			f.Sleep(time.Minute)
			f.expectSpread("c1=3 c2=3 c3=3")
		},
		"Pods that have had no Node for a minute go elsewhere": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 8"))
			f.Sleep(20 * time.Second)
			f.expectSpread("c1=4 c2=4")
			f.setAllReady(f.c1)
			f.setReady(f.c2, 1)
			f.Sleep(50 * time.Second)
			f.expectSpread("c1=4 c2=4")
			f.Sleep(time.Minute)
			f.expectSpread("c1=7 c2=1")
		},
		"with rebalance some wait, to see when there is room again": func(f *fed) {
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 8, rebalance: true"))
			f.Sleep(20 * time.Second)
			f.setAllReady(f.c1)
			f.setReady(f.c2, 1)
			f.Sleep(2 * time.Minute)
			f.expectSpread("c1=7 c2=4")
			f.setAllReady(f.c1, f.c2)
			f.Sleep(3 * time.Minute)
			f.expectSpread("c1=4 c2=4")
		},
		"a cluster does not tell its Pods": func(f *fed) {
			f.c2.OnRead(func(r controllertest.Request) error {
				if r.Resource != "pods" {
					return nil
				}
				return apierrors.NewForbidden(schema.GroupResource{Resource: r.Resource}, "", errors.New("a test"))
			})
			f.Put(federatedDeployment(f.t, "placement: {}"), preference(f.t, deploymentTarget+"totalReplicas: 8"))
			f.Sleep(20 * time.Second)
			f.expectSpread("c1=4 c2=4") // there was nothing yet
			f.Put(preference(f.t, deploymentTarget+"totalReplicas: 9"))
			f.Sleep(20 * time.Second)
			f.expectSpread("c1=4 c2=4")
			f.c2.OnRead(nil)
			f.Sleep(time.Minute)
			f.expectSpread("c1=5 c2=4")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.Writes()
				tc(f)
			})
		})
	}
}
