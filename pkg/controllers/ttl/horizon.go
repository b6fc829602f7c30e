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

// horizon is how long before its deadline an object gets a record and a timer. Earlier it has neither: a
// cluster has tens of thousands of objects that a rule deletes in days, and a record and a timer take twice
// the memory of an object in the cache. Every horizon/2, a look through the caches finds the objects that
// have come nearer. A timer may last a whole horizon, so after a step of the clock a deletion is at most an
// hour late.
const horizon = time.Hour

// withinHorizon reports whether an object is due within the horizon, or overdue.
func withinHorizon(d *policy.Decision, now time.Time) bool { return d.Due(now.Add(horizon)) }

// handleChange handles a change of an object of a type. old is nil for a new object, current for one that is
// gone.
func (c *controller) handleChange(ctx context.Context, t *followedType, old, current metav1.Object) {
	if old != nil {
		t.addToCounts(old, -1)
	}
	if current == nil {
		t.put(cache.MetaObjectToName(old), nil)
		return
	}
	t.addToCounts(current, 1)
	name, now := cache.MetaObjectToName(current), time.Now()
	if old != nil && sameDeadline(old, current, c.options.Keys()) {
		t.updateObject(name, current)
		return
	}
	rec := newDueRecord(current, now)
	if rec.verdict.Problem != 0 {
		c.reportFault(ctx, objectKey{t, name}, rec.verdict)
	}
	if d := c.decide(objectKey{t, name}, rec.obj, rec.verdict, now); !withinHorizon(&d, now) {
		t.put(name, nil)
		return
	}
	t.put(name, rec)
	c.loop.Enqueue(objectKey{t, name})
}

// recordUpcoming records and enqueues the objects that have come within the horizon.
func (c *controller) recordUpcoming() {
	c.mu.Lock()
	followed := slices.Collect(maps.Values(c.types))
	c.mu.Unlock()
	for _, t := range followed {
		for _, obj := range t.following.List(metav1.NamespaceAll, nil) {
			name, now := cache.MetaObjectToName(obj), time.Now()
			d := c.decide(objectKey{t, name}, withDate(obj), verdictOf(obj), now)
			if withinHorizon(&d, now) && t.addRecord(name, now) {
				c.loop.Enqueue(objectKey{t, name})
			}
		}
	}
}
