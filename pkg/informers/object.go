// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"unique"
	"unsafe"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Object is the reduced form of an object in the cache. It is immutable, and so are the maps and
// slices that it returns. Its size matters, since there is one for each Secret of the cluster.
//
// It implements metav1.Object and runtime.Object for reading; its setters panic.
type Object struct {
	readOnly // first, since an empty last field takes space

	plan      *plan
	namespace unique.Handle[string]
	// packed holds, for each digest of the plan, its length as a varint and its bytes, and then the
	// name. That is one allocation instead of three.
	packed string
	// uid and version hold the usual forms. What does not fit is in extra.
	uid     [16]byte
	version uint64
	extra   *extra
	// first and changed are versions, see FirstVersion and ChangedVersion; 0 is unknown. See listed.
	first, changed uint64
}

// extra holds what most objects do not have.
type extra struct {
	annotations     map[string]string
	labels          map[string]string
	owners          []metav1.OwnerReference
	created         metav1.Time
	deleted         *metav1.Time
	uid             string
	resourceVersion string
}

// reducer turns what the client decoded into what the cache holds.
type reducer struct {
	plan    *plan
	panics  *panics
	history *history
}

// reduce returns what the cache holds of obj. It may change obj, which the caller must not use
// again. It returns an error if obj has no metadata.
func (r *reducer) reduce(obj runtime.Object) (runtime.Object, error) {
	if o, ok := obj.(*Object); ok {
		return o, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("reduce %T: %w", obj, err)
	}
	if !r.plan.whole {
		return r.object(m, obj), nil
	}
	m.SetManagedFields(nil)
	if a := m.GetAnnotations(); a != nil {
		delete(a, corev1.LastAppliedConfigAnnotation)
		m.SetAnnotations(a) // GetAnnotations of an unstructured object returns a copy
	}
	return obj, nil
}

// bookmark returns what the reflector needs of a bookmark's object: the resourceVersion and, at the
// end of the initial events, the annotation that marks it.
func (r *reducer) bookmark(obj runtime.Object) (runtime.Object, error) {
	if r.plan.whole {
		return obj, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("bookmark %T: %w", obj, err)
	}
	x := &extra{annotations: m.GetAnnotations()}
	o := &Object{plan: r.plan, namespace: unique.Make(m.GetNamespace()), packed: r.pack(m, nil), extra: x}
	o.setIdentity(x, m)
	return o, nil
}

func (r *reducer) object(obj metav1.Object, content runtime.Object) *Object {
	o := &Object{plan: r.plan, namespace: unique.Make(obj.GetNamespace()), packed: r.pack(obj, content)}
	var x extra
	needed := o.setIdentity(&x, obj)
	if r.keepMetadata(&x, obj) || needed {
		o.extra = new(extra) // most objects do without
		*o.extra = x
	}
	r.history.follow(o)
	return o
}

// pack returns the digests and the name of obj. The digests are empty if content is nil.
func (r *reducer) pack(obj metav1.Object, content runtime.Object) string {
	name := obj.GetName()
	if len(r.plan.digests) == 0 {
		return strings.Clone(name) // name may share memory with the rest of what was decoded
	}
	var buffer [128]byte // enough for most, and not on the heap
	b := buffer[:0]
	for i := range r.plan.digests {
		var sum []byte
		if content != nil {
			sum = r.digest(&r.plan.digests[i], obj, content)
		}
		b = binary.AppendUvarint(b, uint64(len(sum)))
		b = append(b, sum...)
	}
	return string(append(b, name...))
}

// digest calls the controller's Digest. If it panics, digest returns that of the cached object:
// without a digest, the controller would believe that the content is gone.
func (r *reducer) digest(d *digest, obj metav1.Object, content runtime.Object) (sum []byte) {
	defer func() {
		if r.panics.contain(recover(), d.of, "Digest", obj) {
			if before := r.history.cached(objectName{unique.Make(obj.GetNamespace()), obj.GetName()}); before != nil {
				sum = before.Digest(d.of)
			}
		}
	}()
	return d.sum(content)
}

