// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/applyconfigurations"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
	"sigs.k8s.io/structured-merge-diff/v6/typed"
)

// managed returns obj with managedFields. current is nil at a creation.
func (s *Server) managed(r *resource, sub string, current, obj *object, manager string) (*object, error) {
	defaults(obj)
	if current == nil {
		current = empty(r)
	}
	fields, err := s.fieldManager(r, sub)
	if err != nil {
		return nil, err
	}
	merged, err := fields.Update(inVersion(current, r).DeepCopy(), obj, manager)
	if err != nil {
		return nil, err
	}
	return merged.(*object), nil
}

// merge returns the result of server-side apply to current, which is nil if the object does not exist.
func (s *Server) merge(r *resource, sub string, current, patch *object, manager string, force bool) (*object, error) {
	if current == nil {
		current = empty(r)
	}
	fields, err := s.fieldManager(r, sub)
	if err != nil {
		return nil, err
	}
	merged, err := fields.Apply(inVersion(current, r).DeepCopy(), patch, manager, force)
	if err != nil {
		return nil, err
	}
	obj := merged.DeepCopyObject().(*object)
	defaults(obj)
	return obj, nil
}

func empty(r *resource) *object {
	obj := &object{Object: map[string]any{"metadata": map[string]any{}}}
	obj.SetGroupVersionKind(r.gvk())
	return obj
}

// fieldManager is the API server's. For built-in types it knows the schemas, and so the keys of lists. Lists
// of custom resources are replaced as a whole.
func (s *Server) fieldManager(r *resource, sub string) (*managedfields.FieldManager, error) {
	var reset map[fieldpath.APIVersion]fieldpath.Filter
	if r.status {
		ignored := fieldpath.NewSet(fieldpath.MakePathOrDie("status"))
		if sub == "status" {
			ignored = fieldpath.NewSet(fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("metadata"))
		}
		reset = fieldpath.NewExcludeFilterSetMap(map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(r.GroupVersion().String()): ignored})
	}
	return managedfields.NewDefaultFieldManager(s.types, oneVersion{}, noDefaults{}, creator{}, r.gvk(), r.GroupVersion(), sub, reset)
}

// typeConverter knows the schemas of the built-in types.
type typeConverter struct{ builtIn, deduced managedfields.TypeConverter }

func newTypeConverter() managedfields.TypeConverter {
	return typeConverter{applyconfigurations.NewTypeConverter(clientscheme.Scheme), managedfields.NewDeducedTypeConverter()}
}

// ObjectToTyped implements managedfields.TypeConverter.
func (c typeConverter) ObjectToTyped(obj runtime.Object, opts ...typed.ValidationOptions) (*typed.TypedValue, error) {
	if clientscheme.Scheme.Recognizes(obj.GetObjectKind().GroupVersionKind()) {
		return c.builtIn.ObjectToTyped(obj, opts...)
	}
	return c.deduced.ObjectToTyped(obj, opts...)
}

// TypedToObject implements managedfields.TypeConverter.
func (c typeConverter) TypedToObject(value *typed.TypedValue) (runtime.Object, error) {
	return c.deduced.TypedToObject(value)
}

// oneVersion converts nothing: all versions of a kind have the same content.
type oneVersion struct{}

func (oneVersion) Convert(in, out, _ any) error {
	in.(*unstructured.Unstructured).DeepCopyInto(out.(*unstructured.Unstructured))
	return nil
}

func (oneVersion) ConvertToVersion(in runtime.Object, _ runtime.GroupVersioner) (runtime.Object, error) {
	return in, nil
}

func (oneVersion) ConvertFieldLabel(_ schema.GroupVersionKind, label, value string) (string, string, error) {
	return label, value, nil
}

type noDefaults struct{}

func (noDefaults) Default(runtime.Object) {}

type creator struct{}

func (creator) New(kind schema.GroupVersionKind) (runtime.Object, error) {
	obj := &object{}
	obj.SetGroupVersionKind(kind)
	return obj, nil
}
