// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"reflect"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Put creates or replaces objects as another client does, whatever their resourceVersions. It stores them as
// they are, with their status. The test fails if an object of that name has another UID: Delete it first. The
// controller runs from then on; Settle waits until it has nothing left to do.
func (s *APIServer) Put(objects ...runtime.Object) {
	s.t.Helper()
	for _, obj := range objects {
		if err := s.server.Put(s.encode(obj)); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Delete deletes objects as another client does: an object with finalizers stays until the last is removed.
// Nobody collects objects that the deleted objects own.
func (s *APIServer) Delete(objects ...runtime.Object) {
	s.t.Helper()
	for _, obj := range objects {
		if err := s.server.Delete(s.encode(obj)); err != nil {
			s.t.Fatal(err)
		}
	}
}

// object is a pointer to an API type.
type object[T any] interface {
	*T
	runtime.Object
}

// Get returns the object with that name, or nil if there is none: controllertest.Get[v1.Widget](h,
// "shop", "a").
func Get[T any, P object[T]](has HasAPIServer, namespace, name string) P {
	s := has.apiServer()
	s.t.Helper()
	all := objectsOf[T, P](s, func(group, kind string) []*unstructured.Unstructured {
		if obj := s.server.Object(group, kind, namespace, name); obj != nil {
			return []*unstructured.Unstructured{obj}
		}
		return nil
	})
	if len(all) == 0 {
		return nil
	}
	return all[0]
}

// List returns all objects of a type, sorted by namespace and name.
func List[T any, P object[T]](has HasAPIServer) []P {
	s := has.apiServer()
	s.t.Helper()
	return objectsOf[T, P](s, s.server.Objects)
}

func objectsOf[T any, P object[T]](s *APIServer, get func(group, kind string) []*unstructured.Unstructured) []P {
	s.t.Helper()
	kinds, _, err := s.scheme.ObjectKinds(P(new(T)))
	if err != nil {
		s.t.Fatal(err)
	}
	var all []P
	for _, obj := range get(kinds[0].Group, kinds[0].Kind) {
		typed := P(new(T))
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, typed); err != nil {
			s.t.Fatal(err)
		}
		all = append(all, typed)
	}
	return all
}

// encode returns an object as the API server stores it.
func (s *APIServer) encode(obj runtime.Object) *unstructured.Unstructured {
	s.t.Helper()
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.DeepCopy()
	}
	kinds, _, err := s.scheme.ObjectKinds(obj)
	if err != nil {
		s.t.Fatalf("%s: %v", reflect.TypeOf(obj), err)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		s.t.Fatal(err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(kinds[0])
	return u
}
