// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"strings"
	"testing"
	"time"
)

func TestSourceBeingDeletedWithdrawsNothing(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("Q:push-to=b")))
	w.settle()
	w.edit("a/s", with("Q:push-to"), func(b *Body) { now := b.CreationTimestamp; b.DeletionTimestamp = &now })
	w.settle()
	w.expect("create b/s")
}

func TestCopyFollowsItsSourceToAnotherDialect(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", auto("b")))
	w.settle()
	w.edit("a/s", with("R:reflection-allowed", "R:reflection-auto-enabled", "Q:push-to=b"), data("k=w"))
	w.settle()
	w.expect("create b/s, update b/s")
	w.holds("b/s", "k=w", "R:reflects=(none)", "R:auto-reflects=(none)", "Q:source=*")
}

func TestCopyLosesTheKeysOfAnEarlierSource(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("Q:push-to=b")))
	w.put(secret("c/s", "j=w", with("M:replicate-to=b")))
	w.settle()
	w.edit("a/s", with("Q:push-to"))
	w.settle()
	w.expect("create b/s, create b/s, delete b/s")
	w.holds("b/s", "j=w")
}

func TestPullKeysOfTwoDialects(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("Q:allow-pull=b")))
	w.put(secret("b/t", "own=1", with("M:replicate-from=a/s", "R:reflects=a/s", "Q:pull-from=a/s")))
	w.put(secret("b/u", "own=1", with("M:replicate-from=a/s", "Q:pull-from=a/t")))
	w.put(secret("b/v", "own=1", with("R:reflects=s")))
	w.settle()
	w.expect("update b/t", "ConflictingAnnotations b/u", "InvalidAnnotation b/v")
	w.holds("b/t", "k=v", "M:replicated-keys=(none)")
}

func TestReplicatorCopyFollowsLabels(t *testing.T) {
	w := newFixture(t, nil)
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

func TestReplicatorCopyThatIsImmutableStays(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
	w.settle()
	w.edit("b/s", data("k=v own=1"), immutable)
	w.edit("a/s", data("k=w"))
	w.settle()
	w.expect("create b/s", "TypeConflict a/s")
}

func TestReflectorSelectorReadOtherwiseHolds(t *testing.T) {
	for _, selector := range []string{"a>1", "a<1", "a in (,x)", "a=1,a=2", "a=b=c", "("} {
		w := newFixture(t, nil)
		w.put(secret("a/s", "k=v", auto(), with("R:reflection-auto-namespaces-selector="+selector)))
		w.settle()
		w.expect("", "InvalidAnnotation a/s")
	}
}

func TestSelectorWithoutNamespacesHolds(t *testing.T) {
	w := newFixture(t, func(o *Options) { o.NoNamespaces = true })
	w.put(secret("a/s", "k=v", with("Q:push-to=b;labels:env=x")))
	w.put(secret("a/t", "k=v", with("M:replicate-to-matching=")))
	w.settle()
	w.expect("create b/s, create b/t, create c/t", "InvalidAnnotation a/s")
}

func TestPatternsEndAtTheFirstThatIsSlow(t *testing.T) {
	w := newFixture(t, nil)
	long := strings.Repeat("x", 60)
	w.namespaces(long)
	w.put(secret("a/s", "k=v", auto("(x+x+)+y", "x+", "b", "[c].*")))
	ask := func(namespace, want string) {
		t.Helper()
		got := w.rules.pushes(w.Get(NewKey(Secret, "a", "s")), w.ns["a"], w.ns[namespace], w.now)
		text := "yes"
		if got.Claim != Yes {
			text = got.Reason + " " + got.Text
		}
		if text != want {
			t.Errorf("%s: %q, want %q", namespace, text, want)
		}
	}
	const tooLong = `PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: pattern "(x+x+)+y" takes too long to match`
	const paused = "PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: a pattern in this namespace took too long to match a while ago"
	ask("c", "yes")
	ask(long, tooLong) // and not "yes", although the next pattern matches
	ask("c", paused)
	ask("b", "yes")
	w.now = w.now.Add(timeoutPause - time.Second)
	ask(long, paused)
	w.now = w.now.Add(time.Second)
	ask("c", "yes")
	ask(long, tooLong)
	if s := w.survey(w.Get(NewKey(Secret, "a", "s")), w.now); s.After != timeoutPause {
		t.Errorf("the source is looked at again after %v", s.After)
	}
}

func TestReplicatorPatternsAreBounded(t *testing.T) {
	for name, tc := range map[string]struct{ list, want string }{
		"a repeat":                             {"b|b[a-z0-9-]{62}", ""},
		"many patterns":                        {strings.Repeat("team-[a-z]+-.*,", 17) + "b", ""},
		"many that are plain":                  {strings.Repeat("team-.*-"+strings.Repeat("x", 200)+",", 60) + "b", ""},
		"an alternative for each of 80 names":  {"(" + strings.Repeat("team-of-a1|", 80) + "b)", ""},
		"more than one expression may hold":    {"(" + strings.Repeat("a|", 512) + "b)", InvalidPattern},
		"nested repeats":                       {"(((a{1000}){1000}))|b", InvalidPattern},
		"nested repeats within Go's limit":     {"((a{30}){30}b?){6}|b", InvalidPattern},
		"many repeats":                         {strings.Repeat("a{999}", 10) + "|b", InvalidPattern},
		"repeats in many patterns":             {strings.Repeat("a{999},", 10) + "[b]", InvalidPattern},
		"classes of thousands of ranges":       {strings.Repeat(`\pL`, 500) + "|b", InvalidPattern},
		"a parenthesis that would end ours":    {"b)|(?:a{1000}", InvalidPattern},
		"a quotation that would hide our end":  {`\Qb`, InvalidPattern},
		"more than the value of an annotation": {strings.Repeat("b", maxPatternLength) + "|b", InvalidPattern},
	} {
		t.Run(name, func(t *testing.T) {
			got := goList(tc.list)(&Namespace{Name: "b"}, noNet)
			if got.Reason != tc.want || (got.Claim == Yes) != (tc.want == "") {
				t.Errorf("%+v, want reason %q", got, tc.want)
			}
		})
	}
}

// TestReplicatorCopyIsAdopted checks that it is, whatever else its source says.
func TestReplicatorCopyIsAdopted(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b", "Q:push-to=b")))
	w.put(secret("b/s", "k=v", replicatorMade("1", "k")))
	w.settle()
	w.edit("a/s", data("k=w"))
	w.settle()
	w.expect("mark b/s, update b/s")
	w.holds("b/s", "k=w", "M:replicated-keys=(none)", "Q:source=*")
}

func TestReplicatorCopyFollowsBeforeItsMarker(t *testing.T) {
	w := newFixture(t, func(o *Options) { o.MarkAdopted = false })
	w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
	w.put(secret("b/s", "k=v", replicatorMade("1", "k")))
	w.settle()
	w.edit("a/s", data("k=w"))
	w.settle()
	w.expect("update b/s")
	w.holds("b/s", "k=w")
}

func TestReplicatorCopyOfAYoungerNamespaceGivesWay(t *testing.T) {
	w := newFixture(t, nil)
	w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
	w.put(secret("c/s", "k=w", with("M:replicate-to=b")))
	w.put(secret("b/s", "k=w", replicatorMade("2", "k")))
	w.settle()
	w.expect("create b/s, delete b/s", "TargetClaimed c/s")
	w.holds("b/s", "k=v")
	if got := w.get("b/s").Annotations[Marker]; !strings.Contains(got, `"source":"a/s"`) {
		t.Errorf("marker %s", got)
	}
}
