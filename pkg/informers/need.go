// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Resources that the manager's own controllers use. A need may name any other resource just as
// well.
var (
	ConfigMaps   = corev1.SchemeGroupVersion.WithResource("configmaps")
	Secrets      = corev1.SchemeGroupVersion.WithResource("secrets")
	Namespaces   = corev1.SchemeGroupVersion.WithResource("namespaces")
	Deployments  = appsv1.SchemeGroupVersion.WithResource("deployments")
	StatefulSets = appsv1.SchemeGroupVersion.WithResource("statefulsets")
	DaemonSets   = appsv1.SchemeGroupVersion.WithResource("daemonsets")
	CronJobs     = batchv1.SchemeGroupVersion.WithResource("cronjobs")
	Jobs         = batchv1.SchemeGroupVersion.WithResource("jobs")
)

// Form is how much of an object the cache must hold for a controller.
type Form int

const (
	// Reduced is an *Object: identity, declared annotations and fields, digests. It is the zero
	// value.
	Reduced Form = iota
	// Typed is the ordinary API type.
	Typed
	// Unstructured is an *unstructured.Unstructured, for custom resources without a Go type. It is
	// sent as JSON and takes several times the memory, so types of the scheme cannot be had in this
	// form.
	Unstructured
)

// Fields are parts of the metadata that a Reduced need may ask for. Name, namespace, UID,
// resourceVersion and, if it is set, deletionTimestamp are always cached.
type Fields uint8

// Fields that are cached only if a need asks for them.
const (
	Labels Fields = 1 << iota
	OwnerReferences
	CreationTimestamp
)

// Need is what one controller needs of one resource. What no need names is not cached.
//
// If several controllers need a resource, each gets the union. A controller that asked for the
// Reduced form must use what it gets as a metav1.Object. That is an *Object, unless another
// controller needs another form of the resource; in that case it has no digests but the content
// itself.
type Need struct {
	// For is the name of the controller, and of its digest, see Object.Digest. The host fills it
	// in.
	For string
	// Resource to watch. A need of metadata may leave the version out, for custom resources.
	// Discovery then finds it, and finds it again when it changes.
	Resource schema.GroupVersionResource
	// ClusterScoped says that the resource has no namespaces. With --namespaces, such a need is an
	// error.
	ClusterScoped bool
	Form          Form
	// Annotations are the keys to keep. Forms other than Reduced keep all.
	Annotations []string
	// MaxAnnotation, if set, is how long a value may be to be kept whole, in bytes. Of a longer one that no
	// other need wants, one byte more is kept: it is too long, and says so. Forms other than Reduced keep all.
	MaxAnnotation int
	// Fields to keep beyond the annotations.
	Fields Fields
	// When, if set, restricts Fields and Annotations of this need to the objects for which it
	// returns true. It is called with the object's whole metadata.
	When func(metav1.Object) bool
	// Digest returns a few bytes that summarise an object, such as a hash of a Secret's data or the
	// names that a pod template refers to. In the Reduced form, nothing else of the content is
	// kept. nil means no digest. It is called with the Go type if the scheme has one, otherwise
	// with an *unstructured.Unstructured. It must be pure and must not keep any part of its
	// argument.
	Digest func(runtime.Object) []byte
	// History says that the controller needs to know when this digest changed, see
	// Object.ChangedVersion. Digests of needs without it do not count there.
	History bool
	// SecretTypes are types that this need wants although they are excluded by default, see
	// ExcludedSecretTypes.
	SecretTypes []corev1.SecretType
	// Shared says that the need has no Resource of its own, and is part of each resource that another
	// controller needs. Its controller follows resources at run time, see Factory.Follow, and gets
	// those from the informers that are there.
	Shared bool
	// Optional says that the resource may be missing. As long as the server does not have it, it
	// counts as empty and synced.
	Optional bool
}

// ExcludedSecretTypes are not requested from the server unless a need names them: Helm's releases
// hold whole manifests, and service account tokens change by themselves.
var ExcludedSecretTypes = []corev1.SecretType{"helm.sh/release.v1", corev1.SecretTypeServiceAccountToken}

