// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

// Informer is the cache of a resource as one controller gets it from [For] or [Follow], with the type of its
// objects. They belong to the cache: copy an object before you change it. Until Synced, the cache seems to
// lack objects; loops wait for it, see controllers.LoopOptions.
type Informer[T any] struct {
	*informer
	need *Need
}

// Cache is the cache of a cluster as one controller gets it: for [Follow] and, in the process's own cluster,
// for what its entry declares.
type Cache struct {
	cluster    *ClusterCache
	controller string
}

// ForController returns the cache for the named controller.
func (c *ClusterCache) ForController(controller string) Cache {
	return Cache{cluster: c, controller: controller}
}

func (c Cache) cache() Cache { return c }

// HasCache is a [Cache] or what embeds one: a controllers.Host or a *controllers.Cluster.
type HasCache interface{ cache() Cache }

// For returns the informer of a resource that the entry declares in Needs, with the type of its objects:
// the Go type for a need in the form Typed, *unstructured.Unstructured for one in the form Unstructured,
// and *Object, metav1.Object or any other interface that an Object has, for any. For is called while a
// controller is built, since it panics if the need, the scheme and T do not fit together; the manager's start
// then fails with an error that names the controller.
func For[T any](host HasCache, resource schema.GroupVersionResource) *Informer[T] {
	c := host.cache()
	i, need := c.cluster.informerFor(c.controller, resource.GroupResource())
	if i == nil {
		why := "which its entry does not declare in Needs"
		if c.cluster.cfg.Cluster != "" {
			why = "but another cluster has no declared needs: use informers.Follow"
		}
		panic(panics.Mistake(fmt.Sprintf("asks for the informer of %s, %s", resourceName(resource), why)))
	}
	if err := need.checkType(resource, reflect.TypeFor[T](), c.cluster.clients.scheme); err != nil {
		panic(panics.Mistake(err.Error()))
	}
	i.plan.expect(reflect.TypeFor[T]())
	return &Informer[T]{i, need}
}

// Get returns the object with that name, and whether the cache has it.
func (i *Informer[T]) Get(name cache.ObjectName) (object T, exists bool) {
	if o := i.objects.get(name.String()); o != nil {
		return objectAs[T](o), true
	}
	return object, false
}

// List returns the objects in a namespace, or in all if it is empty, whose labels the selector
// matches; nil matches all. With a selector, a need of the reduced form must have Fields: Labels, or List
// panics. The objects are in no order. The first List of one namespace makes an index of all namespaces.
func (i *Informer[T]) List(namespace string, selector labels.Selector) []T {
	if selector != nil && !selector.Empty() && !i.need.whole() && i.need.Fields&Labels == 0 {
		panic(panics.Mistake(fmt.Sprintf("lists %s by labels, but its need has no Fields: Labels", i.name)))
	}
	stored := i.stored(namespace)
	if selector != nil {
		stored = slices.DeleteFunc(stored, func(o *Object) bool { return !selector.Matches(labels.Set(o.GetLabels())) })
	}
	return objectsAs[T](stored)
}

// byNamespace is the index that List makes. It is for all controllers.
const byNamespace = "namespace"

// stored returns the objects in a namespace, or in all if it is empty.
func (i *informer) stored(namespace string) []*Object {
	if namespace == "" {
		return i.objects.list()
	}
	objects, indexed := i.objects.byIndex(byNamespace, namespace)
	if !indexed {
		i.addStoreIndex(byNamespace, func(o *Object) []string { return []string{o.GetNamespace()} })
		objects, _ = i.objects.byIndex(byNamespace, namespace)
	}
	return objects
}

// addStoreIndex adds an index to the store, and reports whether the name was free.
func (i *informer) addStoreIndex(name string, values func(*Object) []string) bool {
	i.mu.Lock() // no put beside it
	defer i.mu.Unlock()
	return i.objects.addIndex(name, values)
}

// indexName returns the name of an index in the store.
func (i *Informer[T]) indexName(name string) string { return i.need.controller + "/" + name }

// ByIndex returns the objects that have the value in an index that AddIndex has added.
func (i *Informer[T]) ByIndex(index, value string) []T {
	stored, exists := i.objects.byIndex(i.indexName(index), value)
	if !exists {
		panic(panics.Mistake(fmt.Sprintf("asks %s for the index %s, which it has not added", i.name, index)))
	}
	return objectsAs[T](stored)
}

// AddIndex adds an index, in which an object has the values that the function returns. These must depend on
// the object alone: the function must not read the informer. AddIndex is called while the controller is
// built. To add an index twice is a mistake: AddIndex panics.
func (i *Informer[T]) AddIndex(name string, values func(T) []string) {
	valuesOf := func(o *Object) (found []string) {
		i.bad.contain(i.need.controller, "index "+name, o, func() { found = values(objectAs[T](o)) })
		return found
	}
	if !i.addStoreIndex(i.indexName(name), valuesOf) {
		panic(panics.Mistake(fmt.Sprintf("adds the index %s of %s twice", name, i.name)))
	}
}

// AddHandler calls a function with each change of an object, one at a time, in the order of an object's
// changes: old is nil for a new object, current for a deleted one. initial is set for objects that were there
// before the cache had synced, or before AddHandler. An update may have it too, while only some of
// --namespaces have been listed. The function may be called for objects of the first list after Synced; a
// loop lists the cache itself. The returned function removes the handler; a call that is in progress goes
// on.
func (i *Informer[T]) AddHandler(changed func(old, current T, initial bool)) (remove func()) {
	return i.listen(i.need.controller, "handler", true, func(e event) bool {
		old, current := statesOf[T](e)
		changed(old, current, e.initial)
		return true
	}).remove
}

// AddMapping is AddHandler for the watches of package controllers. mapEvent is called with changes only, and
// by replay with a cached object as an addition. It returns false for an event that it leaves out.
func (i *Informer[T]) AddMapping(
	mapEvent func(old, current T, replayed bool) (mapped bool),
) (replay func(name cache.ObjectName), remove func()) {
	l := i.listen(i.need.controller, "mapping", false, func(e event) bool {
		old, current := statesOf[T](e)
		return (e.replayed || !e.initial || e.old != nil) && mapEvent(old, current, e.replayed)
	})
	return func(name cache.ObjectName) {
		if o := i.objects.get(name.String()); o != nil {
			l.call(event{new: o, replayed: true})
		}
	}, l.remove
}

// statesOf returns the states of an event's object in the form of a controller.
func statesOf[T any](e event) (old, current T) {
	if e.old != nil {
		old = objectAs[T](e.old)
	}
	if e.new != nil {
		current = objectAs[T](e.new)
	}
	return old, current
}

// Synced returns a channel that is closed when the cache has been filled once, but for those of --namespaces
// that cannot be read.
func (i *Informer[T]) Synced() <-chan struct{} { return i.lists.synced }

// Objects returns all objects as the cache holds them. It is for the watches of package controllers.
func (i *Informer[T]) Objects() []metav1.Object {
	return (*Informer[metav1.Object])(i).List(metav1.NamespaceAll, nil)
}

// KeepsOwnerReferences reports whether the cache has them for this controller. It is for the watches of
// package controllers.
func (i *Informer[T]) KeepsOwnerReferences() bool {
	return i.need.whole() || i.need.Fields&OwnerReferences != 0
}

// ClusterScoped reports whether the resource has no namespaces, as the need says.
func (i *Informer[T]) ClusterScoped() bool { return i.need.ClusterScoped }
