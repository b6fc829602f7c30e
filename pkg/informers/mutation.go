// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// mutationCheckPeriod is how often all checksums are compared.
const mutationCheckPeriod = 10 * time.Second

// mutationDetector finds cached objects that have been changed. It compares them with checksums
// that were taken before they went into the cache. client-go has a detector of its own
// (KUBE_CACHE_MUTATION_DETECTOR), which copies every object and panics.
type mutationDetector struct {
	clock clock.WithTicker
	seed  maphash.Seed

	mu      sync.Mutex
	watched []*watchedStore
	found   int64
	first   error
}

// watchedStore holds the checksums of one cache.
type watchedStore struct {
	resource string
	store    cache.Store

	mu sync.Mutex
	// fresh holds objects that may not have reached the store yet. They are kept for one round.
	fresh, settled map[runtime.Object]uint64
}

func newMutationDetector(c clock.WithTicker) *mutationDetector {
	return &mutationDetector{clock: c, seed: maphash.MakeSeed()}
}

// watch returns a function that must be called with every object that goes into store.
func (d *mutationDetector) watch(resource string, store cache.Store) func(runtime.Object) {
	w := &watchedStore{resource: resource, store: store,
		fresh: map[runtime.Object]uint64{}, settled: map[runtime.Object]uint64{}}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watched = append(d.watched, w)
	return func(obj runtime.Object) {
		sum := d.checksum(obj)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fresh[obj] = sum
	}
}

// run checks every mutationCheckPeriod, and once more when ctx ends, so that the last changes count
// too.
func (d *mutationDetector) run(ctx context.Context) {
	ticker := d.clock.NewTicker(mutationCheckPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			d.check(ctx)
			return
		case <-ticker.C():
			d.check(ctx)
		}
	}
}

// check compares all checksums. An object that has left the store is compared once more and then
// forgotten.
func (d *mutationDetector) check(ctx context.Context) {
	d.mu.Lock()
	watched := slices.Clone(d.watched)
	d.mu.Unlock()
	for _, w := range watched {
		w.mu.Lock()
		for _, sums := range []map[runtime.Object]uint64{w.fresh, w.settled} {
			for obj, sum := range sums {
				if now := d.checksum(obj); now != sum {
					sums[obj] = now // so that it is reported once
					d.report(ctx, w.resource, obj)
				}
			}
		}
		maps.DeleteFunc(w.settled, func(obj runtime.Object, _ uint64) bool { return !holds(w.store, obj) })
		maps.Copy(w.settled, w.fresh)
		clear(w.fresh)
		w.mu.Unlock()
	}
}

func holds(store cache.Store, obj runtime.Object) bool {
	stored, ok, err := store.Get(obj)
	return err == nil && ok && stored == any(obj)
}

func (d *mutationDetector) report(ctx context.Context, resource string, obj runtime.Object) {
	var ref klog.ObjectRef
	if m, err := meta.Accessor(obj); err == nil {
		ref = klog.KRef(m.GetNamespace(), m.GetName())
	}
	err := fmt.Errorf("%s %s was changed in the cache", resource, ref)
	klog.FromContext(ctx).Error(nil, "A controller changed an object in the cache", "resource", resource, "object", ref)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.found++
	if d.first == nil {
		d.first = err
	}
}

func (d *mutationDetector) err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.first == nil {
		return nil
	}
	if d.found == 1 {
		return d.first
	}
	return errors.Join(d.first, fmt.Errorf("and %d more", d.found-1))
}

func (d *mutationDetector) count() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.found
}

// checksum covers everything that a reader could change. API types are encoded, with sorted keys.
// Of an Object, only the maps, slices and pointers that it returns can be changed.
func (d *mutationDetector) checksum(obj runtime.Object) uint64 {
	var h maphash.Hash
	h.SetSeed(d.seed)
	switch o := obj.(type) {
	case *Object:
		if o.extra != nil {
			m := metav1.ObjectMeta{Annotations: o.extra.annotations, Labels: o.extra.labels,
				OwnerReferences: o.extra.owners, DeletionTimestamp: o.extra.deleted}
			hashEncoded(&h, &m)
		}
	case marshaler:
		hashEncoded(&h, o)
	default: // a custom resource, typed or not
		if b, err := json.Marshal(o); err == nil {
			_, _ = h.Write(b)
		}
	}
	return h.Sum64()
}

type marshaler interface{ Marshal() ([]byte, error) }

func hashEncoded(h *maphash.Hash, m marshaler) {
	if b, err := m.Marshal(); err == nil {
		_, _ = h.Write(b)
	}
}
