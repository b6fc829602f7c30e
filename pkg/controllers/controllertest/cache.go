// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllertest holds fixtures for tests of controllers: what stands
// in for the caches and for the API server's bookkeeping.
package controllertest

import (
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Entry is a ConfigMap or Secret as a shared cache keeps it: without its data.
type Entry struct {
	metav1.ObjectMeta
	digests map[string][]byte
}

// Digest returns what the digest function of one controller returned.
func (e *Entry) Digest(of string) []byte { return e.digests[of] }

// Reduce returns a transform that makes an Entry of a source, with a digest for
// one controller and the annotations it declared.
func Reduce(name string, annotations []string, digest func(runtime.Object) []byte) cache.TransformFunc {
	return func(obj any) (any, error) {
		if _, done := obj.(*Entry); done {
			return obj, nil
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return obj, nil // a tombstone
		}
		return &Entry{
			ObjectMeta: trimMeta(m, annotations),
			digests:    map[string][]byte{name: digest(obj.(runtime.Object))},
		}, nil
	}
}

func trimMeta(m metav1.Object, annotations []string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(), ResourceVersion: m.GetResourceVersion(),
		OwnerReferences: m.GetOwnerReferences(), Annotations: only(m.GetAnnotations(), annotations),
	}
}

func only(all map[string]string, keys []string) map[string]string {
	kept := maps.Clone(all)
	maps.DeleteFunc(kept, func(key, _ string) bool { return !slices.Contains(keys, key) })
	return kept
}
