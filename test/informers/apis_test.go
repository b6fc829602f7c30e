// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var (
	crds        = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	apiServices = schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}
	// The tests use it in several versions.
	widgets = schema.GroupVersionResource{Group: "test.example.com", Resource: "widgets"}
)

// create creates an object of any kind and deletes it at the end of the test, if it still exists.
func create(ctx context.Context, t *testing.T, gvr schema.GroupVersionResource, namespace string, object map[string]any) {
	t.Helper()
	o, err := shared.Objects.Resource(gvr).Namespace(namespace).Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	assert.NoError(t, err)
	t.Cleanup(func() {
		_ = shared.Objects.Resource(gvr).Namespace(namespace).Delete(context.Background(), o.GetName(), metav1.DeleteOptions{})
	})
}

// crd returns the definition of a namespaced resource with the versions. The first is stored. All
// are served except for those in unserved.
func crd(gr schema.GroupResource, kind string, versions []string, unserved ...string) map[string]any {
	list := make([]any, 0, len(versions))
	for i, version := range versions {
		list = append(list, map[string]any{
			"name": version, "storage": i == 0, "served": !slices.Contains(unserved, version),
			"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
		})
	}
	return map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": gr.String()},
		"spec": map[string]any{
			"group": gr.Group, "scope": "Namespaced", "versions": list,
			"names": map[string]any{"kind": kind, "plural": gr.Resource},
		},
	}
}

// waitUntilServed waits until the server serves a resource.
func waitUntilServed(ctx context.Context, t *testing.T, gvr schema.GroupVersionResource) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		_, err := shared.Objects.Resource(gvr).List(ctx, metav1.ListOptions{})
		return err
	})
}

func TestResourceIsInstalledChangedAndRemoved(t *testing.T) {
	t.Parallel()
	ctx := fleet.Context(t)
	namespace := shared.NewNamespace(ctx, t, nil)
	c := newCache(t, shared.AdminConfig(), informers.Need{Resource: widgets, Optional: true})
	createWidget := func(version, name string) {
		t.Helper()
		gvr := widgets.GroupResource().WithVersion(version)
		waitUntilServed(ctx, t, gvr)
		create(ctx, t, gvr, namespace, map[string]any{"apiVersion": gvr.GroupVersion().String(), "kind": "Widget", "metadata": map[string]any{"name": name}})
	}
	// The server has the resource in this version, or not at all.
	waitForVersion := func(version string) {
		absent := version == ""
		t.Helper()
		fleet.Eventually(ctx, t, func() error {
			s := c.resourceStatus(t, "widgets")
			if !s.Synced || s.Absent != absent || s.Problem != "" {
				return fmt.Errorf("synced %t, absent %t, problem %q", s.Synced, s.Absent, s.Problem)
			}
			if absent {
				return c.checkObjects(widgets, nil)
			}
			list, err := shared.Objects.Resource(widgets.GroupResource().WithVersion(version)).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			var want []string
			for i := range list.Items {
				want = append(want, describe(&list.Items[i]))
			}
			return c.checkObjects(widgets, want)
		})
	}

	waitForVersion("")
	create(ctx, t, crds, "", crd(widgets.GroupResource(), "Widget", []string{"v1beta1"}))
	createWidget("v1beta1", "first")
	waitForVersion("v1beta1")

	// The watched version is removed; another takes its place.
	changed := crd(widgets.GroupResource(), "Widget", []string{"v1", "v1beta1"}, "v1beta1")
	patch, err := json.Marshal(map[string]any{"spec": changed["spec"]})
	assert.NoError(t, err)
	if _, err := shared.Objects.Resource(crds).Patch(ctx, widgets.GroupResource().String(), types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	createWidget("v1", "second")
	waitForVersion("v1")
	if s := c.resourceStatus(t, "widgets"); s.Objects != 2 || s.Relists == 0 {
		t.Errorf("%d objects after %d relists", s.Objects, s.Relists)
	}

	assert.NoError(t, shared.Objects.Resource(crds).Delete(ctx, widgets.GroupResource().String(), metav1.DeleteOptions{}))
	waitForVersion("")
}

func TestAggregatedAPIDownConcernsNobodyElse(t *testing.T) {
	t.Parallel()
	ctx := fleet.Context(t)
	create(ctx, t, apiServices, "", map[string]any{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": map[string]any{"name": "v1.down.example.com"},
		"spec": map[string]any{
			"group": "down.example.com", "version": "v1", "groupPriorityMinimum": int64(1000), "versionPriority": int64(10),
			"insecureSkipTLSVerify": true, "service": map[string]any{"namespace": "default", "name": "nowhere"},
		},
	})
	fleet.Eventually(ctx, t, func() error { // until it is part of discovery
		err := shared.Admin.RESTClient().Get().AbsPath("/apis/down.example.com/v1").Do(ctx).Error()
		if apierrors.IsServiceUnavailable(err) {
			return nil
		}
		return fmt.Errorf("the API is not down: %w", err)
	})
	cfg := informers.CacheConfig{Scheme: clientscheme.Scheme}
	cfg.Declare("test", sourceNeeds()...)
	cfg.Declare("concerned", informers.Need{Resource: schema.GroupVersionResource{Group: "down.example.com", Resource: "things"}, Optional: true})
	cfg.Declare("other", informers.Need{Resource: schema.GroupVersionResource{Group: "coordination.k8s.io", Resource: "leases"}})
	c := newCacheWith(t, shared.AdminConfig(), cfg)
	c.waitUntilHealthy(ctx, t, "test")
	c.waitUntilHealthy(ctx, t, "other") // which needs discovery too
	if n := c.resourceStatus(t, "leases").Objects; n == 0 {
		t.Error("no Leases")
	}
	fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
	c.waitForProblem(ctx, t, "concerned", "things.down.example.com", "ServiceUnavailable")
	if s := c.resourceStatus(t, "things"); s.Synced {
		t.Error("an API that is down was taken for one that has no such resource")
	}
	assert.NoError(t, shared.Objects.Resource(apiServices).Delete(ctx, "v1.down.example.com", metav1.DeleteOptions{}))
	c.waitUntilHealthy(ctx, t, "concerned")
	if s := c.resourceStatus(t, "things"); !s.Absent {
		t.Errorf("absent %t", s.Absent)
	}
}
