// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
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
	re      *regexp.Regexp // nil: text itself
	literal bool           // text is also a name, so a source of that name may be waited for
	dots    bool           // each dot of the literal text stands for any character
}

func (p pattern) matches(name string) bool {
	switch {
	case p.re != nil:
		return p.re.MatchString(name)
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

func matchesAny(list []pattern, name string) bool {
	return slices.ContainsFunc(list, func(p pattern) bool { return p.matches(name) })
}

// isName says that text may be the name of a source: small letters, digits, and
// between them - and .
func isName(text string) bool {
	const alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"
	return text != "" && len(text) <= validation.DNS1123SubdomainMaxLength && strings.Trim(text, "-.") == text && strings.Trim(text, alphanumeric+"-.") == ""
}

const (
	// maxNames is how many names and expressions of one list count. They and
	// maxExpressions are far more than anybody needs, and keep an annotation,
	// which may have 256 KiB, from costing every replica its memory.
	maxNames = 1000
	// maxExpressions is how large the expressions of one list may be in all: in
	// bytes, and also in steps of the compiled programs.
	maxExpressions = 10_000
)

// budget is how large the expressions of a list may still be.
type budget struct{ bytes, steps int }

func newBudget() *budget { return &budget{maxExpressions, maxExpressions} }

var errExpressions = fmt.Errorf("the expressions of one annotation may be %d bytes, and %d steps in which a repetition counts as often as it repeats",
	maxExpressions, maxExpressions)

// compile compiles an expression for whole names, within the budget.
func (b *budget) compile(item string) (*regexp.Regexp, error) {
	if len(item) > b.bytes {
		return nil, errExpressions
	}
	b.bytes -= len(item) // also of what is refused below: to find that out is what takes time
	parsed, err := syntax.Parse("^"+item+"$", syntax.Perl)
	if err != nil {
		return nil, err
	}
	n := steps(parsed)
	if n > b.steps {
		return nil, errExpressions
	}
	b.steps -= n
	// Names have one line, so its start is theirs. For a ^ alone the compiler looks
	// for a special form, in a time of the third power of the expression's size.
	return regexp.Compile("(?m:^)" + item + "$")
}

// steps is about how many instructions an expression compiles to, and the ranges
// of its classes. The parser bounds repetitions of repetitions by 1,000 in all.
func steps(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)
	for _, sub := range re.Sub {
		n += steps(sub)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return n
}

// glob compiles a name in which * stands for any text, also none.
func (b *budget) glob(text string) (pattern, error) {
	if !strings.Contains(text, "*") {
		return pattern{text: text, literal: true}, nil
	}
	quoted := strings.ReplaceAll(regexp.QuoteMeta(text), `\*`, ".*")
	re, err := b.compile(quoted)
	return pattern{text: text, re: re}, err
}
