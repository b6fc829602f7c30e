// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/gotype"
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

// Form is how much of an object the cache must hold for a controller. A plan for two needs decodes objects in
// the later of their forms.
type Form int

const (
	// Reduced is an *Object: identity, declared annotations and fields, a digest of the content. It is
	// the zero value.
	Reduced Form = iota
	// Metadata is Reduced, except that the digest is one of the metadata, so that the API server sends
	// no content.
	Metadata
	// Typed is the ordinary API type.
	Typed
	// Unstructured is an *unstructured.Unstructured, for custom resources without a Go type. It is
	// sent as JSON and takes several times the memory.
	Unstructured
)

// String returns the name of the constant.
func (f Form) String() string {
	return [...]string{"Reduced", "Metadata", "Typed", "Unstructured"}[f]
}

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
// A controller has one need of a resource; what else it reads of the resource, it follows. Needs of several
// controllers share an informer if they select the same objects of a resource, in the same version and form.
// Each controller then gets at least what it declared. Otherwise each need has an informer of its own.
type Need struct {
	// Resource to watch. A need of metadata may leave the version out, for custom resources. Discovery then
	// finds the version, and finds it again when it changes.
	Resource schema.GroupVersionResource
	// ClusterScoped says that the resource has no namespaces. With --namespaces, such a need is an error unless
	// Entry.NamespacePermissions has a rule for the resource under the empty name.
	ClusterScoped bool
	// Namespace, LabelSelector and FieldSelector, if set, restrict the need to the objects that they
	// choose. They are sent to the API server, so FieldSelector may use the fields that it supports.
	Namespace, LabelSelector, FieldSelector string
	Form                                    Form
	// Content confirms a need of ConfigMaps or Secrets in the form Typed or Unstructured: the memory of every
	// replica then holds the data of all objects that the need chooses. It is an error without a selector or a
	// namespace.
	Content bool
	// Annotations are the keys to keep. Typed and Unstructured keep all.
	Annotations []string
	// MaxAnnotation, if set, is how long a value may be to be kept whole, in bytes. A longer value that no
	// other need wants is cut to one byte more, which shows that it is too long.
	MaxAnnotation int
	// Fields to keep beyond the annotations.
	Fields Fields
	// Filter, if set, restricts the need to the objects for which it returns true. It is called with what the
	// API server's answer is decoded as, like Digest: the whole metadata, and more if the need reads more. A
	// need with Filter has an informer of its own.
	Filter func(metav1.Object) bool
	// Digest, if set, summarises the objects. In the Reduced form, nothing else of the content is kept.
	Digest Digest
	// History says that the controller needs to know when this digest changed, see
	// Object.ChangedVersion.
	History bool
	// Optional says that the resource may be missing. If the server does not have it in any version, it
	// counts as empty and synced.
	Optional bool

	controller string // see CacheConfig.Declare
}

// NotHelm is a FieldSelector of Secrets that leaves out Helm's releases, which hold whole manifests. The
// manager's own controllers have it, so that a need with it shares their watch.
const NotHelm = "type!=helm.sh/release.v1"

// validate returns what is wrong with the need. namespaces are those of --namespaces; empty means all.
func (n *Need) validate(scheme *runtime.Scheme, namespaces []string) error {
	_, labelErr := labels.Parse(n.LabelSelector)
	_, fieldErr := fields.ParseSelector(n.FieldSelector)
	// The metadata client puts both into paths as they are.
	problems := append(rest.IsValidPathSegmentName(n.Namespace), rest.IsValidPathSegmentName(n.Resource.Resource)...)
	switch {
	case n.controller == "":
		return errors.New("need without a controller's name")
	case n.Resource.Resource == "":
		return errors.New("need without resource")
	case len(problems) > 0:
		return fmt.Errorf("the namespace %q or the resource %s", n.Namespace, problems[0])
	case labelErr != nil:
		return fmt.Errorf("label selector: %w", labelErr)
	case fieldErr != nil:
		return fmt.Errorf("field selector: %w", fieldErr)
	case n.ClusterScoped && n.Namespace != "":
		return errors.New("ClusterScoped and Namespace must not both be set")
	case n.Namespace != "" && len(namespaces) > 0 && !slices.Contains(namespaces, n.Namespace):
		return fmt.Errorf("the namespace %s is not in --namespaces", n.Namespace)
	case n.Resource.Version == "" && (n.whole() || n.Form == Reduced && n.Digest.exists()):
		return errors.New("Resource.Version must be set in the forms Typed and Unstructured, and with a Digest")
	case n.Form == Typed && !scheme.IsVersionRegistered(n.Resource.GroupVersion()):
		return fmt.Errorf("the scheme has no types of %s, so it cannot be had in typed form", n.Resource.GroupVersion())
	case n.History && !n.Digest.exists():
		return errors.New("the need has History, but no Digest")
	case slices.Contains(n.Annotations, corev1.LastAppliedConfigAnnotation):
		return errors.New(corev1.LastAppliedConfigAnnotation + " is never cached: that of a Secret holds its data")
	}
	return n.validateContent()
}

