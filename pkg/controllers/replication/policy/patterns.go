// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"strings"
	"time"

	"github.com/dlclark/regexp2/v2"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/utils/lru"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

const (
	// maxPatterns and maxPatternLength limit one annotation, and maxExpression each of its regular
	// expressions: one expression may list many names.
	maxPatterns      = 64
	maxPatternLength = 16 << 10
	maxExpression    = 1 << 10
	// matchTimeout limits a match of a .NET regular expression, which may take exponential time.
	// The clock of regexp2 adds up to 100 ms. listTimeout is for all patterns of an annotation: much
	// longer than a process is ever kept from running. After either, no .NET pattern of the namespace is
	// run for timeoutPause, so that one author does not keep all workers busy.
	matchTimeout = 50 * time.Millisecond
	listTimeout  = 250 * time.Millisecond
	timeoutPause = 10 * time.Minute
	// maxProgram limits the compiled RE2 patterns of an annotation, roughly in instructions and runes of
	// character classes: a few bytes of text can take megabytes. itemProgram is the fixed cost of each
	// pattern.
	maxProgram  = 550
	itemProgram = 20
	// maxParsed limits the values of annotations that are kept parsed, each of which can take 200 KiB.
	maxParsed = 64
	// maxPaused limits the namespaces that are remembered because their patterns took too long.
	maxPaused = 1000
)

// matcher is the parsed value of an annotation that names namespaces. After the deadline, it answers held
// instead of running a .NET regular expression.
type matcher func(ns *Namespace, dotNetDeadline time.Time) Verdict

// dotNetForbidden is a deadline that has always passed, so that no .NET regular expression runs.
var dotNetForbidden time.Time

// matchers keeps parsed values.
type matchers struct {
	parsed *lru.Cache // the matchers, by grammar and text
	// pausedUntil says until when no .NET pattern of a namespace is run, because one of its lists took too long.
	pausedUntil      *lru.Cache
	labelsUnreadable bool // set if the labels of Namespaces are unreadable
}

func newMatchers(labelsUnreadable bool) *matchers {
	return &matchers{parsed: lru.New(maxParsed), pausedUntil: lru.New(maxPaused), labelsUnreadable: labelsUnreadable}
}

// get returns the matcher for a text in the grammar that parse reads.
func (m *matchers) get(grammar, text string, parse func(string) matcher) matcher {
	key := grammar + " " + text
	if found, ok := m.parsed.Get(key); ok {
		return found.(matcher)
	}
	parsed := parse(text)
	m.parsed.Add(key, parsed)
	return parsed
}

func always(v Verdict) matcher { return func(*Namespace, time.Time) Verdict { return v } }

// tooLong reports whether a value exceeds a limit. Describe replaces such a value by tooLongValue.
func tooLong(text string) bool {
	return len(text) > maxPatternLength || strings.Count(text, ",") >= maxPatterns
}

var tooLongText = fmt.Sprintf("is longer than %d bytes or has more than %d items", maxPatternLength, maxPatterns)

// listParser returns a parser of items that are joined by commas. Items that are not plain are parsed by
// parseItem. Empty items match nothing.
func listParser(parseItem func(string) matcher) func(string) matcher {
	return func(text string) matcher {
		if tooLong(text) {
			return always(held(InvalidPattern, tooLongText))
		}
		var items []matcher
		for text := range strings.SplitSeq(text, ",") {
			text = strings.TrimSpace(text)
			pattern, isPlain := plainGlob(text)
			switch problem := glob.Check(text, maxExpression); {
			case text == "":
			case problem != "":
				items = append(items, always(held(InvalidPattern, fmt.Sprintf("pattern %.80q %s", text, problem))))
			case isPlain:
				items = append(items, matchPlain(pattern))
			default:
				items = append(items, parseItem(text))
			}
		}
		return anyOf(items)
	}
}

