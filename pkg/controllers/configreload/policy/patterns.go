// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// pattern is one item of a list of names.
type pattern struct {
	text    string
	re      *regexp.Regexp // nil: text itself; else that of all expressions of a list
	literal bool           // text is also a valid name, so a source of that name may be waited for
	dots    bool           // each dot of the literal text stands for any character
	stars   bool           // each star of the text stands for any text, including none
}

func (p pattern) matches(name string) bool {
	switch {
	case p.re != nil:
		return p.re.MatchString(name)
	case p.stars:
		return matchesStars(p.text, name)
	case !p.dots || len(name) != len(p.text):
		return p.text == name
	}
	for i := range len(name) {
		if p.text[i] != name[i] && p.text[i] != '.' {
			return false
		}
	}
	return true
}

// matchesStars takes each part between two stars where it first occurs.
func matchesStars(text, name string) bool {
	part, rest, _ := strings.Cut(text, "*")
	name, ok := strings.CutPrefix(name, part)
	for ok {
		var more bool
		if part, rest, more = strings.Cut(rest, "*"); !more {
			return strings.HasSuffix(name, part)
		}
		_, name, ok = strings.Cut(name, part)
	}
	return false
}

func matchesAny(list []pattern, name string) bool {
	return slices.ContainsFunc(list, func(p pattern) bool { return p.matches(name) })
}

// isName reports whether text may be the name of a source: lower-case letters, digits, and - and .
// between them.
func isName(text string) bool {
	const alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"
	return text != "" && len(text) <= validation.DNS1123SubdomainMaxLength && strings.Trim(text, "-.") == text && strings.Trim(text, alphanumeric+"-.") == ""
}

const (
	// maxList is the length of a list of names that counts, in bytes. A longer one would make the
	// state too large for an annotation.
	maxList = 10 << 10
	// maxSteps limits the expressions of one list. In maxList fit repetitions of many millions of
	// steps, which would take the memory of every replica, and some thousand wildcards, which would
	// take each name of the namespace many milliseconds.
	maxSteps = 500
)

// What rules take of memory, in bytes and rather too much: with a problem or two, for an item, and for
// a step of an expression.
const (
	rulesCost = 2048
	itemCost  = 128
	stepCost  = 192
)

var (
	errTooLong  = fmt.Errorf("the list is longer than %d KiB", maxList>>10)
	errTooLarge = errors.New("its repetitions are too large")
)

// newName returns a name of the original's lists. It is an expression too: a dot stands for any
// character.
func newName(item string) pattern {
	return pattern{text: item, literal: true, dots: strings.Contains(item, ".")}
}

// parseExpression parses an expression of the original's lists, for whole names. It takes what the
// expression costs from steps.
func parseExpression(item string, steps *int) (*syntax.Regexp, error) {
	if *steps < 0 {
		return nil, errTooLarge
	}
	parsed, err := syntax.Parse("^"+item+"$", syntax.Perl)
	if err != nil {
		return nil, err
	}
	if *steps -= size(parsed); *steps < 0 {
		return nil, errTooLarge
	}
	return parsed, nil
}

// newExpression returns one pattern for all expressions of a list. What they begin with alike is in it
// once.
func newExpression(all []*syntax.Regexp) (pattern, error) {
	alternatives := make([]string, len(all))
	for i, parsed := range all {
		prepare(parsed)
		alternatives[i] = "(?:" + parsed.String() + ")"
	}
	re, err := regexp.Compile(strings.Join(alternatives, "|"))
	return pattern{re: re}, err
}

// prepare removes the names of groups, since there must not be two of one name. And it makes ^ match
// at the start of a line. Names have one, and for the start of a text the compiler looks for a special
// form, in cubic time.
func prepare(re *syntax.Regexp) {
	re.Name = ""
	if re.Op == syntax.OpBeginText {
		re.Op = syntax.OpBeginLine
	}
	for _, sub := range re.Sub {
		prepare(sub)
	}
}

// size returns about how many steps an expression takes, including the ranges of its classes. Plain
// text takes few. The parser limits nested repetitions to 1,000 in all.
func size(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)
	if re.Op == syntax.OpLiteral {
		n = 1 + len(re.Rune)/8
	}
	for _, sub := range re.Sub {
		n += size(sub)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return n
}

// newGlob returns a name in which * stands for any text, including none.
func newGlob(text string) pattern {
	stars := strings.Contains(text, "*")
	return pattern{text: text, literal: !stars, stars: stars}
}
