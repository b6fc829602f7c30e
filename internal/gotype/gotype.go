// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gotype checks the Go types with which controllers ask for objects, and configures clients of them.
package gotype

import (
	"errors"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// Check returns an error if t is not a pointer to the Go type of the resource. The error continues a
// sentence that ends with t.
func Check(t reflect.Type, resource schema.GroupVersionResource, scheme *runtime.Scheme) error {
	if t.Kind() != reflect.Pointer {
		return errors.New("which is not a pointer to a Go type")
	}
	object, ok := reflect.New(t.Elem()).Interface().(runtime.Object)
	if !ok {
		return errors.New("which is not a runtime.Object")
	}
	kinds, _, err := scheme.ObjectKinds(object)
	if err != nil {
		return errors.New("which AddToScheme has not added to the scheme")
	}
	for _, kind := range kinds {
		list := kind.GroupVersion().WithKind(kind.Kind + "List")
		switch {
		case kind.GroupVersion() != resource.GroupVersion():
		case !scheme.Recognizes(list):
			return fmt.Errorf("but AddToScheme has not added %s to the scheme", list.Kind)
		case otherKind(scheme, kind, resource) != "":
			return fmt.Errorf("but these are of the kind %s", otherKind(scheme, kind, resource))
		default:
			return nil
		}
	}
	return fmt.Errorf("but that is a type of %s, not of %s", kinds[0].GroupVersion(), resource.GroupVersion())
}

// ClientConfig returns config for the client of a version of the API.
func ClientConfig(config *rest.Config, version schema.GroupVersion, codecs runtime.NegotiatedSerializer) *rest.Config {
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion, config.NegotiatedSerializer = "/apis", &version, codecs
	if version.Group == "" {
		config.APIPath = "/api"
	}
	return config
}

// otherKind returns the kind of the resource if it is not kind, otherwise "". A scheme does not hold
// resources, so otherKind compares the usual plurals: another kind is returned if its plural is the
// resource's name and the plural of kind is not.
func otherKind(scheme *runtime.Scheme, kind schema.GroupVersionKind, resource schema.GroupVersionResource) string {
	matches := func(kind schema.GroupVersionKind) bool {
		plural, singular := meta.UnsafeGuessKindToResource(kind)
		return plural == resource || singular == resource
	}
	if matches(kind) {
		return ""
	}
	for name := range scheme.KnownTypes(resource.GroupVersion()) {
		if matches(resource.GroupVersion().WithKind(name)) {
			return name
		}
	}
	return ""
}
