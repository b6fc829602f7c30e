// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package watchable has what package controllers asks of the informers of the cache, beyond what authors see.
package watchable

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Informer is an informer of the cache.
type Informer interface {
	// ContainPanics returns a function that calls the mapping of one watch for an object, and one that ends
	// this. If the mapping panics, that is counted, logged and a problem of the controller until a call for the
	// object succeeds, the object is gone, or the watch has ended.
	ContainPanics() (contain func(object metav1.Object, call func()), end func())
	// KeepsOwnerReferences reports whether the cache has them for this controller.
	KeepsOwnerReferences() bool
}
