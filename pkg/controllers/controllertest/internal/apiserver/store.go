// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"
)

type object = unstructured.Unstructured

// key identifies an object in the store.
type key struct {
	group, kind     string
	namespace, name string
}

func keyOf(r *resource, namespace, name string) key { return key{r.Group, r.kind, namespace, name} }

// change is an entry of the log that watches read. before is nil for an addition.
type change struct {
	version       int
	at            time.Time
	key           key
	kind          watch.EventType
	before, after *object
}

// get returns the object, which must not be changed, or NotFound. The caller holds mu.
func (s *Server) get(r *resource, namespace, name string) (*object, error) {
	if obj, ok := s.objects[keyOf(r, namespace, name)]; ok {
		return inVersion(obj, r), nil
	}
	return nil, apierrors.NewNotFound(r.GroupResource(), name)
}

// inVersion returns obj in the version of r. Nothing but the version differs: there is no conversion.
func inVersion(obj *object, r *resource) *object {
	if obj.GroupVersionKind() == r.gvk() {
		return obj
	}
	obj = obj.DeepCopy()
	obj.SetGroupVersionKind(r.gvk())
	return obj
}

// commit stores obj, or removes it if it is nil, and tells the watches. The caller holds mu.
func (s *Server) commit(k key, obj *object) {
	before := s.objects[k]
	s.version++
	c := change{version: s.version, at: time.Now(), key: k, before: before, after: obj, kind: watch.Modified}
	switch {
	case obj == nil:
		c.kind = watch.Deleted
		c.after = before.DeepCopy()
		c.after.SetResourceVersion(strconv.Itoa(s.version))
		delete(s.objects, k)
	case before == nil:
		c.kind = watch.Added
	}
	if obj != nil {
		obj.SetResourceVersion(strconv.Itoa(s.version))
		s.objects[k] = obj
	}
	s.log = append(s.log, c)
	close(s.changed)
	s.changed = make(chan struct{})
}

// create stores a new object. The caller holds mu.
func (s *Server) create(r *resource, namespace string, obj *object, manager string, dryRun bool) (*object, error) {
	gr := r.GroupResource()
	if obj.GetResourceVersion() != "" {
		return nil, apierrors.NewBadRequest("resourceVersion should not be set on objects to be created")
	}
	if obj.GetName() == "" && obj.GetGenerateName() != "" {
		obj.SetName(obj.GetGenerateName() + rand.String(5))
	}
	if obj.GetName() == "" {
		return nil, apierrors.NewInvalid(r.gvk().GroupKind(), "", field.ErrorList{
			field.Required(field.NewPath("metadata", "name"), "name or generateName is required")})
	}
	if err := place(r, namespace, obj); err != nil {
		return nil, err
	}
	k := keyOf(r, namespace, obj.GetName())
	if _, exists := s.objects[k]; exists {
		if gr != (schema.GroupResource{Resource: "events"}) {
			return nil, apierrors.NewAlreadyExists(gr, obj.GetName())
		}
		// Clients name an Event by the nanosecond, which repeats where the clock stands still.
		obj.SetName(fmt.Sprintf("%s-%d", obj.GetName(), s.version))
		k = keyOf(r, namespace, obj.GetName())
	}
	if r.status {
		unstructured.RemoveNestedField(obj.Object, "status")
	}
	unstructured.RemoveNestedField(obj.Object, "metadata", "deletionTimestamp")
	s.identify(r, obj)
	managed, err := s.managed(r, "", nil, obj, manager)
	if err != nil {
		return nil, err
	}
	if !dryRun {
		s.commit(k, managed)
	}
	return managed, nil
}

