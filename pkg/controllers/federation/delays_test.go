// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestChangesDoNotWaitForStatuses changes objects in the moment in which the statuses of many others of their
// namespace are to be written, each of which takes a while.
func TestChangesDoNotWaitForStatuses(t *testing.T) {
	const size, latency = 300, 10 * time.Millisecond // with 10 workers the statuses take 300 ms
	for name, happens := range map[string]func(f *fed){
		"a cluster goes away": func(f *fed) {
			away := make(chan struct{})
			begin := sync.OnceFunc(func() { close(away) })
			f.OnWrite(func(r controllertest.Request) error {
				if strings.HasPrefix(r.Resource, "federatedconfigmaps") {
					begin()
				}
				return nil
			})
			f.c2.Cut()
			<-away
		},
		"the statuses of their objects change": func(f *fed) {
			for i := range size {
				f.set(f.c1.Host, "Deployment", "shop", fmt.Sprintf("d-%d", i), "{readyReplicas: 1}", "status")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t, collecting(t))
				f.set(f.Host, "FederatedTypeConfig", namespace, "deployments.apps", "Enabled", "spec", "statusCollection")
				for i := range size {
					f.Put(federated(t, "ConfigMap", fmt.Sprintf("f-%d", i), "{template: {data: {a: b}}, "+both+"}"),
						federated(t, "Deployment", fmt.Sprintf("d-%d", i), "{template: {spec: {replicas: 1}}, "+both+"}"))
				}
				f.Sleep(time.Minute)
				f.Latency(latency)
				written := make(chan struct{}, 2*size)
				f.c1.OnWrite(func(controllertest.Request) error { written <- struct{}{}; return nil })
				happens(f)
				began := time.Now()
				for i := range 5 {
					f.set(f.Host, "FederatedConfigMap", "shop", fmt.Sprintf("f-%d", i*size/5), "{a: c}", "spec", "template", "data")
				}
				for range 5 {
					<-written
				}
				if took := time.Since(began); took > 10*latency {
					t.Errorf("the changes took %s", took)
				}
			})
		})
	}
}
