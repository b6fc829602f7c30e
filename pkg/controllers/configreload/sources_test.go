// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"testing"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// What is pending of a source, or was handed to a workload, is one change, from the first old data to the
// last new ones.
func TestSourceChangesAreMerged(t *testing.T) {
	c := newChanges()
	source := policy.SourceKey{Type: policy.ConfigMap, Name: "app-config"}
	key := sourceKey("shop", source)
	web := policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}
	a, b, d := policy.Source{Hash: "a"}, policy.Source{Hash: "b"}, policy.Source{Hash: "d"}
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	c.add(key, change{a, b, at(1), at(1)})
	c.add(key, change{b, d, at(2), at(2)})
	if got, want := c.pending[key], (change{a, d, at(1), at(2)}); got != want {
		t.Errorf("pending %+v, want %+v", got, want)
	}
	if !c.hand(key, source, []policy.QueueKey{web}) || c.hand(key, source, []policy.QueueKey{web}) {
		t.Error("a change is not handed on exactly once")
	}
	c.add(key, change{d, a, at(3), at(3)})
	if got, want := c.take(web, map[policy.SourceKey]bool{source: true})[source], (change{a, a, at(1), at(3)}); got != want {
		t.Errorf("taken %+v, want %+v", got, want)
	}
	if c.hand(key, source, nil); len(c.pending)+len(c.handed) > 0 {
		t.Errorf("left: %v, %v", c.pending, c.handed)
	}
}
