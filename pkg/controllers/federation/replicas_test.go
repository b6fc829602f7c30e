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
	wroteSpread = "update federateddeployments.types.kubefed.io shop/d"
	deletedApp  = "delete deployments.apps shop/d"
)

// preference is a ReplicaSchedulingPreference for the federated object d.
func preference(t *testing.T, spec string) *unstructured.Unstructured {
	t.Helper()
	return object(t, "{apiVersion: scheduling.kubefed.io/v1alpha1, kind: ReplicaSchedulingPreference, metadata: {namespace: shop, name: d}, spec: {"+spec+"}}")
}

// ofDeployment begins the spec of a preference for a FederatedDeployment.
const ofDeployment = "targetKind: FederatedDeployment, "

// app is a federated Deployment, which no cluster is to have before it has a preference.
func app(t *testing.T, spec string) *unstructured.Unstructured {
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
	var all []string
	placed, _, _ := unstructured.NestedSlice(u.Object, "spec", "placement", "clusters")
	for _, item := range placed {
		name := item.(map[string]any)["name"]
		all = append(all, fmt.Sprint(name, replicas[name]))
		delete(replicas, name)
	}
	for name, n := range replicas {
		all = append(all, fmt.Sprint("not in ", name, n))
	}
	return strings.Join(all, " ")
}

// spreads checks where the federated Deployment is placed, and its replicas.
func (f *fed) spreads(want string) {
	f.t.Helper()
	if got := f.spread("FederatedDeployment"); got != want {
		f.t.Errorf("%s, want %s", got, want)
	}
}