// setIdentity stores UID and resourceVersion. It reports whether it had to store one of them in x.
func (o *Object) setIdentity(x *extra, obj metav1.Object) bool {
	needed := false
	uid := string(obj.GetUID())
	if id, err := uuid.Parse(uid); err == nil && len(uid) == 36 && uid == strings.ToLower(uid) {
		o.uid = id // its String is uid
	} else if uid != "" {
		x.uid, needed = strings.Clone(uid), true
	}
	rv := obj.GetResourceVersion()
	if v, err := strconv.ParseUint(rv, 10, 64); err == nil && rv[0] != '0' {
		o.version = v
	} else if rv != "" {
		x.resourceVersion, needed = strings.Clone(rv), true
	}
	return needed
}

// keepMetadata copies the declared parts of obj to x. It reports whether there were any.
func (r *reducer) keepMetadata(x *extra, obj metav1.Object) bool {
	needed := false
	annotations := obj.GetAnnotations()
	for i := range r.plan.needs {
		n := &r.plan.needs[i]
		if n.When != nil && !r.when(n, obj) {
			continue
		}
		for _, key := range n.Annotations {
			value, ok := annotations[key]
			if !ok {
				continue
			}
			if n.MaxAnnotation > 0 && len(value) > n.MaxAnnotation {
				value = strings.Clone(value[:n.MaxAnnotation+1]) // the rest can go
			}
			if x.annotations == nil {
				x.annotations = make(map[string]string, 1)
			}
			if kept, has := x.annotations[key]; !has || len(kept) < len(value) { // another need may want it whole
				x.annotations[key], needed = value, true
			}
		}
		if n.Fields&Labels != 0 && len(obj.GetLabels()) > 0 {
			x.labels, needed = obj.GetLabels(), true
		}
		if n.Fields&OwnerReferences != 0 && len(obj.GetOwnerReferences()) > 0 {
			x.owners, needed = obj.GetOwnerReferences(), true
		}
		if n.Fields&CreationTimestamp != 0 {
			x.created, needed = obj.GetCreationTimestamp(), true
		}
	}
	if deleted := obj.GetDeletionTimestamp(); deleted != nil {
		x.deleted, needed = deleted, true
	}
	return needed
}

// when calls the need's When. A panic counts as true, since it is harmless to keep too much.
func (r *reducer) when(n *Need, obj metav1.Object) (wanted bool) {
	defer func() {
		if r.panics.contain(recover(), n.For, "When", obj) {
			wanted = true
		}
	}()
	return n.When(obj)
}

// next returns the first length-prefixed part of packed, and what follows it.
func next(packed string) (part, rest string) {
	var n, shift uint
	for i := 0; ; i++ {
		n |= uint(packed[i]&0x7f) << shift
		if packed[i] < 0x80 {
			return packed[i+1 : i+1+int(n)], packed[i+1+int(n):]
		}
		shift += 7
	}
}

// Digest returns what the Digest function of the named controller returned for the content, or nil
// if there is none. The caller may keep and change it.
func (o *Object) Digest(of string) []byte {
	rest := o.packed
	for i := range o.plan.digests {
		var sum string
		sum, rest = next(rest)
		if o.plan.digests[i].of == of && sum != "" {
			return []byte(sum)
		}
	}
	return nil
}

// GetNamespace returns the namespace. All objects in a namespace share its memory.
func (o *Object) GetNamespace() string { return o.namespace.Value() }

// GetName returns the name.
func (o *Object) GetName() string {
	rest := o.packed
	for range o.plan.digests {
		_, rest = next(rest)
	}
	return rest
}

// GetUID returns the UID.
func (o *Object) GetUID() types.UID {
	switch {
	case o.uid != [16]byte{}:
		return types.UID(uuid.UUID(o.uid).String())
	case o.extra != nil:
		return types.UID(o.extra.uid)
	}
	return ""
}

// GetResourceVersion returns the resourceVersion.
func (o *Object) GetResourceVersion() string {
	switch {
	case o.version != 0:
		return strconv.FormatUint(o.version, 10)
	case o.extra != nil:
		return o.extra.resourceVersion
	}
	return ""
}

