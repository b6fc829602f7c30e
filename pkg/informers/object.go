// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"strconv"
	"strings"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// Object is an object in the cache: what controllers have declared that they need of it. It is
// immutable, and so are the maps and slices that it returns. Its size matters, since there is one for
// each Secret of the cluster.
//
// It implements metav1.Object and runtime.Object for reading; its setters panic.
type Object struct {
	readOnly // first, since an empty last field takes space

	plan *plan
	// packed holds, for each digest of the plan, its length as a varint and its bytes, and then the key in
	// the store, NAMESPACE/NAME: "\x03abc\x00shop/web" has a digest of three bytes and an empty one. That is one
	// allocation for all.
	packed string
	// uid and version hold the usual forms. What does not fit is in extra.
	uid     [16]byte
	version uint64
	extra   *extra
	first   uint64 // see FirstVersion and preexisting; 0 is unknown
}

// extra is what most objects do not have.
type extra struct {
	// Object is an *metav1.ObjectMeta with the declared annotations and fields, or the whole object if a
	// controller needs that.
	metav1.Object
	changed uint64 // see ChangedVersion; 0 is unknown
}

// changeable returns the parts that a controller could change, as client-go's detector needs them.
func (e *extra) changeable() runtime.Object {
	if m, ok := e.Object.(*metav1.ObjectMeta); ok {
		return &metav1.PartialObjectMetadata{ObjectMeta: *m}
	}
	return e.Object.(runtime.Object)
}

// objectAs returns the object in the form of a controller.
func objectAs[T any](o *Object) T {
	if t, ok := any(o).(T); ok {
		return t
	}
	return any(o.extra.Object).(T) // For has checked the type
}

func objectsAs[T any](stored []*Object) []T {
	list := make([]T, len(stored))
	for n, o := range stored {
		list[n] = objectAs[T](o)
	}
	return list
}

// String returns NAMESPACE/NAME, so that nothing else of the object gets into a log or an error.
func (o *Object) String() string { return o.key() }

func (o *Object) objectName() cache.ObjectName {
	return cache.NewObjectName(o.GetNamespace(), o.GetName())
}

// cutPart returns the first length-prefixed part of packed, and what follows it.
func cutPart(packed string) (part, rest string) {
	var n, shift uint
	for i := 0; ; i++ {
		n |= uint(packed[i]&0x7f) << shift
		if packed[i] < 0x80 {
			return packed[i+1 : i+1+int(n)], packed[i+1+int(n):]
		}
		shift += 7
	}
}

// Digest returns what the Digest function of the named controller returned, or nil if there is none.
// The caller may keep and change it.
func (o *Object) Digest(controller string) []byte {
	rest := o.packed
	for i := range o.plan.digests {
		var sum string
		sum, rest = cutPart(rest)
		if o.plan.digests[i].controller == controller && sum != "" {
			return []byte(sum)
		}
	}
	return nil
}

func formatVersion(v uint64) string {
	if v == 0 {
		return ""
	}
	return strconv.FormatUint(v, 10)
}

// key returns what String of the object's cache.ObjectName returns.
func (o *Object) key() string {
	rest := o.packed
	for range o.plan.digests {
		_, rest = cutPart(rest)
	}
	return rest
}

// GetNamespace returns the namespace.
func (o *Object) GetNamespace() string {
	key := o.key()
	return key[:max(0, strings.IndexByte(key, '/'))]
}

// GetName returns the name.
func (o *Object) GetName() string {
	key := o.key()
	return key[strings.IndexByte(key, '/')+1:]
}

// GetUID returns the UID.
func (o *Object) GetUID() types.UID {
	if o.uid != [16]byte{} {
		return types.UID(uuid.UUID(o.uid).String())
	}
	return o.metadata().GetUID()
}

// GetResourceVersion returns the resourceVersion.
func (o *Object) GetResourceVersion() string {
	if o.version != 0 {
		return formatVersion(o.version)
	}
	return o.metadata().GetResourceVersion()
}

// isState reports whether o is the state of its object that before is. Digests count, since one that has
// panicked may be another now. The UID counts, since the same endpoint may lead to another cluster.
func (o *Object) isState(before *Object) bool {
	return o.version != 0 && o.version == before.version && o.packed == before.packed && o.GetUID() == before.GetUID()
}

var emptyMeta metav1.Object = &metav1.ObjectMeta{}

func (o *Object) metadata() metav1.Object {
	if o.extra == nil {
		return emptyMeta
	}
	return o.extra
}

// GetAnnotations returns the declared annotations that the object has, or nil if it has none of
// them.
func (o *Object) GetAnnotations() map[string]string { return o.metadata().GetAnnotations() }

// GetLabels returns the labels if a need asks for them, otherwise nil.
func (o *Object) GetLabels() map[string]string { return o.metadata().GetLabels() }

// GetOwnerReferences returns the owners if a need asks for them, otherwise nil.
func (o *Object) GetOwnerReferences() []metav1.OwnerReference {
	return o.metadata().GetOwnerReferences()
}

// GetCreationTimestamp returns the time if a need asks for it, otherwise the zero time.
func (o *Object) GetCreationTimestamp() metav1.Time { return o.metadata().GetCreationTimestamp() }

// GetDeletionTimestamp returns the time if the object is being deleted, otherwise nil.
func (o *Object) GetDeletionTimestamp() *metav1.Time { return o.metadata().GetDeletionTimestamp() }

// GetObjectKind returns an empty kind, as typed objects from a client do.
func (o *Object) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns o itself, since it is immutable.
func (o *Object) DeepCopyObject() runtime.Object { return o }

// GetGenerateName returns the prefix of a whole object's name; a reduced one has none.
func (o *Object) GetGenerateName() string { return o.metadata().GetGenerateName() }

// GetGeneration returns the generation of a whole object; a reduced one has 0.
func (o *Object) GetGeneration() int64 { return o.metadata().GetGeneration() }

// GetFinalizers returns the finalizers of a whole object; a reduced one has none.
func (o *Object) GetFinalizers() []string { return o.metadata().GetFinalizers() }

// GetDeletionGracePeriodSeconds returns the time of a whole object; a reduced one has none.
func (o *Object) GetDeletionGracePeriodSeconds() *int64 {
	return o.metadata().GetDeletionGracePeriodSeconds()
}

// readOnly is the part of metav1.Object that an Object has only because client-go requires it: getters of
// what it never keeps, and setters, which panic.
type readOnly struct{}

var (
	_ metav1.Object  = &Object{}
	_ runtime.Object = &Object{}
)

func (readOnly) GetSelfLink() string                           { return "" }
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
