// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"maps"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// Informer returns the informer of the resource for the named controller. The version of gvr does
// not matter. It returns false if the controller does not need the resource.
func (f *Factory) Informer(controller string, gvr schema.GroupVersionResource) (cache.SharedIndexInformer, bool) {
	i := f.of(controller, gvr.GroupResource())
	if i == nil {
		return nil, false
	}
	c := &controllerInformer{informer: i, controller: controller, scheme: f.clients.scheme}
	c.objects = convertingIndexer{i: i, whole: i.plan.need(controller).whole()}
	return c, true
}

// controllerInformer is an informer as one controller gets it.
type controllerInformer struct {
	cache.SharedIndexInformer // nil
	informer                  *informer
	objects                   convertingIndexer
	controller                string
	scheme                    *runtime.Scheme
}

func (i *controllerInformer) need() Need { return *i.informer.plan.need(i.controller) }

// SetTransform always returns an error, since the needs decide what is cached.
func (i *controllerInformer) SetTransform(cache.TransformFunc) error {
	return errors.New("an informer's transform follows from the declared needs")
}

func (i *controllerInformer) GetStore() cache.Store     { return i.objects }
func (i *controllerInformer) GetIndexer() cache.Indexer { return i.objects }
func (i *controllerInformer) HasSynced() bool           { return i.informer.hasSynced() }
func (i *controllerInformer) HasSyncedChecker() cache.DoneChecker {
	return i
}
func (i *controllerInformer) Name() string          { return i.informer.name }
func (i *controllerInformer) Done() <-chan struct{} { return i.informer.synced }

func (i *controllerInformer) AddIndexers(indexers cache.Indexers) error {
	indexers = maps.Clone(indexers)
	if _, ok := i.informer.objects.GetIndexers()[cache.NamespaceIndex]; ok {
		delete(indexers, cache.NamespaceIndex)
	}
	for name, index := range indexers {
		indexers[name] = func(obj any) (values []string, _ error) {
			m, _ := meta.Accessor(obj)
			i.informer.panics.contain(i.controller, "index "+name, m, func() {
				var err error
				if values, err = index(i.objects.convert(obj)); err != nil {
					panic(err)
				}
			})
			return values, nil
		}
	}
	return i.informer.objects.AddIndexers(indexers)
}

func (i *controllerInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	i.informer.listen(i.controller, func(e event) {
		switch {
		case e.old == nil:
			h.OnAdd(i.objects.convert(e.new), e.initial)
		case e.new == nil:
			h.OnDelete(i.objects.convert(e.old))
		default:
			h.OnUpdate(i.objects.convert(e.old), i.objects.convert(e.new))
		}
	})
	return nil, nil
}

type convertingIndexer struct {
	cache.Indexer // nil
	i             *informer
	whole         bool
}

func (x convertingIndexer) convert(obj any) any {
	if o := obj.(*Object); x.whole {
		return o.rest.Object
	}
	return obj
}

func (x convertingIndexer) all(list []any) []any {
	for n := range list {
		list[n] = x.convert(list[n])
	}
	return list
}

func (x convertingIndexer) Get(obj any) (any, bool, error) {
	m := obj.(metav1.Object)
	return x.GetByKey(cache.MetaObjectToName(m).String())
}

func (x convertingIndexer) GetByKey(key string) (any, bool, error) {
	if o := x.i.get(key); o != nil {
		return x.convert(o), true, nil
	}
	return nil, false, nil
}
func (x convertingIndexer) List() []any                 { return x.all(x.i.objects.List()) }
func (x convertingIndexer) ListKeys() []string          { return x.i.objects.ListKeys() }
func (x convertingIndexer) GetIndexers() cache.Indexers { return x.i.objects.GetIndexers() }
func (x convertingIndexer) IndexKeys(index, value string) ([]string, error) {
	return x.i.objects.IndexKeys(index, value)
}
func (x convertingIndexer) ByIndex(index, value string) ([]any, error) {
	list, err := x.i.objects.ByIndex(index, value)
	return x.all(list), err
}
