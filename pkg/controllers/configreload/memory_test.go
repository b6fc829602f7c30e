// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func TestMemoryIsOfOneUID(t *testing.T) {
	cached, now := types.UID("old"), time.Unix(1, 0)
	m := newMemory(func(policy.QueueKey) types.UID { return cached })
	key := policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}
	m.update(key, "old", now, func(e *entry) { e.last = "x" })
	if e := m.get(key, "new"); e.last != "" {
		t.Errorf("the new object of that name inherits %v", e.last)
	}
	m.update(key, "new", now, func(e *entry) { e.written = "4" })
	if e := m.get(key, "old"); e.last == "" || e.written != "" {
		t.Errorf("an update of another object than the cache has leaves %+v", e)
	}
	cached = "new"
	m.update(key, "new", now, func(e *entry) { e.written = "5" })
	if e := m.get(key, "new"); e.last != "" || e.written != "5" {
		t.Errorf("entry of the new object = %+v", e)
	}
	m.update(key, "old", now, func(e *entry) { e.written = "" })
	if e := m.get(key, "new"); e.written != "5" {
		t.Errorf("entry of the new object after a late update of the old one = %+v", e)
	}
	waiting := &replacement{}
	m.update(key, "new", now, func(e *entry) { e.recreate = waiting })
	cached = "newer"
	m.update(key, "newer", now, func(e *entry) { e.written = "6" })
	if r, _ := m.replacement(key); r != waiting {
		t.Error("a Job that waits to be created again is forgotten for another one")
	}
	m.update(key, "new", now, func(e *entry) { e.written, e.recreate = "", nil })
	if len(m.entries) != 0 {
		t.Errorf("%d entries are left with nothing to remember", len(m.entries))
	}
}
