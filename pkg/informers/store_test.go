// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestIndexFollowsTheObjects(t *testing.T) {
	s := newStore()
	// An object with the version v has the digits of v as its values.
	digits := func(o *Object) []string { return strings.Split(o.GetResourceVersion(), "") }
	put := func(key string, version uint64) { s.put(key, &Object{plan: &plan{}, packed: key, version: version}) }
	put("a", 12)
	s.addIndex("digits", digits)
	s.addIndex("digits", nil) // it stays as it is
	put("b", 23)
	check := func(want map[string]string) {
		t.Helper()
		got := map[string]string{}
		for value := range s.indexes["digits"].objects {
			objects, _ := s.byIndex("digits", value)
			var names []string
			for _, o := range objects {
				names = append(names, o.GetName()+"@"+o.GetResourceVersion())
			}
			slices.Sort(names)
			got[value] = strings.Join(names, " ")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("objects by value (-want +got):\n%s", diff)
		}
	}
	check(map[string]string{"1": "a@12", "2": "a@12 b@23", "3": "b@23"})
	put("a", 42)
	check(map[string]string{"4": "a@42", "2": "a@42 b@23", "3": "b@23"})
	s.put("b", nil)
	s.put("b", nil)
	check(map[string]string{"4": "a@42", "2": "a@42"})
	if _, exists := s.byIndex("other", "2"); exists {
		t.Error("there is an index that was not added")
	}
	if keys := s.keys(); !slices.Equal(keys, []string{"a"}) || len(s.list()) != 1 || s.get("b") != nil {
		t.Errorf("the store has %v", slices.Collect(maps.Keys(s.objects)))
	}
}
