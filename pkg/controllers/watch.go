// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// Watch is an informer and the mapping from its events to keys.
type Watch[K comparable] struct {
	informer cache.SharedIndexInformer
	keys     func(change) ([]K, error)
	// byOwner is set if keys reads owner references.
	byOwner bool
	// replayed is set if the objects in the cache are mapped too, when Run begins.
	replayed bool
	// mistake is why NewLoop refuses the watch.
	mistake error
}

// change is an informer's notification before its types are known. If the watch missed the deletion
// of an object, old is a cache.DeletedFinalStateUnknown.
type change struct {
	old, new any
}

// Event is a change of one object. Old is the zero T for an addition, New for a deletion. If the
// watch missed the deletion, Old is the last state known. After a relist, and at a resync, each object
// in the cache comes as an update, in most cases with the resourceVersion of Old.
type Event[T any] struct {
	Old, New T
}

// WatchSelf returns a watch that maps each object to its own name. When Run begins, it maps all that
// are in the cache.
func WatchSelf(informer cache.SharedIndexInformer) Watch[cache.ObjectName] {
	return Watch[cache.ObjectName]{
		informer: informer,
		replayed: true,
		keys: func(c change) ([]cache.ObjectName, error) {
			obj := c.new
			if obj == nil {
				obj = c.old
			}
			name, err := cache.DeletionHandlingObjectToName(obj)
			if err != nil {
				return nil, fmt.Errorf("name of a watched object: %w", err)
			}
			return []cache.ObjectName{name}, nil
		},
	}
}

// WatchMapped returns a watch that maps events of objects of type T to keys. When Run begins, it maps
// each object in the cache as an addition. It calls keys for one event at a time, in the order of an
// object's events. keys must not block and must not change the objects, which belong to the cache. If
// keys panics, that is counted and logged, and the object waits for its next event, the next resync or the
// next leader.
func WatchMapped[T any, K comparable](informer cache.SharedIndexInformer, keys func(Event[T]) []K) Watch[K] {
	w := WatchChanges(informer, keys)
	w.replayed = true
	return w
}

// WatchChanges is WatchMapped, except that it maps nothing but changes from the beginning of Run on.
// It is for objects on which others depend: what they had changed to by then is seen when each of
// those others is reconciled.
func WatchChanges[T any, K comparable](informer cache.SharedIndexInformer, keys func(Event[T]) []K) Watch[K] {
	if keys == nil {
		return Watch[K]{mistake: errors.New("the function that maps events to keys is nil")}
	}
	return Watch[K]{
		informer: informer,
		keys: func(c change) ([]K, error) {
			event, err := eventOf[T](c)
			if err != nil {
				return nil, err
			}
			return keys(event), nil
		},
	}
}

// WatchOwner returns a watch of objects that others own: it maps a change of an object to the owner of
// that kind which controls it, before and after the change. The owner is in the same namespace; see also
// [WatchClusterOwner]. The cache must hold the owner references: a need of the reduced form asks for them,
// and otherwise NewLoop returns an error.
func WatchOwner(informer cache.SharedIndexInformer, owner schema.GroupKind) Watch[cache.ObjectName] {
	return watchOwner(informer, owner, metav1.Object.GetNamespace)
}

// WatchClusterOwner is WatchOwner for an owner that has no namespace, whatever namespace the objects are in
// that it owns.
func WatchClusterOwner(informer cache.SharedIndexInformer, owner schema.GroupKind) Watch[cache.ObjectName] {
	return watchOwner(informer, owner, func(metav1.Object) string { return "" })
}

func watchOwner(informer cache.SharedIndexInformer, owner schema.GroupKind, namespace func(metav1.Object) string) Watch[cache.ObjectName] {
	w := WatchChanges(informer, func(e Event[metav1.Object]) []cache.ObjectName {
		var owners []cache.ObjectName
		for _, obj := range []metav1.Object{e.Old, e.New} {
			if obj == nil {
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

// Filter returns the watch without the events for which keep returns false. It is called as the
// mapping of [WatchMapped] is, and before it. For a deletion, it sees the last state known.
func Filter[T any, K comparable](watch Watch[K], keep func(Event[T]) bool) Watch[K] {
	if keep == nil {
		watch.mistake = errors.New("the function of Filter is nil")
	}
	keys := watch.keys
	watch.keys = func(c change) ([]K, error) {
		event, err := eventOf[T](c)
		if err != nil || !keep(event) {
			return nil, err
		}
		return keys(c)
	}
	return watch
}

// GenerationChanged is for [Filter]. It leaves out updates that change nothing but the metadata or the
// status of an object, such as the controller's own writes to it, and resyncs. It keeps all events of
// objects that have no generation, as of ConfigMaps and in the reduced form.
func GenerationChanged[T metav1.Object](e Event[T]) bool {
	before, after := metav1.Object(e.Old), metav1.Object(e.New)
	if isNil(before) || isNil(after) {
		return true
	}
	// A deletion and a creation that the watch has missed are one update.
	return after.GetGeneration() == 0 || before.GetGeneration() != after.GetGeneration() || before.GetUID() != after.GetUID()
}

// isNil reports whether an event lacks the object: T is a pointer or an interface.
func isNil(obj metav1.Object) bool {
	return obj == nil || reflect.ValueOf(obj).IsNil()
}

// eventOf returns the change with its types.
func eventOf[T any](c change) (event Event[T], err error) {
	var ok bool
	if c.old != nil {
		old := c.old
		if tombstone, missed := old.(cache.DeletedFinalStateUnknown); missed {
			old = tombstone.Obj
		}
		if event.Old, ok = old.(T); !ok {
			return event, fmt.Errorf("watched object is a %T, not a %s", old, reflect.TypeFor[T]())
		}
	}
	if c.new != nil {
		if event.New, ok = c.new.(T); !ok {
			return event, fmt.Errorf("watched object is a %T, not a %s", c.new, reflect.TypeFor[T]())
		}
	}
	return event, nil
}

// ownerKeeper is implemented by an informer that knows whether its cache holds owner references.
type ownerKeeper interface{ KeepsOwnerReferences() bool }

// register adds the handler of the watch to its informer. It leaves out the informer's first list:
// that is in the cache when Run begins, which waits for it.
func (m *mapper[K]) register() error {
	switch {
	case m.watch.mistake != nil:
		return m.watch.mistake
	case m.watch.informer == nil:
		return errors.New("it has no informer")
	}
	if k, ok := m.watch.informer.(ownerKeeper); ok && m.watch.byOwner && !k.KeepsOwnerReferences() {
		return errors.New("WatchOwner needs owner references, but no need of the resource has Fields: OwnerReferences")
	}
	_, err := m.watch.informer.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, first bool) {
			if !first {
				m.handle(change{new: obj})
			}
		},
		UpdateFunc: func(old, obj any) { m.handle(change{old: old, new: obj}) },
		DeleteFunc: func(obj any) { m.handle(change{old: obj}) },
	})
	return err
}
