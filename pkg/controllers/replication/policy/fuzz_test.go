// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math/rand"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// FuzzGrammars feeds the parsers. None may panic, and what cannot be parsed is never yes.
func FuzzGrammars(f *testing.F) {
	for _, text := range []string{"", "b", ",", "a|ab", "^(?!x).*", "team-*,!team-old; labels: env in (prod,stage)", "*", "[", "(x+x+)+y", "!c", "labels:", "a=b,c!=d,!e", "\x00", "b;"} {
		f.Add(text, "b")
	}
	f.Add("a.*b.*", "a-b-b")
	f.Add(".*a.*a", "b-a-a-a")
	f.Fuzz(func(t *testing.T, text, name string) {
		m := newMatchers(false)
		ns := &Namespace{Name: name}
		for grammar, parse := range map[string]func(string) matcher{
			"net": list(dotNetRegex), "go": goRegexList, "strict": m.strictSelector, "selector": m.selector, "clauses": m.clauses,
		} {
			match := m.get(grammar, text, parse)
			full, cheap := match(ns, time.Now().Add(time.Minute)), match(ns, noDotNetTime)
			if full.Claim == Yes && cheap.Claim == No {
				t.Errorf("%s: %q selects %q, but the quick look says no", grammar, text, name)
			}
			if full.Claim == Yes && full.Reason != "" {
				t.Errorf("%s: %q selects %q and has a problem: %+v", grammar, text, name, full)
			}
		}
		if pattern, is := plain(text); is && text != "" && len(name) <= 63 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" {
			want := glob.Match(pattern, name)
			if re, err := regexp.Compile("^(?:" + text + ")$"); err == nil && re.MatchString(name) != want {
				t.Errorf("%q is plain, and selects %q: %v, unlike the replicator", text, name, want)
			}
			if dotNetRegex(text)(ns, time.Now().Add(time.Minute)) != verdict(want) && len(text) < 20 {
				t.Errorf("%q is plain, and selects %q: %v, unlike the reflector", text, name, want)
			}
		}
		key := NewKey(Secret, "b", "s")
		if m := parseMarker(&Object{Key: key, Annotations: map[string]string{Marker: text}}); m != nil && m.Copy != "b/s" {
			t.Errorf("marker %q counts", text)
		}
		keyList(text)
	})
}

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
