// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

var webKey = policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}

func TestMemoryIsOfOneUID(t *testing.T) {
	cached, now := types.UID("old"), time.Unix(1, 0)
	m := newMemory(func(policy.QueueKey) types.UID { return cached })
	write := func(uid types.UID, version string) {
		m.update(webKey, uid, now, func(e *entry) { e.written = version })
	}
	expect := func(what string, uid types.UID, last, written string) {
		t.Helper()
		if e := m.get(webKey, uid); e.last != last || e.written != written {
			t.Errorf("%s: %+v", what, e)
		}
	}
	m.update(webKey, "old", now, func(e *entry) { e.last = "x" })
	expect("the new object of that name inherits", "new", "", "")
	write("new", "4")
	expect("an update of another object than the cache has", "old", "x", "")
	cached = "new"
	write("new", "5")
	expect("the new object", "new", "", "5")
	write("old", "")
	expect("the new object after a late update of the old one", "new", "", "5")
	waiting := &replacement{}
	m.update(webKey, "new", now, func(e *entry) { e.recreate = waiting })
	cached = "newer"
	write("newer", "6")
	if r, _ := m.replacement(webKey); r != waiting {
		t.Error("a Job that waits to be created again is forgotten for another one")
	}
	m.update(webKey, "new", now, func(e *entry) { e.written, e.recreate = "", nil })
	if len(m.entries) != 0 {
		t.Errorf("%d entries are left with nothing to remember", len(m.entries))
	}
}

// What is pending of a source, or was handed to a workload, is one change, from the first old data to the
// last new ones.
func TestSourceChangesAreMerged(t *testing.T) {
	c := newChanges()
	source := policy.SourceKey{Type: policy.ConfigMap, Name: "app-config"}
	of := sourceKey("shop", source)
	a, b, d := policy.Source{Hash: "a"}, policy.Source{Hash: "b"}, policy.Source{Hash: "d"}
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	c.add(of, change{a, b, at(1), at(1)})
	c.add(of, change{b, d, at(2), at(2)})
	if got, want := c.pending[of], (change{a, d, at(1), at(2)}); got != want {
		t.Errorf("pending %+v, want %+v", got, want)
	}
	if !c.hand(of, source, []policy.QueueKey{webKey}) || c.hand(of, source, []policy.QueueKey{webKey}) {
		t.Error("a change is not handed on exactly once")
	}
	c.add(of, change{d, a, at(3), at(3)})
	if got, want := c.take(webKey, map[policy.SourceKey]bool{source: true})[source], (change{a, a, at(1), at(3)}); got != want {
		t.Errorf("taken %+v, want %+v", got, want)
	}
	if c.hand(of, source, nil); len(c.pending)+len(c.handed) > 0 {
		t.Errorf("left: %v, %v", c.pending, c.handed)
	}
}

func TestLongNamesLeaveRoomForASuffix(t *testing.T) {
	for name, want := range map[string]string{
		strings.Repeat("a", 63):               strings.Repeat("a", 52),
		strings.Repeat("a", 50) + "-.nightly": strings.Repeat("a", 50), // a dot before a hyphen is no name
	} {
		if got := cutName(name); got != want {
			t.Errorf("%s is cut to %q, want %q", name, got, want)
		}
	}
}
