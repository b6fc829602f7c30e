// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// collectingConfig is a KubeFedConfig with the gate of remote status.
func collectingConfig(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	return object(t, "{apiVersion: core.kubefed.io/v1beta1, kind: KubeFedConfig, metadata: {namespace: "+namespace+", name: kubefed}, "+
		"spec: {scope: Cluster, featureGates: [{name: RawResourceStatusCollection, configuration: Enabled}]}}")
}

// expectRemoteStatuses checks what the federated Deployment has of the statuses in clusters.
func (f *fed) expectRemoteStatuses(want string) {
	f.t.Helper()
	var got []string
	for _, c := range policy.ReadFederated(f.get(f.Host, "FederatedDeployment", "shop", "d")).Status.Clusters {
		if text := fmt.Sprint(c.RemoteStatus); len(text) < 100 {
			got = append(got, c.Name+"="+text)
		}
	}
	if got := strings.Join(got, " "); got != want {
		f.t.Errorf("the statuses are %q, want %q", got, want)
	}
}

// setReadyReplicas sets the status of the Deployment in a cluster.
func (f *fed) setReadyReplicas(n int) {
	f.t.Helper()
	f.set(f.c1, "Deployment", "shop", "d", fmt.Sprintf("{readyReplicas: %d}", n), "status")
}

func TestRemoteStatusIsCopiedIfItIsAskedFor(t *testing.T) {
	enable := func(f *fed) {
		f.set(f.Host, "FederatedTypeConfig", namespace, "deployments.apps", "Enabled", "spec", "statusCollection")
	}
	for name, tc := range map[string]func(f *fed){
		"it is copied when it changes": func(f *fed) {
			enable(f)
			f.Put(collectingConfig(f.t))
			f.setReadyReplicas(1)
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=map[readyReplicas:1] c2=map[]")
			f.setReadyReplicas(2)
			f.Sleep(6 * time.Second)
			f.expectRemoteStatuses("c1=map[readyReplicas:2] c2=map[]")
			f.Writes()
			f.Sleep(20 * time.Minute)
			if n := f.countStatusWrites(); n > 0 {
				f.t.Errorf("%d writes of a status that is as it was", n)
			}
			f.Restart()
			f.Sleep(time.Minute)
			if n := f.countStatusWrites(); n > 0 {
				f.t.Errorf("%d writes of a status that is as it was", n)
			}
			f.expectWrites(f.c1)
		},
		"it changes every second": func(f *fed) {
			enable(f)
			f.Put(collectingConfig(f.t))
			f.Sleep(20 * time.Second)
			f.Writes()
			reconciles := func() float64 {
				return f.Metric("quartermaster_controller_reconciles_total", "loop", "sync", "cluster", "c1")
			}
			before := reconciles()
			for i := range 60 {
				f.setReadyReplicas(i)
				f.Sleep(time.Second)
			}
			if n := f.countStatusWrites(); n < 8 || n > 13 {
				f.t.Errorf("%d writes in a minute", n)
			}
			if n := reconciles() - before; n > 5 {
				f.t.Errorf("%v reconciles in the cluster for changes of the status alone", n)
			}
			f.Sleep(5 * time.Second)
			f.expectRemoteStatuses("c1=map[readyReplicas:59] c2=map[]")
		},
		"it has fields that are null": func(f *fed) {
			enable(f)
			f.Put(collectingConfig(f.t))
			f.set(f.c1, "Deployment", "shop", "d", "{readyReplicas: null, conditions: [{type: A, status: 'True', lastTransitionTime: null}]}", "status")
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=map[conditions:[map[status:True type:A]]] c2=map[]")
			f.Writes()
			f.Sleep(20 * time.Minute)
			if n := f.countStatusWrites(); n > 0 {
				f.t.Errorf("%d writes of a status that is as it was", n)
			}
		},
		"it is too large": func(f *fed) {
			enable(f)
			f.Put(collectingConfig(f.t))
			f.set(f.c1, "Deployment", "shop", "d", "{conditions: [{type: A, status: 'True', message: "+strings.Repeat("x", 33<<10)+"}]}", "status")
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=<nil> c2=map[]")
			f.expectWarnings(policy.StatusTooLarge)
		},
		"the FederatedTypeConfig does not ask for it": func(f *fed) {
			f.Put(collectingConfig(f.t))
			f.setReadyReplicas(1)
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=<nil> c2=<nil>")
		},
		"the gate is closed, and closed again": func(f *fed) {
			enable(f)
			f.setReadyReplicas(1)
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=<nil> c2=<nil>")
			f.Put(collectingConfig(f.t))
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=map[readyReplicas:1] c2=map[]")
			f.Delete(collectingConfig(f.t))
			f.setReplicas("3")
			f.Sleep(20 * time.Second)
			f.expectRemoteStatuses("c1=<nil> c2=<nil>")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t, federated(t, "Deployment", "d", "{template: {spec: {replicas: 1}}, "+bothClusters+"}"))
				f.Writes()
				f.c1.Writes()
				tc(f)
			})
		})
	}
}

// countStatusWrites returns how often the status of the federated Deployment was written since the last call.
func (f *fed) countStatusWrites() (n int) {
	for _, w := range f.Writes() {
		if strings.HasPrefix(w, "patch federateddeployments.types.kubefed.io/status") {
			n++
		}
	}
	return n
}

// setReplicas changes the federated Deployment.
func (f *fed) setReplicas(n string) {
	f.t.Helper()
	f.set(f.Host, "FederatedDeployment", "shop", "d", n, "spec", "template", "spec", "replicas")
}
