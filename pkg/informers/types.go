// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/internal/gotype"
)

// checkType returns an error if the controller cannot have the objects of the resource that it asks for as
// type t.
func (n *Need) checkType(asked schema.GroupVersionResource, t reflect.Type, scheme *runtime.Scheme) error {
	name := resourceName(n.Resource)
	if reflect.TypeFor[*Object]().AssignableTo(t) {
		return nil
	}
	form := Typed
	if t == reflect.TypeFor[*unstructured.Unstructured]() {
		form = Unstructured
	}
	switch {
	case n.Form != form:
		return fmt.Errorf("asks for %s as %s, but its need has another Form than informers.%s", name, t, form)
	case asked != n.Resource:
		return fmt.Errorf("asks for version %q of %s, but needs version %q", asked.Version, name, n.Resource.Version)
	case form == Unstructured:
		return nil
	}
	if err := gotype.Check(t, n.Resource, scheme); err != nil {
		return fmt.Errorf("asks for %s as %s, %w", name, t, err)
	}
	return nil
}
