// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// key names an object.
type key struct {
	schema.GroupResource
	cache.ObjectName
}

// String returns pods/shop/p.
func (k key) String() string { return k.GroupResource.String() + "/" + k.ObjectName.String() }

// entry is what a run remembers of an annotated object.
type entry struct {
	key
	kind *kind
	obj  metav1.Object
	// What follows is guarded by the book.
	deadline time.Time // by the last decision; zero is never
	told     map[string]struct{}
	would    time.Time // the deadline of the dry run's Event
	failures int
	failedAt time.Time // when its owner was told last that it cannot be deleted
}

// describe returns what is decided on.
func (r *entry) describe() *policy.Object { return describe(r.kind.Type, r.obj) }

func describe(t policy.Type, obj metav1.Object) *policy.Object {
	o := &policy.Object{
		Type: t, Namespace: obj.GetNamespace(), Name: obj.GetName(), Created: obj.GetCreationTimestamp().Time,
		Terminating: obj.GetDeletionTimestamp() != nil, Annotations: obj.GetAnnotations(),
	}
	_, o.Mirror = o.Annotations[corev1.MirrorPodAnnotationKey]
	if owner := metav1.GetControllerOf(obj); owner != nil {
		o.ControllerKind = owner.Kind
	}
	return o
}

// same reports whether no decision can tell two states of an object apart. keys are the annotations
// that count.
func same(a, b metav1.Object, keys []string) bool {
	x, y := describe(policy.Type{}, a), describe(policy.Type{}, b)
	for _, k := range keys {
		v, had := x.Annotations[k]
		if w, has := y.Annotations[k]; had != has || v != w {
			return false
		}
	}
	return a.GetUID() == b.GetUID() && x.Created.Equal(y.Created) && x.Terminating == y.Terminating && x.ControllerKind == y.ControllerKind && x.Mirror == y.Mirror
}

// kind is a type that is followed.
type kind struct {
	policy.Type
	// What follows is guarded by the book.
	following Following // nil until it has begun
	records   map[cache.ObjectName]*entry
	failures  map[string]int64 // by operation
	lastErr   string
	stopped   bool
}

// book has the types and their records.
type book struct {
	mu    sync.Mutex
	kinds map[schema.GroupResource]*kind
}

func newBook() *book { return &book{kinds: map[schema.GroupResource]*kind{}} }

func (b *book) clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kinds = map[schema.GroupResource]*kind{}
}

func (b *book) get(k key) *entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	if kind := b.kinds[k.GroupResource]; kind != nil {
		return kind.records[k.ObjectName]
	}
	return nil
}

// put records the present state of an object, and reports whether it must be decided on.
func (b *book) put(kind *kind, obj metav1.Object, keys []string) (key, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := key{kind.GroupResource(), cache.MetaObjectToName(obj)}
	if kind.stopped {
		return k, false
	}
	r := kind.records[k.ObjectName]
	if r != nil && same(r.obj, obj, keys) {
		old := *r
		old.obj = obj
		kind.records[k.ObjectName] = &old // a worker may be reading the other
		return k, false
	}
	kind.records[k.ObjectName] = &entry{key: k, kind: kind, obj: obj}
	return k, true
}

func (b *book) remove(kind *kind, name cache.ObjectName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(kind.records, name)
}

// change calls f with the record that is in the book for an object, unless it has become another
// object.
func (b *book) change(r *entry, f func(*entry)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := r.kind.records[r.ObjectName]; now != nil && now.obj.GetUID() == r.obj.GetUID() {
		f(now)
	}
}

func (b *book) decided(r *entry, d *policy.Decision) {
	b.change(r, func(r *entry) { r.deadline = d.Deadline })
}

// tell reports whether an owner has not been told this yet.
func (b *book) tell(r *entry, what string) (first bool) {
	b.change(r, func(r *entry) {
		if _, told := r.told[what]; !told {
			first = true
			r.told = maps.Clone(r.told)
			if r.told == nil {
				r.told = map[string]struct{}{}
			}
			r.told[what] = struct{}{}
		}
	})
	return first
}

// failed counts a refusal, and returns how many there have been in a row.
func (b *book) failed(r *entry, operation string, err error) (failures int) {
	b.change(r, func(r *entry) { r.failures++; failures = r.failures })
	b.mu.Lock()
	defer b.mu.Unlock()
	r.kind.lastErr = err.Error()
	r.kind.failures[operation]++
	return failures
}

// add begins a type.
func (b *book) add(t policy.Type) *kind {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := &kind{Type: t, records: map[cache.ObjectName]*entry{}, failures: map[string]int64{}}
	b.kinds[t.GroupResource()] = k
	return k
}

func (b *book) began(k *kind, following Following) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.following = following
}

// drop ends a type and forgets its objects.
func (b *book) drop(k *kind) {
	b.mu.Lock()
	k.stopped, k.records = true, nil
	delete(b.kinds, k.GroupResource())
	following := k.following
	b.mu.Unlock()
	if following != nil {
		following.Stop() // it may wait for a handler, which asks for the lock
	}
}

func (b *book) types() []*kind {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.kinds))
}

// KindStatus is what /debug/controllers/ttl shows of a type.
type KindStatus struct {
	Resource     string     `json:"resource"`
	Version      string     `json:"version"`
	Synced       bool       `json:"synced"`
	Tracked      int        `json:"tracked"`
	Overdue      int        `json:"overdue"`
	NextDeadline *time.Time `json:"nextDeadline,omitempty"`
	Problem      string     `json:"problem,omitempty"`
	LastError    string     `json:"lastError,omitempty"`

	failures map[string]int64
	resource schema.GroupResource
}

// status returns the state of all types, by name.
func (b *book) status(now time.Time) (list []KindStatus) {
	for _, k := range b.types() {
		s := KindStatus{Resource: k.GroupResource().String(), Version: k.Version, resource: k.GroupResource()}
		b.mu.Lock()
		following := k.following
		s.failures = maps.Clone(k.failures)
		b.mu.Unlock()
		if following != nil {
			s.Synced, s.failures["watch"], s.Problem = following.Status()
		}
		b.mu.Lock()
		s.LastError, s.Tracked = k.lastErr, len(k.records)
		for _, r := range k.records {
			switch {
			case r.deadline.IsZero():
			case !r.deadline.After(now):
				s.Overdue++
			case s.NextDeadline == nil || r.deadline.Before(*s.NextDeadline):
				next := r.deadline
				s.NextDeadline = &next
			}
		}
		b.mu.Unlock()
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b KindStatus) int { return cmp.Compare(a.Resource, b.Resource) })
	return list
}
