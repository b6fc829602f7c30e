// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"fmt"

	"k8s.io/client-go/tools/cache"
)

// Watch is an informer and the mapping from its events to keys.
type Watch[K comparable] struct {
	informer cache.SharedIndexInformer
	keys     func(change) ([]K, error)
	// replayed is set if the objects in the cache are mapped too, when Run begins.
	replayed bool
}

// change is an informer's notification before its types are known. If the watch missed the deletion
// of an object, old is a cache.DeletedFinalStateUnknown.
type change struct {
	old, new any
	initial  bool // new was in the cache when Run began
	// deletionTries counts how often the mapping has failed since the object was deleted.
	deletionTries int
}

// Event is a change of one object. Old is the zero T for an addition, New for a deletion. If the
// watch missed the deletion, Old is the last state known. After a relist, or at a resync, an update
// may have Old equal to New.
type Event[T any] struct {
	Old, New T
	// Initial is set for an object that was in the cache when Run began.
	Initial bool
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
// keys panics, it is called again with back-off. Later events of that object are then merged with
// this one: Old is that of the first and New that of the last. An object that was added and deleted
// meanwhile is forgotten, a deletion is tried 5 times, and 1,000 failing objects are kept at most.
func WatchMapped[T any, K comparable](informer cache.SharedIndexInformer, keys func(Event[T]) []K) Watch[K] {
	w := WatchChanges(informer, keys)
	w.replayed = true
	return w
}

// WatchChanges is WatchMapped, except that it maps nothing but changes from the beginning of Run on.
// It is for objects on which others depend: what they had changed to by then is seen when each of
// those others is reconciled.
func WatchChanges[T any, K comparable](informer cache.SharedIndexInformer, keys func(Event[T]) []K) Watch[K] {
	return Watch[K]{
		informer: informer,
		keys: func(c change) ([]K, error) {
			event := Event[T]{Initial: c.initial}
			var ok bool
			if c.old != nil {
				old := c.old
				if tombstone, missed := old.(cache.DeletedFinalStateUnknown); missed {
					old = tombstone.Obj
				}
				if event.Old, ok = old.(T); !ok {
					return nil, fmt.Errorf("watched object is a %T, not a %T", old, event.Old)
				}
			}
			if c.new != nil {
				if event.New, ok = c.new.(T); !ok {
					return nil, fmt.Errorf("watched object is a %T, not a %T", c.new, event.New)
				}
			}
			return keys(event), nil
		},
	}
}

// register adds the handler of the watch to its informer. It leaves out the informer's first list:
// that is in the cache when Run begins, which waits for it.
func (m *mapper[K]) register() error {
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