// GetAnnotations returns the declared annotations that the object has, or nil if it has none of
// them.
func (o *Object) GetAnnotations() map[string]string {
	if o.extra == nil {
		return nil
	}
	return o.extra.annotations
}

// GetLabels returns the labels if a need asks for them, otherwise nil.
func (o *Object) GetLabels() map[string]string {
	if o.extra == nil {
		return nil
	}
	return o.extra.labels
}

// GetOwnerReferences returns the owners if a need asks for them, otherwise nil.
func (o *Object) GetOwnerReferences() []metav1.OwnerReference {
	if o.extra == nil {
		return nil
	}
	return o.extra.owners
}

// GetCreationTimestamp returns the time if a need asks for it, otherwise the zero time.
func (o *Object) GetCreationTimestamp() metav1.Time {
	if o.extra == nil {
		return metav1.Time{}
	}
	return o.extra.created
}

// GetDeletionTimestamp returns the time if the object is being deleted, otherwise nil.
func (o *Object) GetDeletionTimestamp() *metav1.Time {
	if o.extra == nil {
		return nil
	}
	return o.extra.deleted
}

// GetObjectKind returns an empty kind, as typed objects from a client do.
func (o *Object) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns o itself, since it is immutable.
func (o *Object) DeepCopyObject() runtime.Object { return o }

// size estimates how many bytes of heap o holds.
func (o *Object) size() int {
	n := int(unsafe.Sizeof(*o)) + len(o.packed)
	if o.extra == nil {
		return n
	}
	const pair = 2 * int(unsafe.Sizeof(""))
	n += int(unsafe.Sizeof(*o.extra)) + len(o.extra.uid) + len(o.extra.resourceVersion)
	for _, m := range []map[string]string{o.extra.annotations, o.extra.labels} {
		for k, v := range m {
			n += pair + len(k) + len(v)
		}
	}
	for i := range o.extra.owners {
		owner := &o.extra.owners[i]
		n += int(unsafe.Sizeof(*owner)) + len(owner.APIVersion) + len(owner.Kind) + len(owner.Name) + len(owner.UID)
	}
	return n
}

// readOnly is the part of metav1.Object that an Object has only because client-go's informers
// require it: getters of what it never keeps, and setters, which panic.
type readOnly struct{}

var (
	_ metav1.Object  = &Object{}
	_ runtime.Object = &Object{}
)

func (readOnly) GetGenerateName() string                       { return "" }
func (readOnly) GetGeneration() int64                          { return 0 }
func (readOnly) GetSelfLink() string                           { return "" }
func (readOnly) GetDeletionGracePeriodSeconds() *int64         { return nil }
func (readOnly) GetFinalizers() []string                       { return nil }
func (readOnly) GetManagedFields() []metav1.ManagedFieldsEntry { return nil }
func (readOnly) SetNamespace(string)                           { immutable() }
func (readOnly) SetName(string)                                { immutable() }
func (readOnly) SetGenerateName(string)                        { immutable() }
func (readOnly) SetUID(types.UID)                              { immutable() }
func (readOnly) SetResourceVersion(string)                     { immutable() }
func (readOnly) SetGeneration(int64)                           { immutable() }
func (readOnly) SetSelfLink(string)                            { immutable() }
func (readOnly) SetCreationTimestamp(metav1.Time)              { immutable() }
func (readOnly) SetDeletionTimestamp(*metav1.Time)             { immutable() }
func (readOnly) SetDeletionGracePeriodSeconds(*int64)          { immutable() }
func (readOnly) SetLabels(map[string]string)                   { immutable() }
func (readOnly) SetAnnotations(map[string]string)              { immutable() }
func (readOnly) SetFinalizers([]string)                        { immutable() }
func (readOnly) SetOwnerReferences([]metav1.OwnerReference)    { immutable() }
func (readOnly) SetManagedFields([]metav1.ManagedFieldsEntry)  { immutable() }

func immutable() { panic("an Object belongs to the cache and cannot be changed") }
