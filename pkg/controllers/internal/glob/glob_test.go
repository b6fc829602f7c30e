// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package glob

import (
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestMatchAgreesWithRegularExpressions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.StringMatching(`[ab*?.]{0,8}`).Draw(t, "pattern")
		name := rapid.StringMatching(`[ab.]{0,10}`).Draw(t, "name")
		re := regexp.MustCompile("^" + strings.NewReplacer(`\*`, ".*", `\?`, ".").Replace(regexp.QuoteMeta(pattern)) + "$")
		if got, want := Match(pattern, name), re.MatchString(name); got != want {
			t.Errorf("Match(%q, %q) = %v, want %v", pattern, name, got, want)
		}
	})
}

func TestGlobRefusesWhatIsTooLong(t *testing.T) {
	for name, tc := range map[string]struct {
		pattern string
		limit   int
		want    string
	}{
		"an empty pattern is refused":                   {"", MaxName, "is empty"},
		"a pattern as long as a namespace counts":       {strings.Repeat("*", 63), MaxNamespace, ""},
		"a pattern longer than a namespace is refused":  {strings.Repeat("*", 64), MaxNamespace, "is longer than 63 characters"},
		"a pattern as long as an object's name counts":  {strings.Repeat("a", 253), MaxName, ""},
		"a pattern longer than any name is refused too": {strings.Repeat("a", 254), MaxName, "is longer than 253 characters"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Check(tc.pattern, tc.limit); got != tc.want {
				t.Errorf("Check() = %q, want %q", got, tc.want)
			}
		})
	}
}
