// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// Informer is a shared informer with the type of its objects. They belong to the cache: whoever wants
// to change one makes a copy of it.
type Informer[T metav1.Object] struct {
	cache.SharedIndexInformer
}

// MismatchError is what [For] panics with. The host returns it as the error of the controller's entry.
type MismatchError struct{ error }

// RuntimeError makes its text show when a reconcile panics with it. It holds nothing of an object.
func (MismatchError) RuntimeError() {}

// For returns the informer of a resource with the type of its objects: the Go type for a need in the
// Typed form, *unstructured.Unstructured for one in the Unstructured form, and metav1.Object for any.
// The function informer is that of the host, controllers.Host.Informer. For is called while a controller is
// built, since it panics if the need, the scheme and T do not fit together; the manager's start then
// fails with an error that names the controller.
func For[T metav1.Object](
	informer func(schema.GroupVersionResource) cache.SharedIndexInformer, resource schema.GroupVersionResource,
) Informer[T] {
	i := informer(resource)
	if c, ok := i.(*controllerInformer); ok {
		if err := c.fits(resource, reflect.TypeFor[T]()); err != nil {
			panic(MismatchError{err})
		}
	}
	return Informer[T]{i}
}

// Get returns the object with that name, and whether the cache has it.
func (i Informer[T]) Get(name cache.ObjectName) (object T, exists bool) {
	stored, exists, _ := i.GetIndexer().GetByKey(name.String()) // never fails
	if !exists {
		return object, false
	}
	return stored.(T), true
}

// List returns the objects in a namespace, or in all if it is empty, whose labels the selector
// matches. A need of the reduced form asks for the labels. Their order is random. It looks at every
// object in the cache, unless the informer has cache.NamespaceIndex.
func (i Informer[T]) List(namespace string, selector labels.Selector) []T {
	var list []T
	add := func(stored any) {
		if object := stored.(T); selector.Matches(labels.Set(object.GetLabels())) {
			list = append(list, object)
		}
	}
	if stored, err := i.GetIndexer().ByIndex(cache.NamespaceIndex, namespace); namespace != "" && err == nil {
		for _, object := range stored {
			add(object)
		}
		return list
	}
	for _, object := range i.GetIndexer().List() {
		if namespace == "" || object.(T).GetNamespace() == namespace {
			add(object)
		}
	}
	return list
}

// ByIndex returns the objects that have the value in an index. It panics if AddIndexers has not added
// that index.
func (i Informer[T]) ByIndex(index, value string) []T {
	stored, err := i.GetIndexer().ByIndex(index, value)
	if err != nil {
		panic(err)
	}
	list := make([]T, 0, len(stored))
	for _, object := range stored {
		list = append(list, object.(T))
	}
	return list
}

// KeepsOwnerReferences reports whether the cache holds them, see controllers.WatchOwner.
func (i Informer[T]) KeepsOwnerReferences() bool {
	c, ok := i.SharedIndexInformer.(*controllerInformer)
	return !ok || c.KeepsOwnerReferences()
}

// KeepsOwnerReferences reports whether the cache holds them for this controller.
func (i *controllerInformer) KeepsOwnerReferences() bool {
	need := i.need()
	return need.whole() || need.Fields&OwnerReferences != 0
}

// fits returns an error if the controller cannot have the objects of the resource as type t.
func (i *controllerInformer) fits(asked schema.GroupVersionResource, t reflect.Type) error {
	need := i.need()
	name := resourceName(need.Resource)
	if t == reflect.TypeFor[metav1.Object]() {
		return nil
	}
	form := Typed
	if t == reflect.TypeFor[*unstructured.Unstructured]() {
		form = Unstructured
	}
	switch {
	case need.Form != form:
		return fmt.Errorf("asks for %s as %s, but its need has another Form than informers.%s", name, t, form)
	case asked != need.Resource:
		return fmt.Errorf("asks for version %q of %s, but needs version %q", asked.Version, name, need.Resource.Version)
	case form == Unstructured:
		return nil
	case t.Kind() != reflect.Pointer:
		return fmt.Errorf("asks for %s as %s, which is no pointer to a Go type", name, t)
	}
	object, ok := reflect.New(t.Elem()).Interface().(runtime.Object)
	if !ok {
		return fmt.Errorf("asks for %s as %s, which is no runtime.Object", name, t)
	}
	kinds, _, err := i.scheme.ObjectKinds(object)
	if err != nil {
		return fmt.Errorf("asks for %s as %s, which AddToScheme has not added to the scheme", name, t)
	}
	for _, kind := range kinds {
		list := kind.GroupVersion().WithKind(kind.Kind + "List")
		switch {
		case kind.GroupVersion() != need.Resource.GroupVersion():
		case !i.scheme.Recognizes(list):
			return fmt.Errorf("asks for %s as %s, but AddToScheme has not added %s to the scheme", name, t, list.Kind)
		case OtherKind(i.scheme, kind, need.Resource) != "":
			return fmt.Errorf("asks for %s as %s, but these are of the kind %s", name, t, OtherKind(i.scheme, kind, need.Resource))
		default:
			return nil
		}
	}
	return fmt.Errorf("asks for %s as %s, but that is a type of %s, not of %s", name, t, kinds[0].GroupVersion(), need.Resource.GroupVersion())
}

// OtherKind returns the kind of the resource if that is another one than kind, otherwise "". A scheme
// does not hold resources, so that goes by the usual plurals: it is another kind if its plural is the
// resource's name and that of kind is not.
func OtherKind(scheme *runtime.Scheme, kind schema.GroupVersionKind, resource schema.GroupVersionResource) string {
	fits := func(kind schema.GroupVersionKind) bool {
		plural, singular := meta.UnsafeGuessKindToResource(kind)
		return plural == resource || singular == resource
	}
	if fits(kind) {
		return ""
	}
	for name := range scheme.KnownTypes(resource.GroupVersion()) {
		if fits(resource.GroupVersion().WithKind(name)) {
			return name
		}
	}
	return ""
}

// String returns the name of the constant.
func (f Form) String() string {
	switch f {
	case Reduced:
		return "Reduced"
	case Metadata:
		return "Metadata"
	case Typed:
		return "Typed"
	case Unstructured:
		return "Unstructured"
	}
	return fmt.Sprintf("Form(%d)", int(f))
}
