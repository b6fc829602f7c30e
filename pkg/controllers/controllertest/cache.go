// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllertest holds fixtures for tests of controllers: stand-ins for the caches and for
// the API server's resourceVersions.
package controllertest

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Entry is an object as a shared cache keeps it: without its content.
type Entry struct {
	metav1.ObjectMeta
	digests map[string][]byte
}

// Digest returns what the digest function of the named controller returned.
func (e *Entry) Digest(of string) []byte { return e.digests[of] }

// Reduce returns a transform that makes an Entry of an object. It keeps the named annotations and
// the digest of the named controller.
func Reduce(name string, annotations []string, digest func(runtime.Object) []byte) cache.TransformFunc {
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
		return &Entry{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(), ResourceVersion: m.GetResourceVersion(), Annotations: kept,
			},
			digests: map[string][]byte{name: digest(obj.(runtime.Object))},
		}, nil
	}
}
