// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"errors"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Watch is an informer and the mapping from its events to keys.
type Watch[K comparable] struct {
	informer untypedInformer
	keys     func(change) []K
	// byOwner is set if keys reads owner references.
	byOwner bool
	// replayed is set if the objects in the cache are mapped too, when Run begins.
	replayed bool
	// mistake is why NewLoop refuses the watch.
	mistake error
}

// change is a change of an object of any type: old is nil for one that came, new for one that went.
type change struct {
	old, new metav1.Object
}

// untypedInformer is an informer whose objects have lost their type.
type untypedInformer interface {
	handle(func(change))
	list() []metav1.Object
	get(cache.ObjectName) (metav1.Object, bool)
	Synced() <-chan struct{}
	KeepsOwnerReferences() bool
}

// untyped returns nil if informer is nil, so that register can report it.
func untyped[T metav1.Object](informer informers.Informer[T]) untypedInformer {
	if informer == nil {
		return nil
	}
	return untypedAdapter[T]{informer}
}

// untypedAdapter implements untypedInformer.
type untypedAdapter[T metav1.Object] struct{ informers.Informer[T] }

// handle drops the objects of the first list: Run waits for the informer, and then maps the objects in its
// cache.
func (e untypedAdapter[T]) handle(f func(change)) {
	e.AddHandler(func(old, current T, initial bool) {
		var c change
		if !isNil(old) {
			c.old = old
		}
		if !isNil(current) {
			c.new = current
		}
		if !initial || c.old != nil {
			f(c)
		}
	})
}

func (e untypedAdapter[T]) list() []metav1.Object {
	objects := e.List(metav1.NamespaceAll, nil)
	list := make([]metav1.Object, len(objects))
	for i := range objects {
		list[i] = objects[i]
	}
	return list
}

func (e untypedAdapter[T]) get(name cache.ObjectName) (metav1.Object, bool) { return e.Get(name) }

// Event is a change of one object. Old is the zero T for an addition. New is the zero T for a deletion,
// and Old then the last known state. After a relist, each object in the cache comes as
// an update, in most cases with the resourceVersion of Old.
type Event[T any] struct {
	Old, New T
}

// WatchSelf returns a watch that maps each object to its own name. When Run begins, it maps all that
// are in the cache. only is as for [WatchMapped].
func WatchSelf[T metav1.Object](informer informers.Informer[T], only ...func(Event[T]) bool) Watch[cache.ObjectName] {
	return WatchMapped(informer, func(e Event[T]) []cache.ObjectName {
		if isNil(e.New) {
			return []cache.ObjectName{cache.MetaObjectToName(e.Old)}
		}
		return []cache.ObjectName{cache.MetaObjectToName(e.New)}
	}, only...)
}

// WatchMapped returns a watch that maps events of objects of type T to keys. When Run begins, it maps
// each object in the cache as an addition. It leaves out events for which a function of only returns false,
// such as [GenerationChanged]. It calls these functions for one event at a time, in the order of an
// object's events. They must not block and must not change the objects, which belong to the cache. If
// one panics, that is counted and logged, and the object waits for its next event, the next relist or the
// next leader.
func WatchMapped[T metav1.Object, K comparable](informer informers.Informer[T], keys func(Event[T]) []K, only ...func(Event[T]) bool) Watch[K] {
	w := WatchChanges(informer, keys, only...)
	w.replayed = true
	return w
}

// WatchChanges is WatchMapped, except that it maps nothing but changes from the beginning of Run on.
// It is for objects on which others depend: the reconcile of each other object sees earlier changes.
func WatchChanges[T metav1.Object, K comparable](informer informers.Informer[T], keys func(Event[T]) []K, only ...func(Event[T]) bool) Watch[K] {
	if keys == nil || slices.ContainsFunc(only, func(keep func(Event[T]) bool) bool { return keep == nil }) {
		return Watch[K]{mistake: errors.New("a function that maps or chooses events is nil")}
	}
	return Watch[K]{
		informer: untyped(informer),
		keys: func(c change) []K {
			var event Event[T]
			event.Old, _ = c.old.(T) // nil becomes the zero T
			event.New, _ = c.new.(T)
			for _, keep := range only {
				if !keep(event) {
					return nil
				}
			}
			return keys(event)
		},
	}
}

// WatchOwner returns a watch of objects that others own: it maps a change of an object to the owner of
// that kind which controls it, before and after the change. The owner is in the same namespace; see also
// [WatchClusterOwner]. The cache must hold the owner references: a need of the reduced form asks for them,
// and otherwise NewLoop returns an error.
func WatchOwner[T metav1.Object](informer informers.Informer[T], owner schema.GroupKind) Watch[cache.ObjectName] {
	return watchOwner(informer, owner, metav1.Object.GetNamespace)
}

// WatchClusterOwner is WatchOwner for an owner that has no namespace. Its objects may be in any namespace.
func WatchClusterOwner[T metav1.Object](informer informers.Informer[T], owner schema.GroupKind) Watch[cache.ObjectName] {
	return watchOwner(informer, owner, func(metav1.Object) string { return "" })
}

func watchOwner[T metav1.Object](informer informers.Informer[T], owner schema.GroupKind, namespace func(metav1.Object) string) Watch[cache.ObjectName] {
	w := WatchChanges(informer, func(e Event[T]) []cache.ObjectName {
		var owners []cache.ObjectName
		for _, obj := range []T{e.Old, e.New} {
			if isNil(obj) {
				continue
			}
			ref := metav1.GetControllerOfNoCopy(obj)
			if ref == nil || ref.Kind != owner.Kind {
				continue
			}
			name := cache.NewObjectName(namespace(obj), ref.Name)
			if gv, err := schema.ParseGroupVersion(ref.APIVersion); err == nil && gv.Group == owner.Group && !slices.Contains(owners, name) {
				owners = append(owners, name)
			}
		}
		return owners
	})
	w.byOwner = true
	return w
}

// GenerationChanged is for [WatchSelf] and [WatchMapped]. It leaves out updates that change nothing but the
// metadata or the status of an object, such as the controller's own writes to it, finalizers included, and
// relists. It keeps all events of objects that have no generation, as of ConfigMaps and in the reduced form,
// and of whole objects that are read as metav1.Object.
func GenerationChanged[T metav1.Object](e Event[T]) bool {
	before, after := e.Old, e.New
	if isNil(before) || isNil(after) {
		return true
	}
	if _, reduced := any(after).(*informers.Object); reduced {
		return true // whether it has a generation depends on what other controllers need
	}
	// A deletion and a creation that the watch has missed are one update.
	return after.GetGeneration() == 0 || before.GetGeneration() != after.GetGeneration() || before.GetUID() != after.GetUID()
}

// isNil reports whether an event lacks the object: T is a pointer or an interface.
func isNil[T metav1.Object](obj T) bool {
	v := reflect.ValueOf(obj)
	return !v.IsValid() || v.IsNil()
}

// register adds the handler of the watch to its informer.
func (m *mapper[K]) register() error {
	switch {
	case m.watch.mistake != nil:
		return m.watch.mistake
	case m.watch.informer == nil:
		return errors.New("the informer is nil")
	case m.watch.byOwner && !m.watch.informer.KeepsOwnerReferences():
		return errors.New("WatchOwner needs owner references, but no need of the resource has Fields: OwnerReferences")
	}
	m.watch.informer.handle(m.handle)
	return nil
}
