// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// horizon is how early an object gets a record and a timer. Earlier, it has neither: a cluster has tens of
// thousands of objects that a rule deletes in days, and a record and a timer take twice the memory of an
// object in the cache. A look through the caches, twice in this time, finds what comes nearer. After a step
// of the clock, a deletion is at most this late.
const horizon = time.Hour

// withinHorizon reports whether an object is due within the horizon, or overdue.
func withinHorizon(d *policy.Decision, now time.Time) bool { return d.Due(now.Add(horizon)) }

// changed notes a change of an object of a type. old is nil for a new object, obj for one that is gone.
func (c *controller) changed(ctx context.Context, t *followedType, old, obj metav1.Object) {
	if old != nil {
		t.count(old, -1)
	}
	if obj == nil {
		t.put(cache.MetaObjectToName(old), nil)
		return
	}
	t.count(obj, 1)
	name, now := cache.MetaObjectToName(obj), time.Now()
	if old != nil && same(old, obj, c.options.Keys()) {
		t.refresh(name, obj)
		return
	}
	r := newDueRecord(obj, now)
	if r.verdict.Problem != 0 {
		c.faultOf(ctx, key{t, name}, r.verdict)
	}
	if d := c.decide(key{t, name}, r.obj, r.verdict, now); !withinHorizon(&d, now) {
		t.put(name, nil)
		return
	}
	t.put(name, r)
	c.loop.Enqueue(key{t, name})
}

// lookAhead records and enqueues the objects that have come within the horizon.
func (c *controller) lookAhead() {
	c.mu.Lock()
	followed := slices.Collect(maps.Values(c.types))
	c.mu.Unlock()
	for _, t := range followed {
		for _, obj := range t.following.List(metav1.NamespaceAll, nil) {
			name, now := cache.MetaObjectToName(obj), time.Now()
			if d := c.decide(key{t, name}, withDate(obj), verdictOf(obj), now); withinHorizon(&d, now) && t.find(name, now) {
				c.loop.Enqueue(key{t, name})
			}
		}
	}
}
