// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// reduce turns what the client decoded into what the cache holds. It takes obj over.
func (p *plan) reduce(obj runtime.Object) (runtime.Object, error) {
	if e, ok := obj.(*Entry); ok {
		return e, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("reduce %T: %w", obj, err)
	}
	if p.whole {
		strip(m)
		return obj, nil
	}
	e := newEntry(p, m, obj)
	wipe(obj)
	return e, nil
}

// bookmark turns the object of a bookmark into what the reflector expects of it: the same type as all
// others, with a resourceVersion and perhaps the mark of the end of the initial events.
func (p *plan) bookmark(obj runtime.Object) (runtime.Object, error) {
	if p.whole {
		return obj, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("bookmark %T: %w", obj, err)
	}
	e := newEntry(p, m, nil)
	if a := m.GetAnnotations(); len(a) > 0 {
		if e.extra == nil {
			e.extra = &extra{}
		}
		e.extra.annotations = a
	}
	return e, nil
}

// strip removes what is never cached.
func strip(m metav1.Object) {
	m.SetManagedFields(nil)
	if a := m.GetAnnotations(); a != nil {
		delete(a, corev1.LastAppliedConfigAnnotation)
	}
}

// wipe overwrites the values of a Secret, which nobody else holds: the memory of the decoded object is
// free from now on, but may not be used again for long.
func wipe(obj runtime.Object) {
	if secret, ok := obj.(*corev1.Secret); ok {
		for _, value := range secret.Data {
			clear(value)
		}
	}
}