// identify sets the metadata that the API server sets in a new object.
func (s *Server) identify(r *resource, obj *object) {
	if obj.GetUID() == "" {
		s.uids++
		obj.SetUID(types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", s.uids)))
	}
	if created := obj.GetCreationTimestamp(); created.IsZero() {
		obj.SetCreationTimestamp(metav1.Time{Time: time.Now().Truncate(time.Second)})
	}
	if r.generations() && obj.GetGeneration() == 0 {
		obj.SetGeneration(1)
	}
}

// place sets the namespace of obj.
func place(r *resource, namespace string, obj *object) error {
	switch {
	case r.namespaced == (namespace == ""):
		return apierrors.NewBadRequest(fmt.Sprintf("namespaced is %t for %s, but the request names the namespace %q",
			r.namespaced, r.GroupResource(), namespace))
	case obj.GetNamespace() != "" && obj.GetNamespace() != namespace:
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	obj.SetNamespace(namespace)
	return nil
}

// replace stores obj in place of current. changed is false if it is the same. The caller holds mu.
func (s *Server) replace(r *resource, sub string, current, obj *object, manager string, dryRun bool) (_ *object, changed bool, err error) {
	if err := place(r, current.GetNamespace(), obj); err != nil {
		return nil, false, err
	}
	obj = withoutOtherParts(r, sub, current, obj)
	if obj, err = s.managed(r, sub, current, obj, manager); err != nil {
		return nil, false, err
	}
	return s.finish(r, current, obj, dryRun)
}

// withoutOtherParts returns obj with the parts of current that a request to the subresource cannot change.
func withoutOtherParts(r *resource, sub string, current, obj *object) *object {
	if sub != "" {
		status, found := obj.Object["status"]
		sent := obj
		obj = current.DeepCopy()
		obj.SetResourceVersion(sent.GetResourceVersion())
		obj.SetUID(sent.GetUID())
		obj.SetManagedFields(nil)
		delete(obj.Object, "status")
		if found {
			obj.Object["status"] = status
		}
		return obj
	}
	if r.status {
		delete(obj.Object, "status")
		if status, found := current.Object["status"]; found {
			obj.Object["status"] = status
		}
	}
	return obj
}

// finish checks a changed object against the current object and stores it. An object that is being deleted
// is removed with its last finalizer.
func (s *Server) finish(r *resource, current, obj *object, dryRun bool) (_ *object, changed bool, err error) {
	gr := r.GroupResource()
	name := current.GetName()
	if obj.GetName() != name {
		return nil, false, apierrors.NewBadRequest(fmt.Sprintf(
			"the name of the object (%s) does not match the name on the URL (%s)", obj.GetName(), name))
	}
	if uid := obj.GetUID(); uid != "" && uid != current.GetUID() {
		return nil, false, apierrors.NewConflict(gr, name, fmt.Errorf("precondition failed: UID in precondition: %s, UID in object meta: %s", uid, current.GetUID()))
	}
	if version := obj.GetResourceVersion(); version != "" && version != current.GetResourceVersion() {
		return nil, false, apierrors.NewConflict(gr, name, errors.New("the object has been modified; please apply your changes to the latest version and try again"))
	}
	obj.SetUID(current.GetUID())
	obj.SetCreationTimestamp(current.GetCreationTimestamp())
	obj.SetDeletionTimestamp(current.GetDeletionTimestamp())
	obj.SetDeletionGracePeriodSeconds(current.GetDeletionGracePeriodSeconds())
	obj.SetResourceVersion(current.GetResourceVersion())
	obj.SetGeneration(current.GetGeneration())
	if current.GetDeletionTimestamp() != nil {
		for _, f := range obj.GetFinalizers() {
			if !slices.Contains(current.GetFinalizers(), f) {
				return nil, false, apierrors.NewInvalid(r.gvk().GroupKind(), name, field.ErrorList{field.Forbidden(
					field.NewPath("metadata", "finalizers"), "no new finalizers can be added if the object is being deleted, found new finalizers: "+f)})
			}
		}
	}
	if r.generations() && !equality.Semantic.DeepEqual(desired(r, current), desired(r, obj)) {
		obj.SetGeneration(current.GetGeneration() + 1)
	}
	if sameButManagers(current, obj) {
		return current, false, nil
	}
	k := keyOf(r, current.GetNamespace(), name)
	if dryRun {
		return obj, true, nil
	}
	if obj.GetDeletionTimestamp() != nil && len(obj.GetFinalizers()) == 0 {
		s.objects[k] = obj // the last state that watches see
		s.commit(k, nil)
		return obj, true, nil
	}
	s.commit(k, obj)
	return obj, true, nil
}

// desired returns the part of the object whose changes the generation counts.
func desired(r *resource, obj *object) map[string]any {
	parts := map[string]any{}
	for k, v := range obj.Object {
		if k != "metadata" && (k != "status" || !r.status) {
			parts[k] = v
		}
	}
	return parts
}

// sameButManagers compares two objects without the times of managedFields: a change of these alone is not
// written.
func sameButManagers(a, b *object) bool {
	a, b = a.DeepCopy(), b.DeepCopy()
	for _, obj := range []*object{a, b} {
		fields := obj.GetManagedFields()
		for i := range fields {
			fields[i].Time = nil
		}
		obj.SetManagedFields(fields)
	}
	return equality.Semantic.DeepEqual(a.Object, b.Object)
}

// delete deletes an object, or marks it if it has finalizers. The caller holds mu.
func (s *Server) delete(r *resource, namespace, name string, opts *metav1.DeleteOptions) (*object, error) {
	current, err := s.get(r, namespace, name)
	if err != nil {
		return nil, err
	}
	if p := opts.Preconditions; p != nil {
		if p.UID != nil && *p.UID != current.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != current.GetResourceVersion() {
			return nil, apierrors.NewConflict(r.GroupResource(), name, errors.New("the preconditions do not hold"))
		}
	}
	if p := opts.PropagationPolicy; p != nil && *p != metav1.DeletePropagationBackground {
		return nil, unsupported("deletion with propagationPolicy %s: there is no garbage collector", *p)
	}
	if len(opts.DryRun) > 0 {
		return current, nil
	}
	k := keyOf(r, namespace, name)
	if len(current.GetFinalizers()) == 0 {
		s.commit(k, nil)
		return current, nil
	}
	if current.GetDeletionTimestamp() != nil {
		return current, nil
	}
	obj := current.DeepCopy()
	obj.SetDeletionTimestamp(&metav1.Time{Time: time.Now().Truncate(time.Second)})
	var now int64
	obj.SetDeletionGracePeriodSeconds(&now)
	if r.generations() {
		obj.SetGeneration(obj.GetGeneration() + 1)
	}
	s.commit(k, obj)
	return obj, nil
}

// matching returns the objects of a resource that the selector selects, by name. The caller holds mu.
func (s *Server) matching(r *resource, sel *selector) []*object {
	var found []*object
	for k, obj := range s.objects {
		if sel.covers(r, k) && sel.matches(obj) {
			found = append(found, inVersion(obj, r))
		}
	}
	slices.SortFunc(found, func(a, b *object) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	return found
}

// Put creates or replaces an object as it is, with its status, whatever its resourceVersion. It removes an
// object that is being deleted and has no finalizer. A CustomResourceDefinition makes the server serve its
// resource.
func (s *Server) Put(obj *unstructured.Unstructured) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	obj = obj.DeepCopy()
	dropNulls(obj.Object)
	if obj.GetKind() == crdKind {
		if err := s.addCRD(obj); err != nil {
			return err
		}
	}
	r := s.resourceOfKind(obj.GroupVersionKind())
	if r == nil {
		return fmt.Errorf("%s is not known: add its type with AddToScheme, or give its CustomResourceDefinition first", obj.GroupVersionKind())
	}
	if err := place(r, obj.GetNamespace(), obj); err != nil {
		return fmt.Errorf("%s %s: %w", r.kind, obj.GetName(), err)
	}
	k := keyOf(r, obj.GetNamespace(), obj.GetName())
	current := s.objects[k]
	if current == nil {
		s.identify(r, obj)
	} else {
		if uid := obj.GetUID(); uid != "" && uid != current.GetUID() {
			return fmt.Errorf("%s %s exists with the UID %s: delete it before an object with the UID %s takes its name", r.kind, obj.GetName(), current.GetUID(), uid)
		}
		obj.SetUID(current.GetUID())
		obj.SetCreationTimestamp(current.GetCreationTimestamp())
		if r.generations() {
			obj.SetGeneration(current.GetGeneration())
			if !equality.Semantic.DeepEqual(desired(r, current), desired(r, obj)) {
				obj.SetGeneration(current.GetGeneration() + 1)
			}
		}
	}
	obj, err := s.managed(r, "", current, obj, "test")
	if err != nil {
		return err
	}
	s.commit(k, obj)
	if obj.GetDeletionTimestamp() != nil && len(obj.GetFinalizers()) == 0 {
		s.commit(k, nil)
	}
	return nil
}

// Object returns a copy of an object; nil if there is none.
func (s *Server) Object(group, kind, namespace, name string) *unstructured.Unstructured {
	s.mu.Lock()
	defer s.mu.Unlock()
	if obj := s.objects[key{group, kind, namespace, name}]; obj != nil {
		return obj.DeepCopy()
	}
	return nil
}

// Objects returns copies of all objects of a kind, sorted by namespace and name.
func (s *Server) Objects(group, kind string) []*unstructured.Unstructured {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []*object
	for k, obj := range s.objects {
		if k.group == group && k.kind == kind {
			found = append(found, obj.DeepCopy())
		}
	}
	slices.SortFunc(found, func(a, b *object) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	return found
}

// Delete deletes an object as a user does, and waits for nothing. It returns NotFound if there is
// none.
func (s *Server) Delete(obj *unstructured.Unstructured) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.resourceOfKind(obj.GroupVersionKind())
	if r == nil {
		return fmt.Errorf("%s is not known", obj.GroupVersionKind())
	}
	_, err := s.delete(r, obj.GetNamespace(), obj.GetName(), &metav1.DeleteOptions{})
	if err == nil && obj.GetKind() == crdKind {
		s.removeCRD(obj)
	}
	return err
}

// dropNulls removes null members, which the API server does not keep.
func dropNulls(value any) {
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			if member == nil {
				delete(v, key)
			} else {
				dropNulls(member)
			}
		}
	case []any:
		for _, item := range v {
			dropNulls(item)
		}
	}
}

// defaults sets the few defaults without which objects of the API server and of the store would
// differ in a way that controllers see.
func defaults(obj *object) {
	if obj.GroupVersionKind() == corev1.SchemeGroupVersion.WithKind("Secret") {
		if _, ok := obj.Object["type"]; !ok {
			obj.Object["type"] = string(corev1.SecretTypeOpaque)
		}
		// stringData is written only.
		if added, _, _ := unstructured.NestedStringMap(obj.Object, "stringData"); len(added) > 0 {
			data, _, _ := unstructured.NestedMap(obj.Object, "data")
			if data == nil {
				data = map[string]any{}
			}
			for k, v := range added {
				data[k] = encodeBase64(v)
			}
			obj.Object["data"] = data
			delete(obj.Object, "stringData")
		}
	}
}
