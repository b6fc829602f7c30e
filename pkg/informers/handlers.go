// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// controllerInformer is the shared informer as one controller gets it. Panics in the controller's
// functions are contained, and it cannot change what other controllers see.
type controllerInformer struct {
	cache.SharedIndexInformer
	resource   *resource
	controller string
	scheme     *runtime.Scheme
}

// SetTransform always returns an error, since the needs decide what is cached.
func (i *controllerInformer) SetTransform(cache.TransformFunc) error {
	return errors.New("a shared informer's transform follows from the declared needs")
}

// SetWatchErrorHandler refuses: the host reports the failures of the shared watch.
func (i *controllerInformer) SetWatchErrorHandler(cache.WatchErrorHandler) error {
	return errors.New("a shared informer's watch errors are reported by the host")
}

// SetWatchErrorHandlerWithContext refuses as SetWatchErrorHandler does.
func (i *controllerInformer) SetWatchErrorHandlerWithContext(cache.WatchErrorHandlerWithContext) error {
	return i.SetWatchErrorHandler(nil)
}

// AddIndexers is client-go's, with two differences: several controllers may add the index by
// namespace, and an object on which an index function panics is left out of that index.
func (i *controllerInformer) AddIndexers(indexers cache.Indexers) error {
	i.resource.indexing.Lock()
	defer i.resource.indexing.Unlock()
	indexers = maps.Clone(indexers)
	if _, ok := i.GetIndexer().GetIndexers()[cache.NamespaceIndex]; ok {
		delete(indexers, cache.NamespaceIndex)
	}
	for name, index := range indexers {
		indexers[name] = func(obj any) (values []string, err error) {
			// client-go panics on an error, in the goroutine that fills the cache.
			i.contained("index "+name, obj, func() {
				if values, err = index(obj); err != nil {
					panic(err)
				}
			})
			return values, nil
		}
	}
	return i.SharedIndexInformer.AddIndexers(indexers)
}

func (i *controllerInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{})
}

func (i *controllerInformer) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, period time.Duration) (
	cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{ResyncPeriod: &period})
}

// AddEventHandlerWithOptions is client-go's, except that it contains panics. An event on which h
// panics is lost; the watch of a controllers.Loop tries it again.
func (i *controllerInformer) AddEventHandlerWithOptions(h cache.ResourceEventHandler, opts cache.HandlerOptions) (
	cache.ResourceEventHandlerRegistration, error) {
	return i.SharedIndexInformer.AddEventHandlerWithOptions(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, initial bool) {
			i.contained(eventHandler, obj, func() { h.OnAdd(obj, initial) })
		},
		UpdateFunc: func(old, obj any) { i.contained(eventHandler, obj, func() { h.OnUpdate(old, obj) }) },
		DeleteFunc: func(obj any) { i.contained(eventHandler, obj, func() { h.OnDelete(obj) }) },
	}, opts)
}

func (i *controllerInformer) contained(function string, obj any, call func()) {
	if tombstone, missed := obj.(cache.DeletedFinalStateUnknown); missed {
		obj = tombstone.Obj
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		m = &metav1.ObjectMeta{} // for what is not an object
	}
	defer func() { i.resource.panics.contain(recover(), i.controller, function, m) }()
	call()
}
