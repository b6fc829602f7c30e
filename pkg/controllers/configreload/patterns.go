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
	literal bool           // text is also a valid name, so a source of that name may be waited for
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

// isName reports whether text may be the name of a source: lower-case letters, digits, and - and .
// between them.
func isName(text string) bool {
	const alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"
	return text != "" && len(text) <= validation.DNS1123SubdomainMaxLength && strings.Trim(text, "-.") == text && strings.Trim(text, alphanumeric+"-.") == ""
}

const (
	// maxNames is how many names and expressions of one list count. It and maxExpressions are far
	// more than anybody needs. They keep an annotation, which may have 256 KiB, from exhausting the
	// memory of every replica.
	maxNames = 1000
	// maxExpressions limits the expressions of one list, in bytes and also in steps of the compiled
	// programs.
	maxExpressions = 10_000
)

// budget is what is left for the expressions of a list.
type budget struct{ bytes, steps int }

func newBudget() *budget { return &budget{maxExpressions, maxExpressions} }

var errExpressions = fmt.Errorf("the expressions of one annotation may be %d bytes, and %d steps in which a repetition counts as often as it repeats",
	maxExpressions, maxExpressions)

// compile compiles an expression for whole names, within the budget.
func (b *budget) compile(item string) (*regexp.Regexp, error) {
	if len(item) > b.bytes {
		return nil, errExpressions
	}
	b.bytes -= len(item) // a refused expression counts too, since refusing it takes the time
	parsed, err := syntax.Parse("^"+item+"$", syntax.Perl)
	if err != nil {
		return nil, err
	}
	n := steps(parsed)
	if n > b.steps {
		return nil, errExpressions
	}
	b.steps -= n
	// Names have one line, so (?m:^) matches only at their start. For a plain ^ the compiler looks
	// for a special form, which takes time cubic in the expression's size.
	return regexp.Compile("(?m:^)" + item + "$")
}

// steps returns about how many instructions an expression compiles to, including the ranges of its
// classes. The parser limits nested repetitions to 1,000 in all.
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

// glob compiles a name in which * stands for any text, including none.
func (b *budget) glob(text string) (pattern, error) {
	if !strings.Contains(text, "*") {
		return pattern{text: text, literal: true}, nil
	}
	quoted := strings.ReplaceAll(regexp.QuoteMeta(text), `\*`, ".*")
	re, err := b.compile(quoted)
	return pattern{text: text, re: re}, err
}
