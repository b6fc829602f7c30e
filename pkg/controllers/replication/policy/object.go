// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// Slot is a place for one value: a key of data or of binaryData.
type Slot struct {
	Key    string
	Binary bool
}

// Sum stands for a value. Its key is random per process, since a plain hash of a weak secret can be
// guessed.
type Sum [16]byte

// Object is what decisions know of a Secret or ConfigMap.
type Object struct {
	Key
	UID, Version string
	Deleting     bool

	Created   time.Time
	Type      string
	Immutable bool
	// UserMade says that the object bears traces of a user or a tool, so it was not made by the
	// reflector.
	UserMade    bool
	Annotations map[string]string
	// Labels and Owners are kept for the mittwald dialect only, which copies them.
	Labels  map[string]string
	Owners  []metav1.OwnerReference
	Content map[Slot]Sum
}

// participates reports whether an object has an annotation that decisions depend on.
func participates(m metav1.Object) bool {
	all := m.GetAnnotations()
	return slices.ContainsFunc(annotations, func(key string) bool { _, has := all[key]; return has })
}

// Digester computes what the cache keeps of an object. All objects that are compared must come from
// the same one.
type Digester struct {
	all bool
	mac sync.Pool
}

// NewDigester returns a Digester with a random key. If all is set, objects without annotations are
// described too.
func NewDigester(all bool) *Digester {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	return &Digester{all: all, mac: sync.Pool{New: func() any { return hmac.New(sha256.New, key) }}}
}

// Describe returns what decisions know of an object.
func (d *Digester) Describe(b *Body) *Object {
	o := &Object{
		Key: b.Key(), UID: string(b.UID), Version: b.ResourceVersion, Deleting: b.DeletionTimestamp != nil,
		Created: b.CreationTimestamp.Time, Type: b.Type, Immutable: b.Immutable, UserMade: userMade(b),
		Annotations: map[string]string{}, Content: map[Slot]Sum{},
	}
	mittwald := false
	for _, key := range annotations {
		if value, has := b.Annotations[key]; has {
			o.Annotations[key] = value
			mittwald = mittwald || strings.HasPrefix(key, mittwaldPrefix)
		}
	}
	if mittwald {
		o.Labels, o.Owners = b.Labels, b.OwnerReferences
	}
	mac := d.mac.Get().(hash.Hash)
	defer d.mac.Put(mac)
	for slot, value := range b.Content {
		var sum [sha256.Size]byte
		mac.Reset()
		_, _ = mac.Write(value)
		o.Content[slot] = Sum(mac.Sum(sum[:0])[:len(Sum{})])
	}
	return o
}

// userMade looks for what users and their tools leave on objects, and the reflector does not.
func userMade(b *Body) bool {
	has := func(m map[string]string, keys ...string) bool {
		return slices.ContainsFunc(keys, func(key string) bool { _, has := m[key]; return has })
	}
	return has(b.Annotations, corev1.LastAppliedConfigAnnotation, "meta.helm.sh/release-name", "argocd.argoproj.io/tracking-id") ||
		has(b.Labels, "app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "kustomize.toolkit.fluxcd.io/name") ||
		len(b.OwnerReferences) > 0 || len(b.Finalizers) > 0
}

// Digest returns the encoded description of a Secret or ConfigMap, for [Decode]; nil for one that
// decisions do not depend on.
func (d *Digester) Digest(obj runtime.Object) []byte {
	b := NewBody(obj)
	if b == nil || !d.all && !participates(b) {
		return nil
	}
	o := d.Describe(b)
	var e encoder
	flags := byte(1)
	if o.Immutable {
		flags |= 2
	}
	if o.UserMade {
		flags |= 4
	}
	e = append(e, flags)
	e = binary.AppendVarint(e, o.Created.Unix())
	e.text(o.Type)
	e.number(len(o.Annotations))
	for i, key := range annotations {
		if value, has := o.Annotations[key]; has {
			e.number(i)
			e.text(value)
		}
	}
	e.number(len(o.Labels))
	for _, key := range slices.Sorted(maps.Keys(o.Labels)) {
		e.text(key)
		e.text(o.Labels[key])
	}
	e.number(len(o.Owners))
	for i := range o.Owners {
		owner := &o.Owners[i]
		for _, text := range []string{owner.APIVersion, owner.Kind, owner.Name, string(owner.UID)} {
			e.text(text)
		}
	}
	slots := slices.SortedFunc(maps.Keys(o.Content), func(a, b Slot) int { return strings.Compare(a.Key, b.Key) })
	for _, slot := range slots {
		sum := o.Content[slot]
		e.text(slot.Key)
		e = append(e, map[bool]byte{true: 1}[slot.Binary])
		e = append(e, sum[:]...)
	}
	return e
}

// Cached is an object in the cache.
type Cached interface {
	GetNamespace() string
	GetName() string
	GetUID() types.UID
	GetResourceVersion() string
	GetDeletionTimestamp() *metav1.Time
	Digest(of string) []byte
}

// Decode returns what the cache knows of an object. Without a digest, that is its identity.
func Decode(kind Kind, c Cached, controller string) *Object {
	o := &Object{
		Key: NewKey(kind, c.GetNamespace(), c.GetName()),
		UID: string(c.GetUID()), Version: c.GetResourceVersion(), Deleting: c.GetDeletionTimestamp() != nil,
	}
	d := decoder(c.Digest(controller))
	if len(d) == 0 {
		return o
	}
	o.Immutable, o.UserMade = d[0]&2 != 0, d[0]&4 != 0
	d = d[1:]
	created, n := binary.Varint(d)
	d = d[n:]
	o.Created = time.Unix(created, 0)
	o.Type = d.text()
	o.Annotations = map[string]string{}
	for range d.number() {
		key := annotations[d.number()]
		o.Annotations[key] = d.text()
	}
	if n := d.number(); n > 0 {
		o.Labels = make(map[string]string, n)
		for range n {
			key := d.text()
			o.Labels[key] = d.text()
		}
	}
	for range d.number() {
		o.Owners = append(o.Owners, metav1.OwnerReference{APIVersion: d.text(), Kind: d.text(), Name: d.text(), UID: types.UID(d.text())})
	}
	o.Content = map[Slot]Sum{}
	for len(d) > 0 {
		slot := Slot{Key: d.text(), Binary: d[0] == 1}
		o.Content[slot] = Sum(d[1:])
		d = d[1+len(Sum{}):]
	}
	return o
}

// encoder and decoder write and read numbers, and texts behind their lengths.
type encoder []byte

func (e *encoder) number(n int) { *e = binary.AppendUvarint(*e, uint64(n)) }

func (e *encoder) text(s string) {
	e.number(len(s))
	*e = append(*e, s...)
}

type decoder []byte

func (d *decoder) number() int {
	n, length := binary.Uvarint(*d)
	*d = (*d)[length:]
	return int(n)
}

func (d *decoder) text() string {
	n := d.number()
	s := string((*d)[:n])
	*d = (*d)[n:]
	return s
}
