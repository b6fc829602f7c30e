// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"strings"
	"testing"
	"time"
)

func TestAWithdrawnPermissionWhileTheSourceIsBeingDeletedHolds(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("Q:push-to=b")))
	w.settle()
	w.edit("a/s", with("Q:push-to"), func(b *Body) { now := b.CreationTimestamp; b.DeletionTimestamp = &now })
	w.settle()
	w.expect("create b/s")
}

func TestACopyFollowsItsSourceToAnotherDialect(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", auto("b")))
	w.settle()
	w.edit("a/s", with("R:reflection-allowed", "R:reflection-auto-enabled", "Q:push-to=b"), data("k=w"))
	w.settle()
	w.expect("create b/s, update b/s")
	w.holds("b/s", "k=w", "R:reflects=(none)", "R:auto-reflects=(none)", "Q:source=*")
}

func TestTheKeysOfAnEarlierSourceDoNotStay(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("Q:push-to=b")))
	w.put(secret("c/s", "j=w", with("M:replicate-to=b")))
	w.settle()
	w.edit("a/s", with("Q:push-to"))
	w.settle()
	w.expect("create b/s, update b/s")
	w.holds("b/s", "j=w")
}

func TestPullKeysOfTwoDialects(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("Q:allow-pull=b")))
	w.put(secret("b/t", "own=1", with("M:replicate-from=a/s", "R:reflects=a/s", "Q:pull-from=a/s")))
	w.put(secret("b/u", "own=1", with("M:replicate-from=a/s", "Q:pull-from=a/t")))
	w.put(secret("b/v", "own=1", with("R:reflects=s")))
	w.settle()
	w.expect("update b/t", "ConflictingAnnotations b/u", "InvalidAnnotation b/v")
	w.holds("b/t", "k=v", "M:replicated-keys=(none)")
}

func TestLabelsOfAMittwaldCopyFollowTheSource(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", labelled("t=1", "u=1"), with("M:replicate-to=b")))
	w.settle()
	w.edit("b/s", labelled("t=1", "u=1", "own=1"))
	w.edit("a/s", labelled("t=2"))
	w.settle()
	w.expect("create b/s, update b/s")
	if got := w.get("b/s").Labels; !maps.Equal(got, map[string]string{"t": "2", "own": "1"}) {
		t.Errorf("labels %v", got)
	}
}

func TestAnImmutableMittwaldCopyWithKeysOfItsOwnStays(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
	w.settle()
	w.edit("b/s", data("k=v own=1"), immutable)
	w.edit("a/s", data("k=w"))
	w.settle()
	w.expect("create b/s", "TypeConflict a/s")
}

func TestASelectorThatTheReflectorReadsInAnotherWayHolds(t *testing.T) {
	for _, selector := range []string{"a>1", "a<1", "a in (,x)", "a=1,a=2", "a=b=c", "("} {
		w := newWorld(t, nil)
		w.put(secret("a/s", "k=v", auto(), with("R:reflection-auto-namespaces-selector="+selector)))
		w.settle()
		w.expect("", "InvalidAnnotation a/s")
	}
}

func TestWithoutNamespacesASelectorOfLabelsHolds(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.NoNamespaces = true })
	w.put(secret("a/s", "k=v", with("Q:push-to=b;labels:env=x")))
	w.put(secret("a/t", "k=v", with("M:replicate-to-matching=")))
	w.settle()
	w.expect("create b/s, create b/t, create c/t", "InvalidAnnotation a/s")
}

