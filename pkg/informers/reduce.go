// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// unwanted stands for all objects that the cache does not keep. That it has no name does no harm: client-go
// takes the key of a listed object before it calls reduce.
var unwanted = &Object{plan: &plan{}}

// reduce returns what the cache holds of obj: an *Object, unwanted, or the *misfit that obj is. It may
// change obj, which the caller must not use again. It is a cache.TransformFunc.
func (i *informer) reduce(obj any) (any, error) {
	switch obj.(type) {
	case *Object, *misfit:
		return obj, nil
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("reduce %T: %w", obj, err)
	}
	if t := i.plan.goType.Load(); t != nil && t != any(reflect.TypeOf(m)) {
		other := &misfit{err: fmt.Errorf("it is a %T, not a %s", m, t)}
		other.Namespace, other.Name, other.UID = m.GetNamespace(), m.GetName(), m.GetUID()
		return other, nil
	}
	for index := range i.plan.needs { // a need with a Filter has a plan of its own
		if n := &i.plan.needs[index]; n.Filter != nil && !i.filter(n, m) {
			return unwanted, nil
		}
	}
	m.SetManagedFields(nil)
	o := &Object{plan: i.plan, packed: i.pack(m, obj.(runtime.Object))}
	uid, version := string(m.GetUID()), m.GetResourceVersion()
	if id, err := uuid.Parse(uid); err == nil && len(uid) == 36 && uid == strings.ToLower(uid) {
		o.uid = id // its String is uid
		uid = ""
	}
	if v, err := strconv.ParseUint(version, 10, 64); err == nil && version[0] != '0' {
		o.version = v
		version = ""
	}
	if i.plan.whole {
		if a := m.GetAnnotations(); a != nil {
			delete(a, corev1.LastAppliedConfigAnnotation)
			m.SetAnnotations(a) // GetAnnotations of an unstructured object returns a copy
		}
		o.extra = &extra{Object: m}
	} else if kept, needed := i.metadata(m); needed || uid != "" || version != "" {
		kept.UID, kept.ResourceVersion = types.UID(uid), version
		o.extra = &extra{Object: ptr.To(kept)} // on the heap for these only
	}
	return o, nil
}

// pack returns the digests and the key of obj.
func (i *informer) pack(m metav1.Object, obj runtime.Object) string {
	var buffer [128]byte // enough for most, and not on the heap
	b := buffer[:0]
	for n := range i.plan.digests {
		sum := i.digest(&i.plan.digests[n], m, obj)
		b = binary.AppendUvarint(b, uint64(len(sum)))
		b = append(b, sum...)
	}
	if m.GetNamespace() != "" {
		b = append(append(b, m.GetNamespace()...), '/')
	}
	return string(append(b, m.GetName()...))
}

// digest calls the controller's Digest. If it panics, digest returns the digest of the cached object:
// without a digest, the controller would believe that the content is gone.
func (i *informer) digest(d *digest, m metav1.Object, obj runtime.Object) (sum []byte) {
	if i.bad.contain(d.controller, "Digest", m, func() { sum = d.sum(obj) }) {
		if before := i.objects.get(cache.MetaObjectToName(m).String()); before != nil && before.GetUID() == m.GetUID() {
			return before.Digest(d.controller)
		}
	}
	return sum
}

// filter calls the need's Filter. A panic counts as true, since it is harmless to keep too much.
func (i *informer) filter(n *Need, m metav1.Object) (wanted bool) {
	return i.bad.contain(n.controller, "Filter", m, func() { wanted = n.Filter(m) }) || wanted
}

// metadata returns the declared parts of an object's metadata, and whether there are any.
func (i *informer) metadata(m metav1.Object) (kept metav1.ObjectMeta, needed bool) {
	annotations := m.GetAnnotations()
	for index := range i.plan.needs {
		n := &i.plan.needs[index]
		for _, key := range n.Annotations {
			value, ok := annotations[key]
			if !ok {
				continue
			}
			if n.MaxAnnotation > 0 && len(value) > n.MaxAnnotation {
				value = strings.Clone(value[:n.MaxAnnotation+1]) // the rest can go
			}
			if kept.Annotations == nil {
				kept.Annotations = make(map[string]string, 1)
			}
			if other, found := kept.Annotations[key]; !found || len(other) < len(value) { // another need may want it whole
				kept.Annotations[key], needed = value, true
			}
		}
		if n.Fields&Labels != 0 && len(m.GetLabels()) > 0 {
			kept.Labels, needed = m.GetLabels(), true
		}
		if n.Fields&OwnerReferences != 0 && len(m.GetOwnerReferences()) > 0 {
			kept.OwnerReferences, needed = m.GetOwnerReferences(), true
		}
		if n.Fields&CreationTimestamp != 0 {
			kept.CreationTimestamp, needed = m.GetCreationTimestamp(), true
		}
	}
	if deleted := m.GetDeletionTimestamp(); deleted != nil {
		kept.DeletionTimestamp, needed = deleted, true
	}
	return kept, needed
}
