// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// Informer is the cache of a resource as one controller gets it, with the type of its objects. They
// belong to the cache: copy an object before you change it.
type Informer[T any] interface {
	// Get returns the object with that name, and whether the cache has it.
	Get(name cache.ObjectName) (object T, exists bool)
	// List returns the objects in a namespace, or in all if it is empty, whose labels the selector
	// matches; nil matches all. With a selector, a need of the reduced form must have Fields: Labels, or List
	// panics with a Mistake. The order of the objects is random. List looks at every object in the cache,
	// unless there is the index [cache.NamespaceIndex].
	List(namespace string, selector labels.Selector) []T
	// ByIndex returns the objects that have the value in an index that AddIndex has added.
	ByIndex(index, value string) []T
	// AddIndex adds an index, in which an object has the values that the function returns. It is called
	// while the controller is built. All controllers share [cache.NamespaceIndex], which has its own values.
	// An index that is added again stays as it is.
	AddIndex(name string, values func(T) []string)
	// AddHandler calls a function with each change of an object, one at a time, in the order of an
	// object's changes: old is nil for a new object, current for a deleted one. After a relist each object
	// comes again, in most cases with the resourceVersion of old. initial is set for what was there before the
	// cache had synced, or before AddHandler.
	AddHandler(func(old, current T, initial bool))
	// Synced returns a channel that is closed when the cache has been filled once.
	Synced() <-chan struct{}
	// KeepsOwnerReferences reports whether the cache has them for this controller.
	KeepsOwnerReferences() bool
}

// ControllerCache is the cache as one controller gets it. The controller's host embeds it.
type ControllerCache struct {
	cluster    *ClusterCache
	controller string
}

// For returns the cache for the named controller.
func (c *ClusterCache) For(controller string) ControllerCache { return ControllerCache{c, controller} }

func (c ControllerCache) cache() ControllerCache { return c }

// LiveVersion returns the resourceVersion that an object of a resource which the entry declares has in the
// API server now, or "" if there is none or the need does not choose it; Need.Filter is not asked. A
// controller calls it when it suspects that the cache is behind.
func (c ControllerCache) LiveVersion(ctx context.Context, resource schema.GroupVersionResource, name cache.ObjectName) (string, error) {
	i := c.cluster.informerFor(c.controller, resource.GroupResource())
	if i == nil {
		return "", fmt.Errorf("version of %s %s: %s does not need the resource", resourceName(resource), name, c.controller)
	}
	p := i.plan
	if p.namespace != "" && p.namespace != name.Namespace {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	selector := "metadata.name=" + name.Name
	if p.fieldSelector != "" {
		selector += "," + p.fieldSelector
	}
	list, err := metadataOf(p.resource, c.cluster.clients, name.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: selector, LabelSelector: p.labelSelector})
	if err != nil {
		return "", fmt.Errorf("version of %s %s: %w", resourceName(resource), name, err)
	}
	for i := range list.Items {
		if list.Items[i].Name == name.Name {
			return list.Items[i].ResourceVersion, nil
		}
	}
	return "", nil
}

// liveTimeout is a little longer than kube-apiserver's default --request-timeout.
const liveTimeout = 70 * time.Second

// Mistake is what [For], and a function of the host that cannot return an error, panics with. The host
// returns it as the error of the controller's entry.
type Mistake string

// Error implements error.
func (m Mistake) Error() string { return string(m) }

// RuntimeError makes a Mistake an error whose text is shown when a reconcile panics with it: the text names
// types and resources, and holds nothing of an object.
func (Mistake) RuntimeError() {}

// For returns the informer of a resource that the entry declares in Needs, with the type of its objects:
// the Go type for a need in the form Typed, *unstructured.Unstructured for one in the form Unstructured,
// and *Object, metav1.Object or any other interface that an Object has, for any. host is the controller's
// host, or a [ControllerCache]. For is called while a controller is built, since it panics if the need, the
// scheme and T do not fit together; the manager's start then fails with an error that names the controller.
func For[T any](host interface{ cache() ControllerCache }, resource schema.GroupVersionResource) Informer[T] {
	c := host.cache()
	i := c.cluster.informerFor(c.controller, resource.GroupResource())
	if i == nil {
		panic(Mistake(fmt.Sprintf("asks for the informer of %s, which its entry does not declare in Needs", resourceName(resource))))
	}
	need := i.plan.need(c.controller)
	if err := need.fits(resource, reflect.TypeFor[T](), c.cluster.clients.scheme); err != nil {
		panic(Mistake(err.Error()))
	}
	return view[T]{i, need}
}

// view implements Informer.
type view[T any] struct {
	*informer
	need *Need
}

func (v view[T]) Get(name cache.ObjectName) (object T, exists bool) {
	if o := v.get(name.String()); o != nil {
		return as[T](o), true
	}
	return object, false
}

func (v view[T]) List(namespace string, selector labels.Selector) []T {
	if selector != nil && !selector.Empty() && !v.need.whole() && v.need.Fields&Labels == 0 {
		panic(Mistake(fmt.Sprintf("lists %s by labels, but its need has no Fields: Labels", v.name)))
	}
	stored, err := v.objects.ByIndex(cache.NamespaceIndex, namespace)
	if namespace == "" || err != nil {
		stored = v.objects.List()
	}
	list := make([]T, 0, len(stored))
	for _, obj := range stored {
		o := obj.(*Object)
		if (namespace == "" || o.GetNamespace() == namespace) && (selector == nil || selector.Matches(labels.Set(o.GetLabels()))) {
			list = append(list, as[T](o))
		}
	}
	return list
}

// index returns the name of an index in the store.
func (v view[T]) index(name string) string {
	if name == cache.NamespaceIndex {
		return name
	}
	return v.need.For + "/" + name
}

func (v view[T]) ByIndex(index, value string) []T {
	stored, err := v.objects.ByIndex(v.index(index), value)
	if err != nil {
		panic(Mistake(fmt.Sprintf("asks %s for the index %s, which it has not added", v.name, index)))
	}
	list := make([]T, 0, len(stored))
	for _, obj := range stored {
		list = append(list, as[T](obj.(*Object)))
	}
	return list
}

func (v view[T]) AddIndex(name string, values func(T) []string) {
	index := func(obj any) (found []string, _ error) {
		o := obj.(*Object)
		v.panics.contain(v.need.For, "index "+name, o, func() { found = values(as[T](o)) })
		return found, nil
	}
	if name == cache.NamespaceIndex {
		index = cache.MetaNamespaceIndexFunc
	}
	_ = v.objects.AddIndexers(cache.Indexers{v.index(name): index}) // fails if it is there
}

func (v view[T]) AddHandler(changed func(old, current T, initial bool)) {
	v.listen(v.need.For, func(e event) {
		var old, current T
		if e.old != nil {
			old = as[T](e.old)
		}
		if e.new != nil {
			current = as[T](e.new)
		}
		changed(old, current, e.initial)
	})
}

func (v view[T]) Synced() <-chan struct{} { return v.synced }

func (v view[T]) KeepsOwnerReferences() bool {
	return v.need.whole() || v.need.Fields&OwnerReferences != 0
}

// fits returns an error if the controller cannot have the objects of the resource as type t.
func (n *Need) fits(asked schema.GroupVersionResource, t reflect.Type, scheme *runtime.Scheme) error {
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
	return [...]string{"Reduced", "Metadata", "Typed", "Unstructured"}[f]
}
