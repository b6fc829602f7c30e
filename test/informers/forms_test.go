// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// Sprocket is a custom resource with a Go type.
type Sprocket struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Teeth int `json:"teeth"`
	} `json:"spec"`
}

// DeepCopyObject implements runtime.Object.
func (s *Sprocket) DeepCopyObject() runtime.Object {
	out := *s
	s.DeepCopyInto(&out.ObjectMeta)
	return &out
}

// SprocketList is the list of them.
type SprocketList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []Sprocket `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *SprocketList) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = append([]Sprocket(nil), l.Items...)
	return &out
}

// digestType is a digest that shows which type the function got.
func digestType(obj runtime.Object) []byte { return []byte(reflect.TypeOf(obj).String()) }

func TestCacheHoldsEachResourceInItsForm(t *testing.T) {
	ctx := fleet.Context(t)
	namespace := shared.NewNamespace(ctx, t, nil)
	sprockets := schema.GroupVersionResource{Group: "forms.example.com", Version: "v1", Resource: "sprockets"}
	create(ctx, t, crds, "", crd(sprockets.GroupResource(), "Sprocket", []string{"v1"}))
	waitUntilServed(ctx, t, sprockets)
	createObject := func(gvr schema.GroupVersionResource, kind, namespace string, fields map[string]any) {
		o := map[string]any{"apiVersion": gvr.GroupVersion().String(), "kind": kind, "metadata": map[string]any{"name": "forms"}}
		for key, value := range fields {
			o[key] = value
		}
		create(ctx, t, gvr, namespace, o)
	}
	core, networking := corev1.SchemeGroupVersion, networkingv1.SchemeGroupVersion
	createObject(sprockets, "Sprocket", namespace, map[string]any{"spec": map[string]any{"teeth": int64(7)}})
	create(ctx, t, sprockets, namespace, map[string]any{"apiVersion": sprockets.GroupVersion().String(), "kind": "Sprocket",
		"metadata": map[string]any{"name": "misfit"}, "spec": map[string]any{"teeth": "many"}})
	createObject(core.WithResource("services"), "Service", namespace, map[string]any{"spec": map[string]any{"ports": []any{map[string]any{"port": int64(80)}}}})
	createObject(core.WithResource("nodes"), "Node", "", nil)
	createObject(core.WithResource("persistentvolumes"), "PersistentVolume", "", map[string]any{"spec": map[string]any{
		"capacity": map[string]any{"storage": "1Gi"}, "accessModes": []any{"ReadWriteOnce"}, "hostPath": map[string]any{"path": "/x"}}})
	createObject(networking.WithResource("ingresses"), "Ingress", namespace, map[string]any{"spec": map[string]any{
		"defaultBackend": map[string]any{"service": map[string]any{"name": "forms", "port": map[string]any{"number": int64(80)}}}}})

	for _, contentType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		for name, tc := range map[string]struct {
			need     informers.Need
			inScheme bool // the scheme has Sprocket
			list     func(*cache, schema.GroupVersionResource) []any
			want     string // the type in the cache, or the type that the digest got
		}{
			"Services with their content":         {informers.Need{Resource: core.WithResource("services"), Form: informers.Typed}, false, listed[*corev1.Service], "*v1.Service"},
			"Nodes with their content":            {informers.Need{Resource: core.WithResource("nodes"), Form: informers.Typed, ClusterScoped: true}, false, listed[*corev1.Node], "*v1.Node"},
			"PersistentVolumes by a digest":       {informers.Need{Resource: core.WithResource("persistentvolumes"), Digest: informers.DigestOf(digestType)}, false, listed[*informers.Object], "*v1.PersistentVolume"},
			"Ingresses by a digest":               {informers.Need{Resource: networking.WithResource("ingresses"), Digest: informers.DigestOf(digestType)}, false, listed[*informers.Object], "*v1.Ingress"},
			"Ingresses as metadata":               {informers.Need{Resource: networking.WithResource("ingresses")}, false, listed[*informers.Object], ""},
			"a custom resource typed":             {informers.Need{Resource: sprockets, Form: informers.Typed}, true, listed[*Sprocket], "*informers.Sprocket"},
			"a custom resource by a typed digest": {informers.Need{Resource: sprockets, Digest: informers.DigestOf(digestType)}, true, listed[*informers.Object], "*informers.Sprocket"},
			"a custom resource unstructured":      {informers.Need{Resource: sprockets, Form: informers.Unstructured}, false, listed[*unstructured.Unstructured], "*unstructured.Unstructured"},
			"a custom resource by a digest":       {informers.Need{Resource: sprockets, Digest: informers.DigestOf(digestType)}, false, listed[*informers.Object], "*unstructured.Unstructured"},
			"a custom resource as metadata":       {informers.Need{Resource: sprockets}, true, listed[*informers.Object], ""},
		} {
			t.Run(name+" in "+contentType, func(t *testing.T) {
				scheme := runtime.NewScheme()
				assert.NoError(t, clientscheme.AddToScheme(scheme))
				if tc.inScheme {
					scheme.AddKnownTypes(sprockets.GroupVersion(), &Sprocket{}, &SprocketList{})
					metav1.AddToGroupVersion(scheme, sprockets.GroupVersion())
				}
				config := rest.CopyConfig(shared.AdminConfig())
				config.ContentType = contentType
				cfg := informers.CacheConfig{Scheme: scheme}
				cfg.Declare("test", tc.need)
				c := newCacheWith(t, config, cfg)
				fleet.Eventually(ctx, t, func() error {
					for _, obj := range tc.list(c, tc.need.Resource) {
						if obj.(metav1.Object).GetName() == "forms" {
							return checkType(obj, tc.want)
						}
					}
					return fmt.Errorf("not in the cache: %w", c.Problem("test"))
				})
				// An object that does not fit the Go type is left out, and keeps no other from the cache.
				typed := tc.want == "*informers.Sprocket"
				fleet.Eventually(ctx, t, func() error {
					if tc.need.Resource != sprockets || len(tc.list(c, sprockets)) == 2 != typed && c.Problem("test") == nil {
						return nil
					}
					return fmt.Errorf("%d sprockets, problem %w", len(tc.list(c, sprockets)), c.Problem("test"))
				})
			})
		}
	}
}

// listed returns the objects in the cache.
func listed[T any](c *cache, gvr schema.GroupVersionResource) (list []any) {
	for _, obj := range informers.For[T](c.ForController("test"), gvr).List("", nil) {
		list = append(list, obj)
	}
	return list
}

func checkType(obj any, want string) error {
	got := reflect.TypeOf(obj).String()
	if reduced, ok := obj.(*informers.Object); ok {
		got = string(reduced.Digest("test"))
	}
	if got != want {
		return fmt.Errorf("got %s, want %s", got, want)
	}
	switch o := obj.(type) {
	case *Sprocket:
		if o.Spec.Teeth != 7 {
			return fmt.Errorf("%d teeth", o.Spec.Teeth)
		}
	case *unstructured.Unstructured:
		if teeth, _, _ := unstructured.NestedInt64(o.Object, "spec", "teeth"); teeth != 7 {
			return fmt.Errorf("%d teeth", teeth)
		}
	}
	return nil
}