func (n *Need) validate() error {
	isSource := n.Resource == ConfigMaps || n.Resource == Secrets
	switch {
	case n.For == "":
		return errors.New("need without a controller's name")
	case n.Shared && (n.Resource.Resource != "" || n.Form != Reduced || n.Digest != nil):
		return errors.New("a shared need is of metadata and names no resource")
	case n.Resource.Resource == "" && !n.Shared:
		return errors.New("need without resource")
	case n.Shared:
		return nil
	case n.Resource.Version == "" && (n.Form != Reduced || n.Digest != nil):
		return errors.New("only a need of metadata can do without a version")
	case n.Form != Reduced && isSource:
		return errors.New("ConfigMaps and Secrets are cached in reduced form only; read their data live")
	case n.Digest != nil && n.Form != Reduced:
		return errors.New("only the reduced form has a digest")
	case len(n.SecretTypes) > 0 && n.Resource != Secrets:
		return errors.New("only Secrets have Secret types")
	case slices.Contains(n.Annotations, corev1.LastAppliedConfigAnnotation):
		return errors.New(corev1.LastAppliedConfigAnnotation + " is never cached: that of a Secret holds its data")
	}
	return nil
}

// plan is the union of all needs of one resource.
type plan struct {
	resource schema.GroupVersionResource
	needs    []Need
	// whole is set if a need wants the Go type or an unstructured object.
	whole, unstructured bool
	// digests are in the order in which objects hold them.
	digests       []digest
	fieldSelector string
	// selective is set if nothing is kept of objects for which When of the only need returns false.
	selective     bool
	optional      bool
	clusterScoped bool
}

type digest struct {
	of      string
	sum     func(runtime.Object) []byte
	history bool
}

// newPlans unites needs by resource, in the order in which resources are first named.
func newPlans(needs []Need) ([]*plan, error) {
	var plans []*plan
	for i := range needs {
		n := &needs[i]
		if err := n.validate(); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", n.For, resourceName(n.Resource), err)
		}
		if n.Shared {
			continue
		}
		at := slices.IndexFunc(plans, func(p *plan) bool { return p.resource.GroupResource() == n.Resource.GroupResource() })
		if at < 0 {
			plans = append(plans, &plan{resource: n.Resource, optional: true})
			at = len(plans) - 1
		}
		if err := plans[at].add(*n); err != nil {
			return nil, err
		}
	}
	for _, p := range plans {
		for _, n := range needs {
			if n.Shared && !slices.Contains(p.controllers(), n.For) {
				n.Optional = p.optional
				if err := p.add(n); err != nil {
					return nil, err
				}
			}
		}
		p.fieldSelector = p.secretTypeSelector()
	}
	return plans, nil
}

func (p *plan) add(n Need) error {
	for _, other := range p.needs {
		if other.For == n.For {
			return fmt.Errorf("%s declares %s twice", n.For, resourceName(n.Resource))
		}
	}
	if p.resource.Version == "" {
		p.resource.Version = n.Resource.Version
	}
	if n.Resource.Version != "" && n.Resource.Version != p.resource.Version {
		return fmt.Errorf("%s needs version %s of %s, another controller %s",
			n.For, n.Resource.Version, resourceName(n.Resource), p.resource.Version)
	}
	p.needs = append(p.needs, n)
	if n.Form != Reduced {
		if p.whole && p.unstructured != (n.Form == Unstructured) {
			return fmt.Errorf("%s needs %s in another form than another controller", n.For, resourceName(n.Resource))
		}
		p.whole, p.unstructured = true, n.Form == Unstructured
	}
	p.clusterScoped = p.clusterScoped || n.ClusterScoped
	if n.Digest != nil {
		p.digests = append(p.digests, digest{of: n.For, sum: n.Digest, history: n.History})
	}
	p.optional = p.optional && n.Optional
	return nil
}

func (p *plan) secretTypeSelector() string {
	if p.resource != Secrets {
		return ""
	}
	var terms []string
	for _, t := range ExcludedSecretTypes {
		if !slices.ContainsFunc(p.needs, func(n Need) bool { return slices.Contains(n.SecretTypes, t) }) {
			terms = append(terms, "type!="+string(t))
		}
	}
	return strings.Join(terms, ",")
}

// form returns the name of the plan's form for people.
func (p *plan) form() string {
	switch {
	case p.unstructured:
		return "unstructured"
	case p.whole:
		return "typed"
	case len(p.digests) > 0:
		return "content digest"
	}
	return "metadata"
}

func (p *plan) controllers() []string {
	names := make([]string, 0, len(p.needs))
	for _, n := range p.needs {
		names = append(names, n.For)
	}
	return names
}

// resourceName returns "secrets" or "deployments.apps", as kubectl shows it.
func resourceName(gvr schema.GroupVersionResource) string {
	return gvr.GroupResource().String()
}
