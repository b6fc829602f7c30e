// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// InstallResource is DefineResource for the API server of the fleet.
func (f *Fleet) InstallResource(ctx context.Context, gvr schema.GroupVersionResource, kind string) error {
	return DefineResource(ctx, f.Objects, gvr, kind)
}

// DefineResource defines a custom resource, which keeps every field, and waits until it is served.
func DefineResource(ctx context.Context, client dynamic.Interface, gvr schema.GroupVersionResource, kind string, subresources ...string) error {
	subs := map[string]any{}
	for _, name := range subresources {
		subs[name] = map[string]any{}
	}
	crd := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": gvr.GroupResource().String()},
		"spec": map[string]any{
			"group": gvr.Group, "scope": "Namespaced",
			"names": map[string]any{"plural": gvr.Resource, "singular": strings.ToLower(kind), "kind": kind, "listKind": kind + "List"},
			"versions": []any{map[string]any{"name": gvr.Version, "served": true, "storage": true, "subresources": subs, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}},
		},
	}}
	crds := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	if _, err := client.Resource(crds).Create(ctx, crd, metav1.CreateOptions{}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, Patience, fmt.Errorf("%s are not served", gvr.Resource))
	defer cancel()
	return Poll(ctx, func() error {
		_, err := client.Resource(gvr).List(ctx, metav1.ListOptions{})
		return err
	})
}
