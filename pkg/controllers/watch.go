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
	mistake error // why NewLoop refuses the watch; then no other field is used
	cache   Awaited
	// leftOut, of WatchSelf, reports whether the cache leaves out the object of a key.
	leftOut func(K) bool
	// list returns the objects in the cache.
	list func() []metav1.Object
	// register registers the mapper of a loop. replay maps the newest state of an object in the cache. That
	// state includes each change whose event the gate of the mapper dropped, and is not older than any
	// state that has been mapped.
	register func(m *mapper[K]) (replay func(cache.ObjectName), remove func())
	// primary says that Run maps the objects in the cache when it begins. A watch that Loop.Watch adds maps them
	// in any case: a reconcile may have run before the informer had them.
	primary bool
}

// Awaited is a cache for which a loop waits: an [informers.Informer].
type Awaited interface {
	Synced() <-chan struct{}
	// Unlisted reports whether the cache knows nothing of a namespace, although it has synced.
	Unlisted(namespace string) bool
}

// watchable is what a watch asks of an [informers.Informer].
type watchable[T any] interface {
	Awaited
	Objects() []metav1.Object
	Get(name cache.ObjectName) (object T, exists bool)
	AddMapping(mapEvent func(old, current T, replayed bool) (mapped bool)) (replay func(cache.ObjectName), remove func())
}

// Event is a change of one object. Old is the zero T for an addition. New is the zero T for a deletion,
// and Old then the last state in the cache.
type Event[T any] struct {
	Old, New T
}

// WatchSelf returns a watch that maps each object to its own name. When Run begins, it maps all that
// are in the cache. While the cache leaves out an object, since that does not fit its Go type, the key is
// blocked. only is as for [WatchMapped].
func WatchSelf[T metav1.Object](informer *informers.Informer[T], only ...func(Event[T]) bool) Watch[cache.ObjectName] {
	watch := WatchMapped(informer, ownName[T], only...)
	if watch.mistake == nil {
		watch.leftOut = informer.LeftOut
	}
	return watch
}

func ownName[T metav1.Object](e Event[T]) []cache.ObjectName {
	return []cache.ObjectName{cache.MetaObjectToName(objectOf(e))}
}

// WatchMapped returns a watch that maps events of objects of type T to keys. When Run begins, it maps each
// object in the cache as an addition. It leaves out events for which a function of only returns false, such
// as [GenerationChanged]. It calls these functions for one event at a time, in the order of an object's
// events, except that the newest state may come as an addition before events that led to it. They must not
// block and must not change the objects, which belong to the cache. If one panics, the object waits for its
// next event or the next leader; its deletion is lost. The panic is a problem of the controller until the
// object is mapped or gone.
func WatchMapped[T metav1.Object, K comparable](
	informer *informers.Informer[T], keys func(Event[T]) []K, only ...func(Event[T]) bool,
) Watch[K] {
	return newWatch(informer, true, keys, only)
}

// WatchChanges is WatchMapped, except that it maps nothing but changes from the beginning of Run on.
// It is for objects on which others depend: the reconcile of each other object sees earlier changes. A watch
// that [Loop.Watch] adds maps the objects in the cache too.
func WatchChanges[T metav1.Object, K comparable](
	informer *informers.Informer[T], keys func(Event[T]) []K, only ...func(Event[T]) bool,
) Watch[K] {
	return newWatch(informer, false, keys, only)
}

