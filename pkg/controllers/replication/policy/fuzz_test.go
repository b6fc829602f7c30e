// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"
)

// FuzzDecideWritesNothingForeign decides on random objects with random annotations. What is written
// must be a copy of a marked or covered kind or a pull target, whatever else there is.
func FuzzDecideWritesNothingForeign(f *testing.F) {
	for seed := range int64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed int64) {
		rnd := rand.New(rand.NewSource(seed))
		pick := func(list ...string) string { return list[rnd.Intn(len(list))] }
		w := newFixture(t, nil)
		names := []string{"a/s", "b/s", "c/s", "a/t", "b/t"}
		values := map[string][]string{
			"Q:push-to": {"b", "*", "!b", ""}, "Q:allow-pull": {"b", "*"}, "Q:pull-from": {"a/s", "b/s", "b/t", "x"},
			"R:reflection-allowed": {"true", "false", "1"}, "R:reflection-auto-enabled": {"true", "false"}, "R:reflection-auto-namespaces": {"b", "*", "b|c"},
			"R:reflects": {"a/s", "b/s", "b"}, "R:auto-reflects": {"True", "False"}, "M:replicate-to": {"b", ".*", "["}, "M:replicate-to-matching": {"", "x=y"},
			"M:replication-allowed": {"true", "x"}, "M:replication-allowed-namespaces": {".*", "b"}, "M:replicate-from": {"a/s", "c/s"},
			"M:replicated-from-version": {"1"}, "M:replicated-keys": {"", "k", "k,j"}, "kubectl.kubernetes.io/last-applied-configuration": {"{}"},
		}
		var keys []string
		for key := range values {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		for range 30 {
			name := names[rnd.Intn(len(names))]
			switch rnd.Intn(6) {
			case 0:
				w.remove(name)
			case 1:
				if w.get(name) != nil {
					w.edit(name, data(pick("k=1", "k=2 j=1", "own=1")))
				}
			default:
				b := secret(name, pick("k=1", "own=1", ""))
				for _, key := range keys {
					if rnd.Intn(6) == 0 {
						with(key + "=" + pick(values[key]...))(b)
					}
				}
				if rnd.Intn(8) == 0 {
					with("Q:source={\"copy\":\"" + name + "\",\"dialect\":\"native\",\"mode\":\"push\",\"source\":\"" + pick(names...) + "\",\"uid\":\"\"}")(b)
				}
				w.put(b)
			}
			w.now = w.now.Add(time.Minute)
			for key, before := range w.objects {
				p := w.evaluator.Decide(w, key, w.now)
				if p.Action == Nothing {
					continue
				}
				if p.Action == Create {
					t.Fatalf("%s would be created, but exists", key)
				}
				a := before.Annotations
				marked := strings.Contains(a[Marker], `"copy":"`+key.NamespacedName.String()+`"`)
				pulls := a[PullFrom] != "" || a[reflects] != "" || a[replicateFrom] != ""
				_, replicated := a[replicatedKeys]
				if !marked && !pulls && !replicated {
					t.Fatalf("%s of a foreign object %s: %v", p.Action, key, a)
				}
				if (p.Action == Delete || p.Action == Recreate) && (a[PullFrom] != "" || a[replicateFrom] != "") {
					t.Fatalf("%s of a pull target %s: %v", p.Action, key, a)
				}
			}
		}
	})
}
