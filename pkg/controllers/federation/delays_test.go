// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestChangesDoNotWaitForStatuses changes objects in the moment in which the statuses of many others of their
// namespace are to be written, each of which takes a while. These statuses are written one by one.
func TestChangesDoNotWaitForStatuses(t *testing.T) {
	const size, latency = 300, 10 * time.Millisecond
	for name, disturb := range map[string]func(f *fed){
		"a cluster goes away": func(f *fed) { f.c2.Cut() },
		"the statuses of their objects change": func(f *fed) {
			for i := range size {
				f.set(f.c1, "Deployment", "shop", fmt.Sprintf("d-%d", i), "{readyReplicas: 1}", "status")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t, collectingConfig(t))
				f.set(f.Host, "FederatedTypeConfig", namespace, "deployments.apps", "Enabled", "spec", "statusCollection")
				for i := range size {
					f.Put(federated(t, "ConfigMap", fmt.Sprintf("f-%d", i), "{template: {data: {a: b}}, "+bothClusters+"}"),
						federated(t, "Deployment", fmt.Sprintf("d-%d", i), "{template: {spec: {replicas: 1}}, "+bothClusters+"}"))
				}
				f.Sleep(time.Minute)
				f.Latency(latency)
				writes := make(chan struct{}, 2*size)
				f.c1.OnWrite(func(controllertest.Request) error { writes <- struct{}{}; return nil })
				statuses := make(chan time.Time, 4*size)
				f.OnWrite(func(r controllertest.Request) error {
					if strings.HasPrefix(r.Resource, "federated") {
						statuses <- time.Now()
					}
					return nil
				})
				disturb(f)
				begin := <-statuses
				for i := range 5 {
					f.set(f.Host, "FederatedConfigMap", "shop", fmt.Sprintf("f-%d", i*size/5), "{a: c}", "spec", "template", "data")
				}
				for range 5 {
					<-writes
				}
				if elapsed := time.Since(begin); elapsed > 10*latency {
					t.Errorf("the changes took %s", elapsed)
				}
				<-time.After(time.Second)
				if n := len(statuses); n > 70 {
					t.Errorf("%d statuses were written within a second", n)
				}
				f.Sleep(30 * time.Second)
				if n := len(statuses); n < size {
					t.Errorf("%d statuses were written", n)
				}
			})
		})
	}
}
