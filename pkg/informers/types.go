// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// checkType returns an error if the controller cannot have the objects of the resource that it asks for as
// type t.
func (n *Need) checkType(asked schema.GroupVersionResource, t reflect.Type, scheme *runtime.Scheme) error {
	name := resourceName(n.Resource)
	if reflect.TypeFor[*Object]().AssignableTo(t) {
		return nil
	}
	form := Typed
	if t == reflect.TypeFor[*unstructured.Unstructured]() {
		form = Unstructured
	}
	switch {
	case n.Form != form:
		return fmt.Errorf("asks for %s as %s, but its need has another Form than informers.%s", name, t, form)
	case asked != n.Resource:
		return fmt.Errorf("asks for version %q of %s, but needs version %q", asked.Version, name, n.Resource.Version)
	case form == Unstructured:
		return nil
	}
	if err := CheckType(t, n.Resource, scheme); err != nil {
		return fmt.Errorf("asks for %s as %s, %w", name, t, err)
	}
	return nil
}

// CheckType returns an error if t is not a pointer to the Go type of the resource. The error continues a
// sentence that ends with t.
func CheckType(t reflect.Type, resource schema.GroupVersionResource, scheme *runtime.Scheme) error {
	if t.Kind() != reflect.Pointer {
		return errors.New("which is not a pointer to a Go type")
	}
	object, ok := reflect.New(t.Elem()).Interface().(runtime.Object)
	if !ok {
		return errors.New("which is not a runtime.Object")
	}
	kinds, _, err := scheme.ObjectKinds(object)
	if err != nil {
		return errors.New("which AddToScheme has not added to the scheme")
	}
	for _, kind := range kinds {
		list := kind.GroupVersion().WithKind(kind.Kind + "List")
		switch {
		case kind.GroupVersion() != resource.GroupVersion():
		case !scheme.Recognizes(list):
			return fmt.Errorf("but AddToScheme has not added %s to the scheme", list.Kind)
		case otherKind(scheme, kind, resource) != "":
			return fmt.Errorf("but these are of the kind %s", otherKind(scheme, kind, resource))
		default:
			return nil
		}
	}
	return fmt.Errorf("but that is a type of %s, not of %s", kinds[0].GroupVersion(), resource.GroupVersion())
}

// otherKind returns the kind of the resource if it is not kind, otherwise "". A scheme does not hold
// resources, so otherKind compares the usual plurals: another kind is returned if its plural is the
// resource's name and the plural of kind is not.
func otherKind(scheme *runtime.Scheme, kind schema.GroupVersionKind, resource schema.GroupVersionResource) string {
	isOf := func(kind schema.GroupVersionKind) bool {
		plural, singular := meta.UnsafeGuessKindToResource(kind)
		return plural == resource || singular == resource
	}
	if isOf(kind) {
		return ""
	}
	for name := range scheme.KnownTypes(resource.GroupVersion()) {
		if isOf(resource.GroupVersion().WithKind(name)) {
			return name
		}
	}
	return ""
}