// anyOf stops at the first item that says yes or takes too long.
func anyOf(items []matcher) matcher {
	return func(ns *Namespace, dotNetDeadline time.Time) Verdict {
		v := no
		for _, item := range items {
			next := item(ns, dotNetDeadline)
			if next.Answer == Yes || next.Reason == PatternTimeout {
				return next
			}
			v = v.or(next)
		}
		return v
	}
}

// matchDotNetList evaluates one of the reflector's lists of a source, items without a pattern first. After
// a list that took too long, no pattern of its namespace is run for a while, even if the list is replaced:
// other tenants wait for it.
func (e evaluation) matchDotNetList(key string) Verdict {
	v := e.match(key, "net", listParser(dotNetRegex), dotNetForbidden)
	if v.Answer != Held {
		return v
	}
	author := e.source.Namespace
	if until, paused := e.matchers.pausedUntil.Get(author); paused && e.now.Before(until.(time.Time)) {
		return held(PatternTimeout, key+": a pattern in this namespace took too long to match a while ago")
	}
	if v = e.match(key, "net", listParser(dotNetRegex), time.Now().Add(listTimeout)); v.Reason == PatternTimeout {
		e.matchers.pauseNamespace(author, e.now)
	}
	return v
}

func (m *matchers) pauseNamespace(author string, now time.Time) {
	m.pausedUntil.Add(author, now.Add(timeoutPause))
}

