// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"encoding/binary"
	"strconv"
	"strings"
	"unique"
	"unsafe"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Entry is what the cache keeps of an object in reduced form. It is immutable, and so are the maps and
// slices that it hands out. Its size matters: there is one per Secret of the cluster.
//
// It implements metav1.Object and runtime.Object as far as reading goes; its setters panic.
type Entry struct {
	readOnly // of no size, so it must not be the last field

	plan      *plan
	namespace unique.Handle[string]
	// packed holds, for each digest of the plan, its length as a varint and its bytes, and then the
	// name: one allocation instead of three.
	packed string
	// uid and version hold the usual forms; whatever does not fit is in extra.
	uid     [16]byte
	version uint64
	extra   *extra
}

// extra is what most objects do not have.
type extra struct {
	annotations     map[string]string
	labels          map[string]string
	owners          []metav1.OwnerReference
	created         metav1.Time
	deleted         *metav1.Time
	uid             string
	resourceVersion string
}

// newEntry reduces obj, whose content the plan's digests get to see.
func newEntry(p *plan, obj metav1.Object, content runtime.Object) *Entry {
	e := &Entry{plan: p, namespace: unique.Make(obj.GetNamespace())}
	e.pack(obj.GetName(), content)

	var x extra
	needed := e.setIdentity(&x, obj)
	needed = p.keepMetadata(&x, obj) || needed
	if needed {
		e.extra = &x
	}
	return e
}

func (e *Entry) pack(name string, content runtime.Object) {
	if len(e.plan.digests) == 0 {
		e.packed = strings.Clone(name)
		return
	}
	b := make([]byte, 0, 128+len(name))
	for _, d := range e.plan.digests {
		var sum []byte
		if content != nil {
			sum = d.sum(content)
		}
		b = binary.AppendUvarint(b, uint64(len(sum)))
		b = append(b, sum...)
	}
	e.packed = string(append(b, name...))
}

// setIdentity stores UID and resourceVersion and reports whether it needed x for it.
func (e *Entry) setIdentity(x *extra, obj metav1.Object) bool {
	needed := false
	if id, err := uuid.Parse(string(obj.GetUID())); err == nil && id.String() == string(obj.GetUID()) {
		e.uid = id
	} else if obj.GetUID() != "" {
		x.uid, needed = strings.Clone(string(obj.GetUID())), true
	}
	rv := obj.GetResourceVersion()
	if v, err := strconv.ParseUint(rv, 10, 64); err == nil && v != 0 && strconv.FormatUint(v, 10) == rv {
		e.version = v
	} else if rv != "" {
		x.resourceVersion, needed = strings.Clone(rv), true
	}
	return needed
}

// keepMetadata copies the declared parts of obj to x and reports whether there were any.
func (p *plan) keepMetadata(x *extra, obj metav1.Object) bool {
	needed := false
	annotations := obj.GetAnnotations()
	for i := range p.needs {
		n := &p.needs[i]
		if n.When != nil && !n.When(obj) {
			continue
		}
		for _, key := range n.Annotations {
			if value, ok := annotations[key]; ok {
				if x.annotations == nil {
					x.annotations = make(map[string]string, 1)
				}
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

// next splits the first length-prefixed part off packed.
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

// Digest returns what the Digest function of the need of that controller made of the content; nil if
// there is none. The result is the caller's.
func (e *Entry) Digest(of string) []byte {
	rest := e.packed
	for i := range e.plan.digests {
		var sum string
		sum, rest = next(rest)
		if e.plan.digests[i].of == of && sum != "" {
			return []byte(sum)
		}
	}
	return nil
}

// GetNamespace returns the namespace, which all entries of a namespace share in memory.
func (e *Entry) GetNamespace() string { return e.namespace.Value() }

// GetName returns the name.
func (e *Entry) GetName() string {
	rest := e.packed
	for range e.plan.digests {
		_, rest = next(rest)
	}
	return rest
}

// GetUID returns the UID.
func (e *Entry) GetUID() types.UID {
	switch {
	case e.uid != [16]byte{}:
		return types.UID(uuid.UUID(e.uid).String())
	case e.extra != nil:
		return types.UID(e.extra.uid)
	}
	return ""
}

// GetResourceVersion returns the resourceVersion.
func (e *Entry) GetResourceVersion() string {
	switch {
	case e.version != 0:
		return strconv.FormatUint(e.version, 10)
	case e.extra != nil:
		return e.extra.resourceVersion
	}
	return ""
}

// GetAnnotations returns the declared annotations that the object has, nil if it has none of them.
func (e *Entry) GetAnnotations() map[string]string {
	if e.extra == nil {
		return nil
	}
	return e.extra.annotations
}

// GetLabels returns the labels if a need asked for them.
func (e *Entry) GetLabels() map[string]string {
	if e.extra == nil {
		return nil
	}
	return e.extra.labels
}

// GetOwnerReferences returns the owners if a need asked for them.
func (e *Entry) GetOwnerReferences() []metav1.OwnerReference {
	if e.extra == nil {
		return nil
	}
	return e.extra.owners
}

// GetCreationTimestamp returns the time if a need asked for it.
func (e *Entry) GetCreationTimestamp() metav1.Time {
	if e.extra == nil {
		return metav1.Time{}
	}
	return e.extra.created
}

// GetDeletionTimestamp returns nil unless the object is being deleted.
func (e *Entry) GetDeletionTimestamp() *metav1.Time {
	if e.extra == nil {
		return nil
	}
	return e.extra.deleted
}

// GetObjectKind returns an empty kind, as typed objects from a client do.
func (e *Entry) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns e itself, since it is immutable.
func (e *Entry) DeepCopyObject() runtime.Object { return e }

// size estimates the bytes of heap that e holds.
func (e *Entry) size() int {
	n := int(unsafe.Sizeof(*e)) + len(e.packed)
	if e.extra == nil {
		return n
	}
	const pair = 2 * int(unsafe.Sizeof(""))
	n += int(unsafe.Sizeof(*e.extra)) + len(e.extra.uid) + len(e.extra.resourceVersion)
	for _, m := range []map[string]string{e.extra.annotations, e.extra.labels} {
		for k, v := range m {
			n += pair + len(k) + len(v)
		}
	}
	for i := range e.extra.owners {
		o := &e.extra.owners[i]
		n += int(unsafe.Sizeof(*o)) + len(o.APIVersion) + len(o.Kind) + len(o.Name) + len(o.UID)
	}
	return n
}