// run makes replicas of the Deployment ready, as its controller does, and shows the rest as Pods without a
// Node.
func (f *fed) run(c *controllertest.Cluster, ready int64) {
	f.t.Helper()
	u := f.get(c.Host, "Deployment", "shop", "d")
	asked, _, _ := unstructured.NestedInt64(u.Object, "spec", "replicas")
	for i := range asked {
		status := "{phase: Running, conditions: [{type: Ready, status: 'True'}]}"
		if i >= ready {
			status = fmt.Sprintf("{phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, lastTransitionTime: '%s'}]}", time.Now().UTC().Format(time.RFC3339))
		}
		c.Put(object(f.t, fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {namespace: shop, name: d%d, labels: {app: d}}, status: %s}", i, status)))
	}
	f.set(c.Host, "Deployment", "shop", "d", fmt.Sprint(min(ready, asked)), "status", "readyReplicas")
}

// runAll makes all replicas ready that are asked for.
func (f *fed) runAll(clusters ...*controllertest.Cluster) {
	f.t.Helper()
	for _, c := range clusters {
		f.run(c, 1000)
	}
}

// count returns how often the host or a cluster was written in this way since the last call, and forgets the
// rest.
func count(on *controllertest.Host, write string) int {
	n := 0
	for _, text := range on.Writes() {
		if text == write {
			n++
		}
	}
	return n
}

// wroteApp checks the writes of the Deployment in a cluster since the last call, without repetitions.
func (f *fed) wroteApp(c *controllertest.Cluster, want ...string) {
	f.t.Helper()
	writes := slices.DeleteFunc(c.Writes(), func(text string) bool { return !strings.Contains(text, "deployments.apps") })
	if got := slices.Compact(writes); !slices.Equal(got, want) {
		f.t.Errorf("wrote %q, want %q", got, want)
	}
}

// TestReplicasFollowThePreference has a federated Deployment that is placed nowhere until a preference says
// where.
func TestReplicasFollowThePreference(t *testing.T) {
	for name, test := range map[string]func(f *fed){
		"equal parts by default": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.spreads("c1=5 c2=4")
			f.wroteApp(f.c1, "create deployments.apps shop/d")
			if n := count(f.Host, wroteSpread); n != 1 {
				f.t.Errorf("%d writes", n)
			}
			f.runAll(f.c1, f.c2)
			f.Sleep(20 * time.Minute)
			if n := count(f.Host, wroteSpread); n != 0 {
				f.t.Errorf("%d writes without a change", n)
			}
			if n := f.Metric(federation.MetricPrefix + "replica_writes_total"); n != 1 {
				f.t.Errorf("the metric is %v", n)
			}
		},
		"a preference that changes": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.Put(preference(f.t, ofDeployment+"totalReplicas: 9, clusters: {c1: {weight: 1, maxReplicas: 2}, '*': {weight: 1}}"))
			f.Sleep(time.Minute)
			f.spreads("c1=2 c2=7")
		},
		"a preference that goes leaves all as it is": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 9"))
			f.Sleep(time.Minute)
			f.Delete(preference(f.t, "x: y"))
			f.Sleep(time.Minute)
			f.spreads("c1=5 c2=4")
		},
		"other overrides stay, in their order": func(f *fed) {
			f.Put(app(f.t, "placement: {clusters: [{name: c9}]}, overrides: [{clusterName: c9, clusterOverrides: [{path: /spec/replicas, value: 3}, {path: /spec/paused, value: true}]}, "+
				"{clusterName: c2, clusterOverrides: [{path: /spec/replicas, value: 1}, {path: /spec/paused, value: true}]}]"),
				preference(f.t, ofDeployment+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.spreads("c1=1 c2=1/spec/paused=true not in c9/spec/paused=true")
			if n := count(f.Host, wroteSpread); n != 1 {
				f.t.Errorf("%d writes", n)
			}
		},
		"somebody else changes the replicas": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.set(f.Host, "FederatedDeployment", "shop", "d", "[]", "spec", "overrides")
			f.Sleep(10 * time.Second)
			f.spreads("c1=1 c2=1")
		},
		"the selectors of F and its namespace": func(f *fed) {
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusters: [{name: c1}, {name: c2}], clusterSelector: {}}", "spec", "placement")
			f.Put(app(f.t, "placement: {clusterSelector: {matchLabels: {name: c2}}}"), preference(f.t, ofDeployment+"totalReplicas: 9, intersectWithClusterSelector: true"))
			f.Sleep(time.Minute)
			f.spreads("c2=9")
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchLabels: {name: c1}}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.spreads("c2=9") // no cluster, no write
			f.change(f.Host, "KubeFedCluster", namespace, "c1", func(u *unstructured.Unstructured) { u.SetLabels(map[string]string{"name": "c2"}) })
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchLabels: {name: c2}}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.spreads("c1=5 c2=4")
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", "spec", "placement")
			f.Sleep(time.Minute)
			f.warned("ComputePlacementFailed", "InvalidPreference")
			f.spreads("c1=5 c2=4")
		},
		"numbers that are wrong": func(f *fed) {
			f.Put(app(f.t, "placement: {clusters: [{name: c1}]}"), preference(f.t, ofDeployment+"totalReplicas: 9, clusters: {c1: {weight: -1}}"))
			f.Sleep(time.Minute)
			f.set(f.Host, "FederatedDeployment", "shop", "d", "true", "spec", "retainReplicas") // it is decided on again
			f.Sleep(time.Minute)
			f.spreads("c1")
			f.warned("InvalidPreference")
			if n := len(slices.DeleteFunc(f.Events(), func(text string) bool { return !strings.Contains(text, "InvalidPreference") })); n != 1 {
				f.t.Errorf("%d Events", n)
			}
		},
		"the gate is off, then on": func(f *fed) {
			gate := func(is string) {
				f.Put(object(f.t, "{apiVersion: core.kubefed.io/v1beta1, kind: KubeFedConfig, metadata: {namespace: "+namespace+", name: kubefed}, "+
					"spec: {scope: Cluster, featureGates: [{name: SchedulerPreferences, configuration: "+is+"}]}}"))
			}
			gate("Disabled")
			f.Settle() // the cache may learn of the preference first
			f.Put(app(f.t, "placement: {clusters: [{name: c1}]}"), preference(f.t, ofDeployment+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.spreads("c1")
			gate("Enabled")
			f.Sleep(10 * time.Second)
			f.spreads("c1=1 c2=1")
		},
		"the federated object comes later": func(f *fed) {
			f.Put(preference(f.t, ofDeployment+"totalReplicas: 2"))
			f.Sleep(time.Minute)
			f.Put(app(f.t, "placement: {}"))
			f.Sleep(10 * time.Second)
			f.spreads("c1=1 c2=1")
		},
		"a FederatedReplicaSet": func(f *fed) {
			f.Put(federated(f.t, "ReplicaSet", "d", "{template: {spec: {selector: {matchLabels: {app: d}}}}}"), app(f.t, "placement: {}"),
				preference(f.t, "targetKind: FederatedReplicaSet, totalReplicas: 2"))
			f.Sleep(time.Minute)
			if got := f.spread("FederatedReplicaSet"); got != "c1=1 c2=1" {
				f.t.Error(got)
			}
			f.spreads("")
		},
		"a cluster is joined": func(f *fed) {
			c3 := f.AddCluster("c3")
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 9, rebalance: true"), secret("c3", "three"))
			f.Sleep(time.Minute)
			f.Put(kubeFedCluster(c3, "c3"))
			f.Sleep(time.Minute)
			f.spreads("c1=3 c2=3 c3=3")
		},
		"Pods that have had no Node for a minute go elsewhere": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 8"))
			f.Sleep(20 * time.Second)
			f.spreads("c1=4 c2=4")
			f.runAll(f.c1)
			f.run(f.c2, 1)
			f.Sleep(50 * time.Second)
			f.spreads("c1=4 c2=4")
			f.Sleep(time.Minute)
			f.spreads("c1=7 c2=1")
		},
		"with rebalance some wait, to see when there is room again": func(f *fed) {
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 8, rebalance: true"))
			f.Sleep(20 * time.Second)
			f.runAll(f.c1)
			f.run(f.c2, 1)
			f.Sleep(2 * time.Minute)
			f.spreads("c1=7 c2=4")
			f.runAll(f.c1, f.c2)
			f.Sleep(3 * time.Minute)
			f.spreads("c1=4 c2=4")
		},
		"a cluster does not tell its Pods": func(f *fed) {
			f.c2.OnRead(func(r controllertest.Request) error {
				if r.Resource != "pods" {
					return nil
				}
				return apierrors.NewForbidden(schema.GroupResource{Resource: r.Resource}, "", errors.New("a test"))
			})
			f.Put(app(f.t, "placement: {}"), preference(f.t, ofDeployment+"totalReplicas: 8"))
			f.Sleep(20 * time.Second)
			f.spreads("c1=4 c2=4") // there was nothing yet
			f.Put(preference(f.t, ofDeployment+"totalReplicas: 9"))
			f.Sleep(20 * time.Second)
			f.spreads("c1=4 c2=4")
			f.c2.OnRead(nil)
			f.Sleep(time.Minute)
			f.spreads("c1=5 c2=4")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.Writes()
				test(f)
			})
		})
	}
}