// plainGlob returns an item as a glob if nothing in it is special but .* for any text: most items are like
// this, and globs cost next to nothing. In both dialects, the glob matches the same names as the item. In
// the reflector's, the first match counts: if an item matches the whole name, the first match begins at its
// start, and since .* takes as much as possible, it ends at its end.
func plainGlob(item string) (pattern string, ok bool) {
	text := strings.ReplaceAll(item, ".*", "")
	return strings.ReplaceAll(item, ".*", "*"), strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

func matchPlain(pattern string) matcher {
	return func(ns *Namespace, _ time.Time) Verdict { return verdict(glob.Match(pattern, ns.Name)) }
}

// dotNetRegex parses an item of the reflector's lists: a .NET regular expression, not anchored, whose
// first match must be as long as the whole name.
func dotNetRegex(item string) matcher {
	expression, err := regexp2.Compile(item)
	if err != nil {
		return always(held(InvalidPattern, invalidText(item)))
	}
	expression.MatchTimeout = matchTimeout
	return func(ns *Namespace, dotNetDeadline time.Time) Verdict {
		switch {
		case dotNetDeadline.Equal(dotNetForbidden):
			return Verdict{Answer: Held}
		case time.Now().After(dotNetDeadline):
			return held(PatternTimeout, "its patterns take too long to match")
		}
		match, err := expression.FindStringMatch(ns.Name)
		switch {
		case errors.Is(err, regexp2.ErrBacktrackingStackLimit):
			return held(InvalidPattern, fmt.Sprintf("pattern %.80q needs too much memory to match", item))
		case err != nil:
			return held(PatternTimeout, fmt.Sprintf("pattern %.80q takes too long to match", item))
		}
		return verdict(match != nil && match.RuneLength == len([]rune(ns.Name)))
	}
}

func invalidText(item string) string {
	return fmt.Sprintf("pattern %.80q is not a regular expression, in which .* stands for any text", item)
}

// goRegexList parses the replicator's lists. An item that exceeds maxProgram is held.
func goRegexList(text string) matcher {
	budget := maxProgram
	return listParser(func(item string) matcher {
		tree, err := syntax.Parse(item, syntax.Perl) // alone, since a parenthesis could end a group
		if err != nil {
			return always(held(InvalidPattern, invalidText(item)))
		}
		if budget -= itemProgram + glob.ExpressionSize(tree); budget < 0 {
			return always(held(InvalidPattern, fmt.Sprintf("pattern %.80q is too large, or those before it are", item)))
		}
		return goRegex(item)
	})(text)
}

// goRegex parses an item of the replicator's lists: RE2, anchored. The original anchors the expression
// without a group around it. A name that only the expression without a group matches is ambiguous.
func goRegex(item string) matcher {
	grouped, err := regexp.Compile("^(?:" + item + ")$")
	ungrouped, ungroupedErr := regexp.Compile("^" + strings.TrimSuffix(strings.TrimPrefix(item, "^"), "$") + "$")
	if err != nil || ungroupedErr != nil {
		return always(held(InvalidPattern, invalidText(item)))
	}
	ambiguous := strings.ContainsAny(item, "|^$") // without these, both expressions match the same names
	return func(ns *Namespace, _ time.Time) Verdict {
		switch {
		case grouped.MatchString(ns.Name):
			return yes
		case ambiguous && ungrouped.MatchString(ns.Name):
			return held(AmbiguousPattern, fmt.Sprintf("pattern %.80q matches only a part of the name", item))
		}
		return no
	}
}

// selector parses a label selector.
func (m *matchers) selector(text string) matcher {
	if len(text) > maxPatternLength {
		return always(held(InvalidAnnotation, tooLongText))
	}
	parsed, err := labels.Parse(text)
	if err != nil {
		return always(held(InvalidAnnotation, "is not a label selector"))
	}
	if m.labelsUnreadable && !parsed.Empty() {
		return always(held(InvalidAnnotation, "selects by labels of Namespaces, which are not read with --namespaces"))
	}
	return func(ns *Namespace, _ time.Time) Verdict {
		return verdict(parsed.Matches(labels.Set(ns.Labels)))
	}
}

// strictSelector is selector, but refuses selectors that the reflector reads in another way.
func (m *matchers) strictSelector(text string) matcher {
	requirements, _ := labels.ParseToRequirements(text) // selector reports the error
	equalKeys := map[string]bool{}
	for _, r := range requirements {
		operator := r.Operator()
		isEquality := operator == selection.Equals || operator == selection.DoubleEquals
		if operator == selection.GreaterThan || operator == selection.LessThan ||
			(operator == selection.In || operator == selection.NotIn) && r.Values().Has("") || isEquality && equalKeys[r.Key()] {
			return always(held(InvalidAnnotation, "is a label selector that the reflector reads in another way"))
		}
		equalKeys[r.Key()] = equalKeys[r.Key()] || isEquality
	}
	return m.selector(text)
}

// clauses parses the native grammar: clauses joined by semicolons, each a label selector behind
// "labels:", or globs joined by commas; globs behind "!" exclude.
func (m *matchers) clauses(text string) matcher {
	if tooLong(text) {
		return always(held(InvalidAnnotation, tooLongText))
	}
	var include []matcher
	var exclude []string
	for clause := range strings.SplitSeq(text, ";") {
		if selector, ok := strings.CutPrefix(strings.TrimSpace(clause), "labels:"); ok {
			if strings.TrimSpace(selector) == "" {
				return always(held(InvalidAnnotation, "has labels: without a selector"))
			}
			include = append(include, m.selector(selector))
			continue
		}
		for item := range strings.SplitSeq(clause, ",") {
			item = strings.TrimSpace(item)
			name, excludes := strings.CutPrefix(item, "!")
			switch {
			case strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-*?") != "" || name == "":
				return always(held(InvalidAnnotation, fmt.Sprintf("%.80q is not a pattern of a namespace's name, which may have * and ?", item)))
			case glob.Check(name, glob.MaxNamespace) != "":
				return always(held(InvalidAnnotation, fmt.Sprintf("%.80q %s", item, glob.Check(name, glob.MaxNamespace))))
			case excludes:
				exclude = append(exclude, name)
			default:
				include = append(include, matchPlain(name))
			}
		}
	}
	if len(include) == 0 {
		return always(held(InvalidAnnotation, "has nothing but exclusions"))
	}
	selected := anyOf(include)
	return func(ns *Namespace, dotNetDeadline time.Time) Verdict {
		if glob.MatchAny(exclude, ns.Name) {
			return no
		}
		return selected(ns, dotNetDeadline)
	}
}
