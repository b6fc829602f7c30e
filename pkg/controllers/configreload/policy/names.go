// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/patternlock"
)

// names is a list of names of one type of source.
type names struct {
	exact map[string]struct{} // a source of that name may be waited for
	globs []string
	re    *regexp.Regexp // all expressions of the list; nil: there is none
	// hasExpressions is set in an outline if there are expressions.
	hasExpressions bool
	// steps is what each character of a name costs to match, see [Selection.Steps].
	steps int
}

func (n *names) isEmpty() bool { return len(n.exact) == 0 && !n.hasPatterns() }

// hasPatterns reports whether anything but an exact name is in the list.
func (n *names) hasPatterns() bool { return len(n.globs) > 0 || n.re != nil || n.hasExpressions }

func (n *names) hasExact(name string) bool {
	_, ok := n.exact[name]
	return ok
}

func (n *names) match(name string) bool {
	return n.hasExact(name) || n.hasPatterns() && patternlock.Do(func() bool {
		return glob.MatchAny(n.globs, name) || n.re != nil && n.re.MatchString(name)
	})
}

func (n *names) add(name string) {
	if n.exact == nil {
		n.exact = map[string]struct{}{}
	}
	n.exact[name] = struct{}{}
}

func (n *names) addGlob(pattern string) {
	n.globs = append(n.globs, pattern)
	n.steps += 1 + len(pattern)/8 // a glob's step is cheaper than a regular expression's
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
	// maxSteps limits the expressions of one list. A list of maxList bytes could hold repetitions of
	// many millions of steps, which would exhaust the memory of every replica, and some thousand
	// wildcards, which would take many milliseconds for each name of the namespace.
	maxSteps = 500
)

var (
	errListTooLong = fmt.Errorf("the list is longer than %d KiB", maxList>>10)
	errTooLarge    = errors.New("its repetitions are too large")
)

// parseExpression parses an expression of the original's lists, for whole names. It subtracts the cost of
// the expression from steps.
func parseExpression(item string, steps *int) (*syntax.Regexp, error) {
	if problem := glob.Check(item, glob.MaxName); problem != "" {
		return nil, errors.New(problem)
	}
	if *steps < 0 {
		return nil, errTooLarge
	}
	parsed, err := syntax.Parse("^"+item+"$", syntax.Perl)
	if err != nil {
		return nil, err
	}
	if *steps -= glob.ExpressionSize(parsed); *steps < 0 {
		return nil, errTooLarge
	}
	return parsed, nil
}

// compileExpressions returns one expression for all of a list. A common beginning is in it once.
func compileExpressions(all []*syntax.Regexp) (*regexp.Regexp, error) {
	alternatives := make([]string, len(all))
	for i, parsed := range all {
		simplifyExpression(parsed)
		alternatives[i] = "(?:" + parsed.String() + ")"
	}
	return regexp.Compile(strings.Join(alternatives, "|"))
}

// simplifyExpression removes group names, which must be unique, and replaces \A by ^: names have one line,
// and regexp compiles \A in cubic time.
func simplifyExpression(re *syntax.Regexp) {
	re.Name = ""
	if re.Op == syntax.OpBeginText {
		re.Op = syntax.OpBeginLine
	}
	for _, sub := range re.Sub {
		simplifyExpression(sub)
	}
}
