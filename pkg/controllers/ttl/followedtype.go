// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// objectKey names an object.
type objectKey struct {
	*followedType
	cache.ObjectName
}

// String returns pods/shop/p.
func (k objectKey) String() string { return k.GroupResource().String() + "/" + k.ObjectName.String() }

// dueRecord is what a run remembers of an object that is due within [horizon].
type dueRecord struct {
	obj       metav1.Object
	verdict   rules.Verdict
	firstSeen time.Time // when these annotations, or this verdict, were first seen
	deadline  time.Time // the deadline of the last decision
	failures  int       // the failed attempts; only the worker that has the key uses it
}

// newDueRecord returns the record of an object that is first seen at now, before a decision.
func newDueRecord(obj metav1.Object, now time.Time) *dueRecord {
	return &dueRecord{obj: withDate(obj), verdict: verdictOf(obj), firstSeen: now, deadline: policy.Never}
}

// followedType is a type whose objects are watched, with its objects that may expire.
type followedType struct {
	policy.Type
	rules     *typeRules // the rules for the type; nil if there are none
	following *informers.Following[metav1.Object]

	mu          sync.Mutex
	records     map[cache.ObjectName]*dueRecord
	objectCount int           // the number of cached objects that may expire
	ruleCounts  map[uint8]int // the number of those that expire by a rule, by the number of the rule
	pausedUntil time.Time
}

// get returns a record, nil if there is none, and the object in it.
func (t *followedType) get(name cache.ObjectName) (*dueRecord, metav1.Object) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[name]; r != nil {
		return r, r.obj
	}
	return nil, nil
}

// put sets the record of an object; nil is no record.
func (t *followedType) put(name cache.ObjectName, r *dueRecord) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.records == nil: // the type has been stopped
	case r == nil:
		delete(t.records, name)
	default:
		t.records[name] = r
	}
}

// updateObject sets the object in its record, if there is one.
func (t *followedType) updateObject(name cache.ObjectName, obj metav1.Object) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[name]; r != nil {
		r.obj = withDate(obj)
	}
}

// addRecord records an object at now if it has no record, and reports whether it did. It looks at the cache
// under the lock: otherwise the event that the object is gone could come before the record.
func (t *followedType) addRecord(name cache.ObjectName, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	obj, exists := t.following.Get(name)
	if !exists || t.records == nil || t.records[name] != nil {
		return false
	}
	t.records[name] = newDueRecord(obj, now)
	return true
}

// forget removes a record, unless another one has replaced it.
func (t *followedType) forget(name cache.ObjectName, r *dueRecord) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.records[name] == r {
		delete(t.records, name)
	}
}

// addToCounts adds n to the numbers of objects such as obj.
func (t *followedType) addToCounts(obj metav1.Object, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.objectCount += n
	if v := verdictOf(obj); v.Rule != 0 && v.Problem == 0 {
		t.ruleCounts[v.Rule] += n
	}
}

// setDeadline sets the deadline of a record to that of a decision.
func (t *followedType) setDeadline(r *dueRecord, deadline time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.deadline = deadline
}

// beginPause leaves the type alone for a while, and reports whether this begins now.
func (t *followedType) beginPause(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	begins := !t.pausedUntil.After(now)
	if begins {
		t.pausedUntil = now.Add(typePause)
	}
	return begins
}

// pauseLeft returns how long the type is left alone.
func (t *followedType) pauseLeft(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(t.pausedUntil.Sub(now), 0)
}

// stop ends the watch and forgets the objects.
func (t *followedType) stop() {
	t.following.Stop() // not under the lock, for which a handler may be waiting
	t.mu.Lock()
	defer t.mu.Unlock()
	t.records = nil
}

// sameDeadline reports whether two states of an object give the same deadline, if neither is being deleted.
// keys are the annotations that count; the cache may have other annotations, for other controllers.
func sameDeadline(a, b metav1.Object, keys []string) bool {
	return a.GetUID() == b.GetUID() && verdictOf(a) == verdictOf(b) && reflect.DeepEqual(a.GetOwnerReferences(), b.GetOwnerReferences()) &&
		!slices.ContainsFunc(keys, func(key string) bool {
			before, hadBefore := a.GetAnnotations()[key]
			after, hasAfter := b.GetAnnotations()[key]
			return before != after || hadBefore != hasAfter
		})
}

// Details is what /debug/controllers/ttl shows beside the loop.
type Details struct {
	Types []TypeStatus `json:"types"`
	Rules []RuleStatus `json:"rules,omitempty"`
}

// TypeStatus is what /debug/controllers/ttl shows of a type.
type TypeStatus struct {
	Resource     string     `json:"resource"`
	Version      string     `json:"version"`
	Synced       bool       `json:"synced"`
	Tracked      int        `json:"tracked"`
	Overdue      int        `json:"overdue"`
	NextDeadline *time.Time `json:"nextDeadline,omitempty"` // the first one within an hour or so
	Problem      string     `json:"problem,omitempty"`
}

func (t *followedType) status(now time.Time) TypeStatus {
	following := t.following.Status()
	status := TypeStatus{Resource: t.GroupResource().String(), Version: t.Version, Synced: following.Synced, Problem: following.Problem}
	if status.Problem == "" && t.pauseLeft(now) > 0 {
		status.Problem = "paused for a minute: the API server's clock differs, or a request took 5 s or more; see the log"
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	status.Tracked = t.objectCount
	next := policy.Never
	for _, r := range t.records {
		if !r.deadline.After(now) {
			status.Overdue++
		} else if r.deadline.Before(next) {
			next = r.deadline
			status.NextDeadline = &next
		}
	}
	return status
}

// typeStatuses returns the state of all types, by name.
func (c *controller) typeStatuses() (statuses []TypeStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.types {
		statuses = append(statuses, t.status(time.Now()))
	}
	slices.SortFunc(statuses, func(a, b TypeStatus) int { return strings.Compare(a.Resource, b.Resource) })
	return statuses
}
