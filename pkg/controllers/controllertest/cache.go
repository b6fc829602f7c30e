// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllertest holds fixtures for tests of controllers: stand-ins for the caches and for
// the API server's resourceVersions.
package controllertest

import (
	"bytes"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"
)

// Entry is an object as a shared cache keeps it: without its content.
type Entry struct {
	metav1.ObjectMeta
	digests                 map[string][]byte
	first, created, changed string
}

// Digest returns what the digest function of the named controller returned.
func (e *Entry) Digest(of string) []byte { return e.digests[of] }

// FirstVersion returns the resourceVersion with which the cache first saw the object.
func (e *Entry) FirstVersion() string { return e.first }

// CreatedVersion returns the resourceVersion with which the object was created; empty if it was there
// before the cache.
func (e *Entry) CreatedVersion() string { return e.created }

// ChangedVersion returns the resourceVersion with which the digest was last seen to change.
func (e *Entry) ChangedVersion() string { return e.changed }

// Reduce returns a transform that makes an Entry of an object. It keeps the named annotations and
// the digest of the named controller. What came with a later version than listed was created.
func Reduce(name string, annotations []string, digest func(runtime.Object) []byte, listed string) cache.TransformFunc {
	var mu sync.Mutex
	latest := map[types.UID]*Entry{}
	return func(obj any) (any, error) {
		if _, done := obj.(*Entry); done {
			return obj, nil
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return obj, nil // a tombstone
		}
		kept := maps.Clone(m.GetAnnotations())
		maps.DeleteFunc(kept, func(key, _ string) bool { return !slices.Contains(annotations, key) })
		e := &Entry{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(), ResourceVersion: m.GetResourceVersion(), Annotations: kept,
				DeletionTimestamp: m.GetDeletionTimestamp(),
			},
			digests: map[string][]byte{name: digest(obj.(runtime.Object))},
			first:   m.GetResourceVersion(),
		}
		if order, err := resourceversion.CompareResourceVersion(e.first, listed); err == nil && order > 0 {
			e.created = e.first
		}
		mu.Lock()
		defer mu.Unlock()
		if before := latest[e.UID]; before != nil {
			e.first, e.created, e.changed = before.first, before.created, before.changed
			switch was, is := before.digests[name], e.digests[name]; {
			case (was == nil) != (is == nil):
				e.created, e.changed = "", ""
			case !bytes.Equal(was, is):
				e.changed = e.ResourceVersion
			}
		}
		latest[e.UID] = e
		return e, nil
	}
}
