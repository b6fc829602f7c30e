// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"reflect"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Digest makes of an object a few bytes that summarise it, such as a hash of a Secret's data or the names
// that a pod template refers to. It is built by [DigestOf]. The zero value is no digest.
type Digest struct {
	sum func(runtime.Object) []byte
	of  reflect.Type
}

// DigestOf returns a Digest that calls sum. T is the Go type of the objects if the scheme has one, otherwise
// *unstructured.Unstructured, and metav1.Object for a need in the form Metadata. It may also be an interface
// that these have. sum must be pure and must not keep any part of its argument.
func DigestOf[T any](sum func(T) []byte) Digest {
	return Digest{func(obj runtime.Object) []byte { return sum(any(obj).(T)) }, reflect.TypeFor[T]()}
}

func (d Digest) exists() bool { return d.sum != nil }

// fits returns an error if the objects of the need are decoded as another type than the digest takes.
func (d Digest) fits(n *Need, scheme *runtime.Scheme) (err error) {
	reads := n.reads(scheme)
	switch {
	case reads == Typed && d.of.Kind() != reflect.Interface:
		err = isTypeOf(d.of, n.Resource, scheme)
	case reads == Unstructured && !reflect.TypeFor[*unstructured.Unstructured]().AssignableTo(d.of):
		err = errors.New("but the objects are *unstructured.Unstructured")
	case reads == Metadata && (d.of.Kind() != reflect.Interface || !reflect.TypeFor[*metav1.PartialObjectMetadata]().AssignableTo(d.of)):
		// Another need may want the whole object.
		err = errors.New("but in the form Metadata that must be metav1.Object")
	}
	if err != nil {
		return fmt.Errorf("its Digest takes %s, %w", d.of, err)
	}
	return nil
}
