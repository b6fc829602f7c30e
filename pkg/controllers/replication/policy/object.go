// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"hash"
	"slices"
	"strings"
	"sync"

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

// sumLength is the length of the hash of a value, in bytes.
const sumLength = 16

// Object is what decisions know of a Secret or ConfigMap. The cache has the first part of every object, and
// the rest, as JSON, of each object that decisions depend on.
type Object struct {
	Key          `json:"-"`
	UID, Version string `json:"-"`
	Deleting     bool   `json:"-"`

	Type      string `json:"t,omitempty"`
	Immutable bool   `json:"i,omitempty"`
	// UserMade says that the object bears traces of a user or a tool, so it was not made by the
	// reflector.
	UserMade    bool              `json:"u,omitempty"`
	Annotations map[string]string `json:"a,omitempty"`
	// Labels are kept for the replicator dialect only, which copies them.
	Labels map[string]string `json:"l,omitempty"`
	// Size is the size of all values together, in bytes.
	Size int `json:"s,omitempty"`
	// TooLarge says that the object has too many keys to be copied, or to be a copy. It has no Content.
	TooLarge bool `json:"x,omitempty"`

	Content map[Slot]Sum `json:"-"`
}

const (
	// maxKeys is how many keys an object may have, and maxKeyText how long they may be together, since
	// replicated-keys has to hold them. A key costs several times its length, in the cache and with every
	// decision.
	maxKeys    = 1024
	maxKeyText = 16 << 10
	// maxAnnotations is how long the values of all annotations that decisions depend on may be together:
	// each event of the object reads them, while the events of all other objects wait.
	maxAnnotations = 24 << 10
	// tooLongValue stands for a value that exceeds maxAnnotations or maxPatternLength. No valid value is
	// equal to it.
	tooLongValue = "\x00"
)

func (o *Object) hasAnnotation(annotation string) bool {
	_, has := o.Annotations[annotation]
	return has
}

func hasAny(m map[string]string, keys ...string) bool {
	return slices.ContainsFunc(keys, func(key string) bool { _, has := m[key]; return has })
}

// Digester computes what the cache keeps of an object. All objects that are compared must come from
// digesters with the same key.
type Digester struct {
	isBystander func(runtime.Object) bool // reports which objects without annotations are described too
	mac         sync.Pool
}

// NewDigesterKey returns a random key.
func NewDigesterKey() []byte {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	return key
}

// NewDigester returns a Digester with a key.
func NewDigester(o Options, key []byte) *Digester {
	return &Digester{
		isBystander: func(obj runtime.Object) bool {
			_, configMap := obj.(*corev1.ConfigMap)
			return o.Replicator && (o.AllowAll || o.AllowConfigMaps && configMap)
		},
		mac: sync.Pool{New: func() any { return hmac.New(sha256.New, key) }},
	}
}

// Describe returns what decisions know of an object.
func (d *Digester) Describe(body *Body) *Object {
	obj := &Object{
		Key: body.Key(), UID: string(body.UID), Version: body.ResourceVersion, Deleting: body.DeletionTimestamp != nil,
		Type: body.Type, Immutable: body.Immutable != nil && *body.Immutable, UserMade: userMade(body),
		Annotations: map[string]string{},
	}
	hasReplicator := false
	budget := maxAnnotations
	keyText := 0
	for _, key := range annotations {
		if value, has := body.Annotations[key]; has {
			if budget -= len(value); budget < 0 || len(value) > maxPatternLength {
				value = tooLongValue
				obj.TooLarge = obj.TooLarge || key == replicatedKeys // it is not known which keys were replicated
			}
			obj.Annotations[key] = value
			hasReplicator = hasReplicator || strings.HasPrefix(key, replicatorPrefix)
		}
	}
	if hasReplicator {
		obj.Labels = body.Labels
	}
	for slot, value := range body.Content {
		obj.Size += len(value)
		keyText += len(slot)
	}
	if obj.TooLarge = obj.TooLarge || len(body.Content) > maxKeys || keyText > maxKeyText; obj.TooLarge {
		return obj
	}
	obj.Content = make(map[Slot]Sum, len(body.Content))
	mac := d.mac.Get().(hash.Hash)
	defer d.mac.Put(mac)
	for slot, value := range body.Content {
		mac.Reset()
		_, _ = mac.Write(value)
		obj.Content[slot] = Sum(base64.RawStdEncoding.EncodeToString(mac.Sum(nil)[:sumLength]))
	}
	return obj
}

// userMade looks for traces that users and their tools leave on objects, and the reflector does not.
func userMade(body *Body) bool {
	return hasAny(body.Annotations, corev1.LastAppliedConfigAnnotation, "meta.helm.sh/release-name", "argocd.argoproj.io/tracking-id") ||
		hasAny(body.Labels, "app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "kustomize.toolkit.fluxcd.io/name") ||
		len(body.OwnerReferences) > 0 || len(body.Finalizers) > 0
}

// Digest returns what [Decode] needs of a Secret or ConfigMap; nil for an object that decisions do not
// depend on. It has two parts, so that a handler or an index pays nothing for many keys.
func (d *Digester) Digest(obj runtime.Object) []byte {
	m, ok := obj.(metav1.Object)
	if !ok {
		return nil
	}
	participates := hasAny(m.GetAnnotations(), annotations...)
	if !participates && !d.isBystander(obj) {
		return nil
	}
	b := NewBody(obj)
	if b == nil {
		return nil
	}
	o := d.Describe(b)
	head, _ := json.Marshal(o) // texts and times only
	content, _ := json.Marshal(o.Content)
	tag := byte(bystander)
	if participates {
		tag = participant
	}
	return slices.Concat([]byte{tag}, head, []byte("\n"), content)
}

// The first byte of a digest.
const (
	participant = 'p' // has annotations of ours
	bystander   = 'b' // may be a source without annotations of ours
)

// Cached is an object in the cache.
type Cached interface {
	metav1.Object
	Digest(controller string) []byte
}

// Participates reports whether an object has an annotation that decisions depend on. It costs nothing.
func Participates(c Cached, controller string) bool {
	digest := c.Digest(controller)
	return len(digest) > 0 && digest[0] == participant
}

// Decode returns what the cache knows of an object: without a digest, only its identity.
func Decode(kind Kind, c Cached, controller string) *Object {
	o, content := decodeHead(kind, c, controller)
	if len(content) > 0 {
		_ = json.Unmarshal(content, &o.Content) // what Digest has written
	}
	return o
}

// DecodeHead is Decode without the content.
func DecodeHead(kind Kind, c Cached, controller string) *Object {
	o, _ := decodeHead(kind, c, controller)
	return o
}

func decodeHead(kind Kind, c Cached, controller string) (o *Object, content []byte) {
	o = &Object{
		Key: NewKey(kind, c.GetNamespace(), c.GetName()),
		UID: string(c.GetUID()), Version: c.GetResourceVersion(), Deleting: c.GetDeletionTimestamp() != nil,
	}
	if digest := c.Digest(controller); len(digest) > 0 {
		var head []byte
		head, content, _ = bytes.Cut(digest[1:], []byte("\n"))
		_ = json.Unmarshal(head, o) // what Digest has written
	}
	return o, content
}
