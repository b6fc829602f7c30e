// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"hash"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Slot is a place for one value: inData or inBinaryData, and the key in it.
type Slot string

const (
	inData       = "d"
	inBinaryData = "b"
)

func (s Slot) key() string { return string(s[1:]) }

// Sum stands for a value. Its key is random per process, since a plain hash of a weak secret can be
// guessed.
type Sum string

// sumLength is that of the hash of a value, in bytes.
const sumLength = 16

// Object is what decisions know of a Secret or ConfigMap. The cache has its first part of every
// object, and the rest, as JSON, of those that decisions depend on.
type Object struct {
	Key          `json:"-"`
	UID, Version string `json:"-"`
	Deleting     bool   `json:"-"`

	Created   time.Time `json:"c"`
	Type      string    `json:"t,omitempty"`
	Immutable bool      `json:"i,omitempty"`
	// UserMade says that the object bears traces of a user or a tool, so it was not made by the
	// reflector.
	UserMade    bool              `json:"u,omitempty"`
	Annotations map[string]string `json:"a,omitempty"`
	// Labels are kept for the mittwald dialect only, which copies them.
	Labels  map[string]string `json:"l,omitempty"`
	Content map[Slot]Sum      `json:"d,omitempty"`
}

func (o *Object) has(annotation string) bool {
	_, has := o.Annotations[annotation]
	return has
}

func hasAny(m map[string]string, keys ...string) bool {
	return slices.ContainsFunc(keys, func(key string) bool { _, has := m[key]; return has })
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
		Created: b.CreationTimestamp.Time, Type: b.Type, Immutable: b.Immutable != nil && *b.Immutable, UserMade: userMade(b),
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
		o.Labels = b.Labels
	}
	mac := d.mac.Get().(hash.Hash)
	defer d.mac.Put(mac)
	for slot, value := range b.Content {
		mac.Reset()
		_, _ = mac.Write(value)
		o.Content[slot] = Sum(base64.RawStdEncoding.EncodeToString(mac.Sum(nil)[:sumLength]))
	}
	return o
}

// userMade looks for what users and their tools leave on objects, and the reflector does not.
func userMade(b *Body) bool {
	return hasAny(b.Annotations, corev1.LastAppliedConfigAnnotation, "meta.helm.sh/release-name", "argocd.argoproj.io/tracking-id") ||
		hasAny(b.Labels, "app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "kustomize.toolkit.fluxcd.io/name") ||
		len(b.OwnerReferences) > 0 || len(b.Finalizers) > 0
}

// Digest returns what [Decode] needs of a Secret or ConfigMap; nil for one that decisions do not
// depend on.
func (d *Digester) Digest(obj runtime.Object) []byte {
	if m, ok := obj.(metav1.Object); !ok || !d.all && !hasAny(m.GetAnnotations(), annotations...) {
		return nil
	}
	b := NewBody(obj)
	if b == nil {
		return nil
	}
	text, _ := json.Marshal(d.Describe(b)) // texts and times only
	return text
}

// Cached is an object in the cache.
type Cached interface {
	metav1.Object
	Digest(of string) []byte
}

// Decode returns what the cache knows of an object. Without a digest, that is its identity.
func Decode(kind Kind, c Cached, controller string) *Object {
	o := &Object{
		Key: NewKey(kind, c.GetNamespace(), c.GetName()),
		UID: string(c.GetUID()), Version: c.GetResourceVersion(), Deleting: c.GetDeletionTimestamp() != nil,
	}
	if digest := c.Digest(controller); len(digest) > 0 {
		_ = json.Unmarshal(digest, o) // what Digest has written
	}
	return o
}