func newWatch[T metav1.Object, K comparable](
	informer watchable[T], primary bool, keys func(Event[T]) []K, only []func(Event[T]) bool,
) Watch[K] {
	switch {
	case informer == watchable[T]((*informers.Informer[T])(nil)):
		return Watch[K]{mistake: errors.New("the informer is nil")}
	case keys == nil || slices.ContainsFunc(only, func(keep func(Event[T]) bool) bool { return keep == nil }):
		return Watch[K]{mistake: errors.New("a function that maps or chooses events is nil")}
	}
	register := func(m *mapper[K]) (replay func(cache.ObjectName), remove func()) {
		return informer.AddMapping(func(old, current T, replayed bool) (mapped bool) {
			e, ln := Event[T]{old, current}, laneChanges
			m.ifOpen(func() {
				if replayed {
					// Under the lock of m, so that the state is not older than one that has been mapped.
					ln = laneReplay
					if e.New, _ = informer.Get(cache.MetaObjectToName(current)); isNil(e.New) {
						return // the deletion is an event
					}
				}
				if mapped = !slices.ContainsFunc(only, func(keep func(Event[T]) bool) bool { return !keep(e) }); mapped {
					m.loop.enqueue(ln, keys(e)) // with Tenant of the keys
				}
			})
			return mapped
		})
	}
	return Watch[K]{cache: informer, list: informer.Objects, register: register, primary: primary}
}

// WatchOwner returns a watch of objects that others own: it maps a change of an object to the owner of that
// kind which controls it, before and after the change. owners is the informer of that kind, whose need says
// whether it has namespaces. The cache must hold the owner references: a need of the reduced form asks for
// them, and otherwise NewLoop returns an error.
func WatchOwner[T, O metav1.Object](
	informer *informers.Informer[T], owners *informers.Informer[O], kind schema.GroupKind,
) Watch[cache.ObjectName] {
	if owners == nil {
		return Watch[cache.ObjectName]{mistake: errors.New("the informer of the owners is nil")}
	}
	watch := WatchChanges(informer, func(e Event[T]) []cache.ObjectName { return ownersOf(e, kind, owners.ClusterScoped()) })
	if watch.mistake == nil && !informer.KeepsOwnerReferences() {
		watch.mistake = errors.New("WatchOwner needs owner references, but the controller's need has no Fields: OwnerReferences")
	}
	return watch
}

// ownersOf returns the owners of the kind that control the object, before and after the change.
func ownersOf[T metav1.Object](e Event[T], kind schema.GroupKind, clusterScoped bool) (owners []cache.ObjectName) {
	for _, obj := range []T{e.Old, e.New} {
		if isNil(obj) {
			continue
		}
		ref := metav1.GetControllerOfNoCopy(obj)
		if ref == nil || ref.Kind != kind.Kind {
			continue
		}
		name := cache.NewObjectName(obj.GetNamespace(), ref.Name)
		if clusterScoped {
			name.Namespace = ""
		}
		gv, err := schema.ParseGroupVersion(ref.APIVersion)
		if err == nil && gv.Group == kind.Group && !slices.Contains(owners, name) {
			owners = append(owners, name)
		}
	}
	return owners
}

// GenerationChanged is for [WatchSelf] and [WatchMapped]. It leaves out updates that change nothing but the
// metadata or the status of an object, such as the controller's own writes to it, finalizers included. It
// keeps all events of objects that have no generation, as of ConfigMaps and in the reduced form, and of whole
// objects that are read as metav1.Object.
func GenerationChanged[T metav1.Object](e Event[T]) bool {
	before, after := e.Old, e.New
	if isNil(before) || isNil(after) {
		return true
	}
	if _, reduced := any(after).(*informers.Object); reduced {
		return true // other controllers' needs decide whether it has a generation
	}
	// A deletion and a creation that the watch has missed are one update.
	return after.GetGeneration() == 0 || before.GetGeneration() != after.GetGeneration() || before.GetUID() != after.GetUID()
}

// isNil reports whether an event lacks the object: T is a pointer or an interface.
func isNil[T metav1.Object](obj T) bool {
	v := reflect.ValueOf(obj)
	return !v.IsValid() || v.IsNil()
}

// objectOf returns the changed object.
func objectOf[T metav1.Object](e Event[T]) T {
	if isNil(e.New) {
		return e.Old
	}
	return e.New
}
