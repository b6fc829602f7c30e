// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestFieldsOfTheClusterAreRetained has what the controller retains. What the API server retains is in
// test/federation.
func TestFieldsOfTheClusterAreRetained(t *testing.T) {
	// deployment creates a FederatedDeployment, scales its object in c1 from 1 to 3, and changes the template.
	deployment := func(f *fed, retain string) any {
		f.Put(federated(f.t, "Deployment", "d", "{"+retain+"template: {spec: {replicas: 1}}, "+bothClusters+"}"))
		f.Sleep(time.Minute)
		f.expectWrites(f.c1, "create deployments.apps shop/d")
		f.set(f.c1, "Deployment", "shop", "d", "3", "spec", "replicas")
		f.Sleep(time.Minute)
		f.set(f.Host, "FederatedDeployment", "shop", "d", "true", "spec", "template", "spec", "paused")
		f.Sleep(time.Minute)
		spec := f.get(f.c1, "Deployment", "shop", "d").Object["spec"].(map[string]any)
		if spec["paused"] != true {
			f.t.Errorf("%v", spec)
		}
		f.expectStatus("FederatedDeployment", "d", "c1= c2=")
		return spec["replicas"]
	}
	for name, tc := range map[string]func(f *fed){
		"retainReplicas keeps the cluster's replicas": func(f *fed) {
			if replicas := deployment(f, "retainReplicas: true, "); replicas != int64(3) {
				f.t.Errorf("%v replicas", replicas)
			}
		},
		"replicas are written without retainReplicas": func(f *fed) {
			if replicas := deployment(f, ""); replicas != int64(1) {
				f.t.Errorf("%v replicas", replicas)
			}
		},
		"changes of what is retained are no conflict, however many": func(f *fed) {
			f.Put(federated(f.t, "Job", "j", "{template: {spec: {template: {spec: {restartPolicy: Never}}}}, "+bothClusters+"}"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "create jobs.batch shop/j")
			for range 10 {
				f.set(f.c1, "Job", "shop", "j", fmt.Sprintf("{matchLabels: {at: '%d'}}", time.Now().Unix()), "spec", "selector")
				f.Sleep(time.Second)
			}
			if n := len(f.c1.Writes()); n != 10 {
				f.t.Errorf("%d writes in 10 s, want 10", n)
			}
		},
		"a Job keeps its generated selector": func(f *fed) {
			f.Put(federated(f.t, "Job", "j", "{template: {spec: {template: {spec: {restartPolicy: Never}}}}, "+bothClusters+"}"))
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "create jobs.batch shop/j")
			// As an API server does when it creates a Job.
			generated := "{batch.kubernetes.io/controller-uid: '7'}"
			f.set(f.c1, "Job", "shop", "j", "{matchLabels: "+generated+"}", "spec", "selector")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "update jobs.batch shop/j (unchanged)")
			f.set(f.c1, "Job", "shop", "j", generated, "spec", "template", "metadata", "labels")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "update jobs.batch shop/j (unchanged)")
			f.set(f.Host, "FederatedJob", "shop", "j", "{x: 'y'}", "spec", "template", "metadata", "labels")
			f.Sleep(time.Minute)
			f.expectWrites(f.c1, "update jobs.batch shop/j")
			u := f.get(f.c1, "Job", "shop", "j")
			spec := u.Object["spec"].(map[string]any)
			if u.GetLabels()["x"] != "y" || spec["selector"] == nil || spec["template"].(map[string]any)["metadata"] == nil {
				f.t.Errorf("%v", u.Object)
			}
			f.expectStatus("FederatedJob", "j", "c1= c2=")
			deleted := ""
			f.c1.OnWrite(func(r controllertest.Request) error {
				if r.Verb == "delete" {
					deleted = string(r.Body)
				}
				return nil
			})
			f.Delete(f.get(f.Host, "FederatedJob", "shop", "j"))
			f.Sleep(time.Minute)
			if !strings.Contains(deleted, `"propagationPolicy":"Background"`) {
				f.t.Errorf("the Job is deleted with %s, and its Pods run on", deleted)
			}
		},
		"a cluster that does not serve the version any more is not one without the object": func(f *fed) {
			f.Put(configMap(f.t))
			f.Sleep(time.Minute)
			f.c1.OnRead(func(r controllertest.Request) error {
				if r.Verb == "get" && r.Resource == "configmaps" {
					return apierrors.NewGenericServerResponse(http.StatusNotFound, "get", schema.GroupResource{Resource: "configmaps"}, "f", "404 page not found", 0, true)
				}
				return nil
			})
			f.setSpec("{a: c}", "template", "data")
			f.Sleep(time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=RetrievalFailed c2=")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.c1.Writes()
				tc(f)
			})
		})
	}
}
