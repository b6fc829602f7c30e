// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"
	"time"
)

func TestReflectorSelectorReadOtherwiseHolds(t *testing.T) {
	for _, selector := range []string{"a>1", "a<1", "a in (,x)", "a=1,a=2", "a=b=c", "("} {
		f := newFixture(t, nil)
		f.put(secret("a/s", "k=v", auto(), with("R:reflection-auto-namespaces-selector="+selector)))
		f.settled("", "InvalidAnnotation a/s")
	}
}

func TestPatternsEndAtTheFirstThatIsSlow(t *testing.T) {
	f := newFixture(t, nil)
	long := strings.Repeat("x", 60)
	f.namespaces(long)
	f.put(secret("a/s", "k=v", auto("(x+x+)+y", "x+", "b", "[c].*")))
	ask := func(namespace, want string) {
		t.Helper()
		got := f.evaluator.pushes(f.Get(NewKey(Secret, "a", "s")), f.ns["a"], f.ns[namespace], f.now)
		text := "yes"
		if got.Answer != Yes {
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
	f.now = f.now.Add(timeoutPause - time.Second)
	ask(long, paused)
	f.now = f.now.Add(time.Second)
	ask("c", "yes")
	ask(long, tooLong)
	if s := f.survey(f.Get(NewKey(Secret, "a", "s")), f.now); s.After != timeoutPause {
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
			got := goRegexList(tc.list)(&Namespace{Name: "b"}, noDotNetTime)
			if got.Reason != tc.want || (got.Answer == Yes) != (tc.want == "") {
				t.Errorf("%+v, want reason %q", got, tc.want)
			}
		})
	}
}