// validateContent returns an error if the need would cache the data of ConfigMaps or Secrets without Content,
// or of all objects.
func (n *Need) validateContent() error {
	resource := n.Resource.GroupResource()
	sensitive := n.whole() && (resource == ConfigMaps.GroupResource() || resource == Secrets.GroupResource())
	switch {
	case n.Content && !sensitive:
		return errors.New("only ConfigMaps and Secrets in the form Typed or Unstructured have Content")
	case sensitive && !n.Content:
		return errors.New("the data of ConfigMaps and Secrets are cached only if the need says Content: true; " +
			"read them live, or take a digest")
	case sensitive && n.Namespace == "" && n.LabelSelector == "" && (n.FieldSelector == "" || n.FieldSelector == NotHelm):
		return errors.New("the data of all ConfigMaps or Secrets are not cached; the need must have a selector or a namespace")
	}
	return nil
}

// whole reports whether the controller gets more than an *Object.
func (n *Need) whole() bool { return n.Form == Typed || n.Form == Unstructured }

// decodedAs returns the form in which the API server's answer is decoded.
func (n *Need) decodedAs(scheme *runtime.Scheme) Form {
	switch {
	case n.whole():
		return n.Form
	case n.Form == Metadata || !n.Digest.exists():
		return Metadata
	case n.Digest.argument == reflect.TypeFor[*unstructured.Unstructured](): // also if another entry adds Go types
		return Unstructured
	case scheme.IsVersionRegistered(n.Resource.GroupVersion()):
		return Typed
	}
	return Unstructured
}

// resourceName returns "secrets" or "deployments.apps", as kubectl shows it.
func resourceName(gvr schema.GroupVersionResource) string {
	return gvr.GroupResource().String()
}

// Digest turns an object into a few bytes that summarise it, such as a hash of a Secret's data or the names
// that a pod template refers to. It is built by [DigestOf]. The zero value is no digest.
type Digest struct {
	sum      func(runtime.Object) []byte
	argument reflect.Type // of sum
}

// DigestOf returns a Digest that calls sum. T is *unstructured.Unstructured, or the Go type of the objects if
// the scheme has types of their group and version, or metav1.Object for a need in the form Metadata. It may
// also be an interface that these have. sum must be pure and must not keep any part of its argument.
func DigestOf[T any](sum func(T) []byte) Digest {
	return Digest{func(obj runtime.Object) []byte { return sum(any(obj).(T)) }, reflect.TypeFor[T]()}
}

func (d Digest) exists() bool { return d.sum != nil }

// check returns an error if the objects of the need are decoded as another type than the digest takes.
func (d Digest) check(n *Need, scheme *runtime.Scheme) (err error) {
	decodedAs := n.decodedAs(scheme)
	takes := func(decoded reflect.Type) bool { return decoded.AssignableTo(d.argument) }
	switch {
	case decodedAs == Typed && d.argument.Kind() != reflect.Interface:
		err = gotype.Check(d.argument, n.Resource, scheme)
	case decodedAs == Unstructured && !takes(reflect.TypeFor[*unstructured.Unstructured]()):
		err = errors.New("but the objects are *unstructured.Unstructured")
	case decodedAs == Metadata && (d.argument.Kind() != reflect.Interface || !takes(reflect.TypeFor[*metav1.PartialObjectMetadata]())):
		// Another need may want the whole object.
		err = errors.New("but in the form Metadata that must be metav1.Object")
	}
	if err != nil {
		return fmt.Errorf("its Digest takes %s, %w", d.argument, err)
	}
	return nil
}

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
