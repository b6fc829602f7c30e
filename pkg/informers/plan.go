// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

// plan is the union of the needs that one informer serves.
type plan struct {
	resource schema.GroupVersionResource
	needs    []Need
	// decodedAs is what the API server's answer is decoded as: Metadata, Typed or Unstructured.
	decodedAs Form
	// whole is set if a need wants the object itself.
	whole bool
	// digests are in the order in which objects hold them.
	digests                                 []digest
	namespace, labelSelector, fieldSelector string
	clusterScoped, optional                 bool
	// goType is the reflect.Type that a controller or its Digest takes; unset if all take what any object is.
	goType atomic.Value
}

type digest struct {
	controller string
	sum        func(runtime.Object) []byte
	history    bool
}

// newPlans unites needs, in the order in which resources are first named.
func newPlans(needs []Need, scheme *runtime.Scheme, namespaces []string) ([]*plan, error) {
	var plans []*plan
	for i, n := range needs {
		err := n.validate(scheme, namespaces)
		if err == nil && slices.ContainsFunc(needs[:i], func(other Need) bool {
			return other.controller == n.controller && other.Resource.GroupResource() == n.Resource.GroupResource()
		}) {
			err = errors.New("declared twice; use informers.Follow for other objects of the resource")
		}
		if err == nil && n.Digest.exists() {
			err = n.Digest.check(&n, scheme)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", n.controller, resourceName(n.Resource), err)
		}
		index := slices.IndexFunc(plans, func(p *plan) bool { return p.canServe(n, n.decodedAs(scheme)) })
		if index < 0 {
			plans = append(plans, &plan{
				resource: n.Resource, clusterScoped: n.ClusterScoped, optional: n.Optional, decodedAs: Metadata,
				namespace: n.Namespace, labelSelector: n.LabelSelector, fieldSelector: n.FieldSelector,
			})
			index = len(plans) - 1
		}
		plans[index].add(n, n.decodedAs(scheme))
	}
	return plans, nil
}

// canServe reports whether p can take n without costing another need objects or history.
func (p *plan) canServe(n Need, decodedAs Form) bool {
	switch {
	case p.resource != n.Resource, p.clusterScoped != n.ClusterScoped, p.optional != n.Optional:
		return false
	case p.namespace != n.Namespace, p.labelSelector != n.LabelSelector, p.fieldSelector != n.FieldSelector:
		return false
	case n.Filter != nil, p.needs[0].Filter != nil:
		return false
	case n.History && slices.ContainsFunc(p.digests, func(d digest) bool { return d.history }):
		return false // an object has room for one history
	case p.decodedAs == decodedAs:
		return true
	}
	// Metadata fits every object; a Go type may not fit an object of a custom resource.
	typed := p.decodedAs == Typed || decodedAs == Typed
	builtIn := clientscheme.Scheme.IsVersionRegistered(n.Resource.GroupVersion())
	return (p.decodedAs == Metadata || decodedAs == Metadata) && (!typed || builtIn)
}

func (p *plan) add(n Need, decodedAs Form) {
	p.needs = append(p.needs, n)
	p.decodedAs = max(p.decodedAs, decodedAs)
	p.whole = p.whole || n.whole()
	if n.Digest.exists() {
		p.digests = append(p.digests, digest{controller: n.controller, sum: n.Digest.sum, history: n.History})
		p.expect(n.Digest.argument)
	}
}

// expect makes objects of another Go type than t misfits: a server may send any that the scheme has.
func (p *plan) expect(t reflect.Type) {
	if t.Kind() == reflect.Pointer && t != reflect.TypeFor[*Object]() {
		p.goType.Store(t)
	}
}

// form returns the name of the plan's form for people.
func (p *plan) form() string {
	switch {
	case p.whole:
		return strings.ToLower(p.decodedAs.String())
	case p.decodedAs != Metadata:
		return "content digest"
	}
	return "metadata"
}

// need returns what the named controller needs, or nil.
func (p *plan) need(controller string) *Need {
	index := slices.IndexFunc(p.needs, func(n Need) bool { return n.controller == controller })
	if index < 0 {
		return nil
	}
	return &p.needs[index]
}

func (p *plan) controllers() []string {
	names := make([]string, 0, len(p.needs))
	for _, n := range p.needs {
		names = append(names, n.controller)
	}
	return names
}

// selects reports whether a change of an object can make the plan's selectors choose it. NotHelm does not
// count, since the type of a Secret never changes.
func (p *plan) selects() bool {
	return p.labelSelector != "" || p.fieldSelector != "" && p.fieldSelector != NotHelm
}

// content returns the controllers that hold the data of ConfigMaps or Secrets.
func (p *plan) content() (names []string) {
	for _, n := range p.needs {
		if n.Content {
			names = append(names, n.controller)
		}
	}
	return names
}
