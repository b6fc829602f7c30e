// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

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

// typeOf is a digest that shows which type the function got.
func typeOf(obj runtime.Object) []byte { return []byte(reflect.TypeOf(obj).String()) }

func TestAnyResourceCanBeHadInAnyForm(t *testing.T) {
	ctx := fleet.Context(t)
	namespace := shared.NewNamespace(ctx, t, nil)
	sprockets := schema.GroupVersionResource{Group: "forms.example.com", Version: "v1", Resource: "sprockets"}
	create(ctx, t, crds, "", crd(sprockets.GroupResource(), "Sprocket", []string{"v1"}))
	waitUntilServed(ctx, t, sprockets)
	object := func(gvr schema.GroupVersionResource, kind, in string, more map[string]any) {
		o := map[string]any{"apiVersion": gvr.GroupVersion().String(), "kind": kind, "metadata": map[string]any{"name": "forms"}}
		for key, value := range more {
			o[key] = value
		}
		create(ctx, t, gvr, in, o)
	}
	core, networking := corev1.SchemeGroupVersion, networkingv1.SchemeGroupVersion
	object(sprockets, "Sprocket", namespace, map[string]any{"spec": map[string]any{"teeth": int64(7)}})
	object(core.WithResource("services"), "Service", namespace, map[string]any{"spec": map[string]any{"ports": []any{map[string]any{"port": int64(80)}}}})
	object(core.WithResource("nodes"), "Node", "", nil)
	object(core.WithResource("persistentvolumes"), "PersistentVolume", "", map[string]any{"spec": map[string]any{
		"capacity": map[string]any{"storage": "1Gi"}, "accessModes": []any{"ReadWriteOnce"}, "hostPath": map[string]any{"path": "/x"}}})
	object(networking.WithResource("ingresses"), "Ingress", namespace, map[string]any{"spec": map[string]any{
		"defaultBackend": map[string]any{"service": map[string]any{"name": "forms", "port": map[string]any{"number": int64(80)}}}}})

	for _, contentType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		for name, tc := range map[string]struct {
			need  informers.Need
			known bool   // the scheme has Sprocket
			want  string // the type in the cache, or the type that the digest got
		}{
			"Services with their content":         {informers.Need{Resource: core.WithResource("services"), Form: informers.Typed}, false, "*v1.Service"},
			"Nodes with their content":            {informers.Need{Resource: core.WithResource("nodes"), Form: informers.Typed, ClusterScoped: true}, false, "*v1.Node"},
			"PersistentVolumes by a digest":       {informers.Need{Resource: core.WithResource("persistentvolumes"), Digest: typeOf}, false, "*v1.PersistentVolume"},
			"Ingresses by a digest":               {informers.Need{Resource: networking.WithResource("ingresses"), Digest: typeOf}, false, "*v1.Ingress"},
			"Ingresses as metadata":               {informers.Need{Resource: networking.WithResource("ingresses")}, false, ""},
			"a custom resource typed":             {informers.Need{Resource: sprockets, Form: informers.Typed}, true, "*informers.Sprocket"},
			"a custom resource by a typed digest": {informers.Need{Resource: sprockets, Digest: typeOf}, true, "*informers.Sprocket"},
			"a custom resource unstructured":      {informers.Need{Resource: sprockets, Form: informers.Unstructured}, false, "*unstructured.Unstructured"},
			"a custom resource by a digest":       {informers.Need{Resource: sprockets, Digest: typeOf}, false, "*unstructured.Unstructured"},
			"a custom resource as metadata":       {informers.Need{Resource: sprockets}, true, ""},
		} {
			t.Run(name+" in "+contentType, func(t *testing.T) {
				scheme := runtime.NewScheme()
				if err := clientscheme.AddToScheme(scheme); err != nil {
					t.Fatal(err)
				}
				if tc.known {
					scheme.AddKnownTypes(sprockets.GroupVersion(), &Sprocket{}, &SprocketList{})
					metav1.AddToGroupVersion(scheme, sprockets.GroupVersion())
				}
				config := rest.CopyConfig(shared.AdminConfig())
				config.ContentType = contentType
				tc.need.For = "test"
				c := newCacheWith(t, config, scheme, tc.need)
				c.eventually(ctx, t, func() error {
					informer, _ := c.Informer("test", tc.need.Resource)
					for _, obj := range informer.GetStore().List() {
						m, err := meta.Accessor(obj)
						if err != nil || m.GetName() != "forms" {
							continue
						}
						return isOf(obj, tc.want)
					}
					return fmt.Errorf("not in the cache: %w", c.Problem("test"))
				})
			})
		}
	}
}

func isOf(obj any, want string) error {
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