// TestReplicasLeaveAClusterThatIsAway begins with five replicas in each cluster.
func TestReplicasLeaveAClusterThatIsAway(t *testing.T) {
	// away cuts c2 off for a time, and then lets it be there for two minutes.
	away := func(f *fed, d time.Duration) {
		f.c2.Cut()
		f.Sleep(d - 10*time.Second)
		f.runAll(f.c1)
		f.Sleep(10 * time.Second)
		f.c2.Restore()
		f.Sleep(2 * time.Minute)
		f.runAll(f.c1, f.c2)
		f.Sleep(time.Second)
	}
	for name, test := range map[string]func(f *fed){
		"for 30 s: nothing moves": func(f *fed) {
			away(f, 30*time.Second)
			f.spreads("c1=5 c2=5")
			f.wroteApp(f.c1)
			f.wroteApp(f.c2)
			if n := count(f.Host, wroteSpread); n != 0 {
				f.t.Errorf("%d writes", n)
			}
		},
		"for 2 min: replicas move, and the Deployment is not deleted": func(f *fed) {
			away(f, 2*time.Minute)
			f.wroteApp(f.c1, "update deployments.apps shop/d")
			f.wroteApp(f.c2, "update deployments.apps shop/d")
			f.spreads("c1=10 c2=0") // what runs stays
		},
		"for 2 min, with rebalance: replicas move there and back": func(f *fed) {
			f.Put(preference(f.t, ofDeployment+"totalReplicas: 10, rebalance: true"))
			f.Sleep(10 * time.Second)
			away(f, 2*time.Minute)
			f.spreads("c1=5 c2=5")
			if n := count(f.c2.Host, deletedApp); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			if n := count(f.Host, wroteSpread); n != 2 {
				f.t.Errorf("%d writes", n)
			}
		},
		"ten times in an hour for 30 s: nothing moves": func(f *fed) {
			for range 10 {
				away(f, 30*time.Second)
				f.Sleep(200 * time.Second)
			}
			f.spreads("c1=5 c2=5")
			f.wroteApp(f.c2)
		},
		"ten times in an hour for 2 min: nothing is deleted": func(f *fed) {
			f.Put(preference(f.t, ofDeployment+"totalReplicas: 10, rebalance: true"))
			f.Sleep(10 * time.Second)
			for range 10 {
				away(f, 2*time.Minute)
				f.Sleep(2 * time.Minute)
			}
			f.spreads("c1=5 c2=5")
			if n := count(f.c2.Host, deletedApp); n != 0 {
				f.t.Errorf("c2 lost its Deployment %d times", n)
			}
			if n := count(f.Host, wroteSpread); n != 20 {
				f.t.Errorf("%d writes", n)
			}
		},
		"replicas move unavailableDelay after it is not ready": func(f *fed) {
			f.c2.Cut()
			for range 60 {
				if strings.Contains(fmt.Sprint(f.get(f.Host, "KubeFedCluster", namespace, "c2").Object["status"]), "ClusterNotReachable") {
					break
				}
				f.Sleep(time.Second)
			}
			f.Sleep(58 * time.Second)
			f.spreads("c1=5 c2=5")
			f.Sleep(4 * time.Second)
			f.spreads("c1=10")
		},
		"the cluster is back, and the plan cannot be written yet": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.spreads("c1=10")
			f.OnWrite(func(r controllertest.Request) error {
				if strings.HasPrefix(r.String(), wroteSpread) {
					return errors.New("no space left")
				}
				return nil
			})
			f.c2.Restore()
			f.Sleep(10 * time.Minute)
			f.wroteApp(f.c2)
			f.status("FederatedDeployment", "d", "CheckClusters c1= c2=WaitingForRemoval")
			f.OnWrite(nil)
			f.Sleep(10 * time.Minute)
			if n := count(f.c2.Host, deletedApp); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.status("FederatedDeployment", "d", "c1= c2=")
		},
		"the cluster is back under a new leader": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.c2.Restore()
			f.Restart()
			f.Sleep(10 * time.Minute)
			if n := count(f.c2.Host, deletedApp); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.status("FederatedDeployment", "d", "c1= c2=")
		},
		"another is away when it is back": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.c1.Cut()
			f.Sleep(30 * time.Second)
			f.c2.Restore()
			f.Sleep(10 * time.Minute)
			if n := count(f.c2.Host, deletedApp); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.spreads("c2=10")
		},
		"the preference goes while it is away: placement rules": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.Delete(preference(f.t, "x: y"))
			f.c2.Restore()
			f.Sleep(time.Minute)
			f.wroteApp(f.c2, deletedApp)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.Put(app(t, "placement: {}"), preference(t, ofDeployment+"totalReplicas: 10"))
				f.Sleep(settling)
				f.runAll(f.c1, f.c2)
				f.Sleep(settling)
				f.spreads("c1=5 c2=5")
				f.Writes()
				f.c1.Writes()
				f.c2.Writes()
				test(f)
			})
		})
	}
}