func TestThePatternsOfAnAnnotationEndAtTheFirstThatTakesTooLong(t *testing.T) {
	w := newWorld(t, nil)
	long := strings.Repeat("x", 60)
	w.namespaces(long)
	w.put(secret("a/s", "k=v", auto("(x+x+)+y", "x+", "b", "c.*")))
	decide := func(namespace, want string) {
		t.Helper()
		p := w.rules.Decide(w, NewKey(Secret, namespace, "s"), w.now)
		got := string(p.Action)
		if len(p.Problems) > 0 {
			got = p.Problems[0].Reason + " " + p.Problems[0].Text
		}
		if got != want {
			t.Errorf("%s: %q, want %q", namespace, got, want)
		}
		if paused := strings.HasPrefix(want, PatternTimeout); paused != (p.After == timeoutPause) {
			t.Errorf("%s is decided again after %v", namespace, p.After)
		}
	}
	const tooLong = `PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: pattern "(x+x+)+y" takes too long to match`
	const paused = "PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: has a pattern that took too long to match a while ago"
	decide("c", "create")
	decide(long, tooLong) // and not "create", although the next pattern matches
	decide("c", paused)
	decide("b", "create")
	w.now = w.now.Add(timeoutPause - time.Second)
	decide(long, paused)
	w.now = w.now.Add(time.Second)
	decide("c", "create")
	decide(long, tooLong)
}

func TestThePatternsOfTheReplicatorAreBounded(t *testing.T) {
	for name, tc := range map[string]struct{ list, want string }{
		"a repeat":                             {"b|b[a-z0-9-]{62}", ""},
		"many patterns":                        {strings.Repeat("team-[a-z]+-.*,", 60) + "b", ""},
		"nested repeats":                       {"(((a{1000}){1000}))|b", InvalidPattern},
		"nested repeats within Go's limit":     {"((a{30}){30}b?){6}|b", InvalidPattern},
		"many repeats":                         {strings.Repeat("a{999}", 10) + "|b", InvalidPattern},
		"repeats in many patterns":             {strings.Repeat("a{999},", 10) + "b", InvalidPattern},
		"classes of thousands of ranges":       {strings.Repeat(`\pL`, 500) + "|b", InvalidPattern},
		"a parenthesis that would end ours":    {"b)|(?:a{1000}", InvalidPattern},
		"a quotation that would hide our end":  {`\Qb`, InvalidPattern},
		"more than the value of an annotation": {strings.Repeat("b", maxPatternLength) + "|b", InvalidPattern},
	} {
		t.Run(name, func(t *testing.T) {
			got := goList(tc.list)(&Namespace{Name: "b"}, time.Time{}, true)
			if got.Reason != tc.want || (got.Claim == Yes) != (tc.want == "") {
				t.Errorf("%+v, want reason %q", got, tc.want)
			}
		})
	}
}

func TestGlobs(t *testing.T) {
	for _, tc := range []struct {
		glob, name string
		want       bool
	}{
		{"*", "", true}, {"a*", "a", true}, {"a*c", "abbc", true}, {"a*c", "abcb", false}, {"?", "a", true}, {"?", "", false},
		{"*a*b*", "xaxbx", true}, {"team-*", "steam-1", false}, {"", "", true}, {"", "a", false}, {"a**", "a", true},
	} {
		if got := globs([]string{tc.glob})(tc.name); got != tc.want {
			t.Errorf("glob %q, name %q: %v", tc.glob, tc.name, got)
		}
	}
}

func TestACopyOfTheReplicatorIsAdoptedWhateverElseItsSourceSays(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b", "Q:push-to=b")))
	w.put(secret("b/s", "k=v", replicatorMade("1", "k")))
	w.settle()
	w.edit("a/s", data("k=w"))
	w.settle()
	w.expect("update b/s")
	w.holds("b/s", "k=w", "M:replicated-keys=(none)", "Q:source=*")
}

func TestAnUnmarkedCopyOfTwoSourcesGoesToTheOlderOne(t *testing.T) {
	w := newWorld(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
	w.put(secret("c/s", "k=w", with("M:replicate-to=b")))
	w.put(secret("b/s", "k=w", replicatorMade("2", "k")))
	w.settle()
	w.expect("update b/s", "TargetClaimed c/s")
	w.holds("b/s", "k=v")
	if got := w.get("b/s").Annotations[Marker]; !strings.Contains(got, `"source":"a/s"`) {
		t.Errorf("marker %s", got)
	}
}
