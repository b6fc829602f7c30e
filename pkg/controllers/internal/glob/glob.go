// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package glob matches names against patterns that tenants and operators write. It is the only
// matcher of globs in the project. Matching needs no memory, and no pattern makes it slow. It also
// measures how large regular expressions are, which the originals' annotations may have.
package glob

import (
	"fmt"
	"regexp/syntax"
	"slices"
	"strings"
)

// The longest patterns, in bytes: a longer one could match no name of a namespace (RFC 1123 label) or
// of an object (RFC 1123 subdomain) that a shorter one does not match too.
const (
	MaxNamespace = 63
	MaxName      = 253
)

// Check returns why a pattern does not count, or "" if it does. limit is [MaxNamespace] or [MaxName].
func Check(pattern string, limit int) string {
	switch {
	case pattern == "":
		return "is empty"
	case len(pattern) > limit:
		return fmt.Sprintf("is longer than %d characters", limit)
	}
	return ""
}

// MatchAny reports whether one of the patterns matches the name.
func MatchAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool { return Match(pattern, name) })
}

// Match reports whether the pattern matches the whole name. In it, * stands for any text, also for
// none, and ? for one byte. Nothing else is special. It takes at most len(pattern) times len(name)
// steps, and usually len(name).
func Match(pattern, name string) bool {
	part, rest, more := strings.Cut(pattern, "*")
	if !more {
		return len(name) == len(part) && matchesPrefix(name, part)
	}
	if !matchesPrefix(name, part) {
		return false
	}
	name = name[len(part):]
	// Each part between two stars is taken where it first occurs, since that leaves most of the name.
	for {
		if part, rest, more = strings.Cut(rest, "*"); !more {
			return len(name) >= len(part) && matchesPrefix(name[len(name)-len(part):], part)
		}
		for !matchesPrefix(name, part) {
			if name == "" {
				return false
			}
			name = name[1:]
		}
		name = name[len(part):]
	}
}

// matchesPrefix reports whether the name begins with a part of a pattern that has no star.
func matchesPrefix(name, part string) bool {
	if len(name) < len(part) {
		return false
	}
	for i := range len(part) {
		if part[i] != '?' && part[i] != name[i] {
			return false
		}
	}
	return true
}

// ExpressionSize returns about how many steps an expression takes for each character of a name, and to how
// many instructions it is compiled: each repetition is written out. Plain text takes few steps. The parser
// limits nested repetitions to 1,000 in all.
func ExpressionSize(re *syntax.Regexp) int {
	n := 1 + len(re.Rune) // the ranges of a class
	if re.Op == syntax.OpLiteral {
		n = 1 + len(re.Rune)/8
	}
	for _, sub := range re.Sub {
		n += ExpressionSize(sub)
	}
	return n * max(1, re.Min, re.Max) // Min and Max are 0 except for a repetition
}
