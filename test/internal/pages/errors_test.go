// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

var (
	// errorInCode is the text of a line of the log with the level Error.
	errorInCode = regexp.MustCompile(`(?:[lL]ogger(?:\(\))?|klog\.[A-Za-z]+\([a-z]*\))\.Error\(\s*[A-Za-z.()]+,\s*"([A-Z][^"]*)"`)
	// errorInPage is such a text, or its beginning, as a page quotes it.
	errorInPage = regexp.MustCompile(`(^|[^*])\*([A-Za-z][^*]+)\*($|[^*])`)
)

// Whoever is on call finds each error of the log in the pages of operating.
func TestDocsHaveEveryErrorOfTheLog(t *testing.T) {
	unexplained := map[string]string{
		"Background function failed while the loop was stopping": "its work was to end",
		"Requests did not end in time":                           "the process ends",
		"Cannot open a cluster":                                  "a bug: the options of the loop are wrong",
		"Cannot follow a federated type":                         "a bug: the need of the type is wrong",
	}
	code := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range errorInCode.FindAllStringSubmatch(string(text), -1) {
			code[m[1]] = true
		}
		return err
	})
	assert.NoError(t, err)
	pages, err := filepath.Glob(filepath.Join(root, "docs/operate/*.md"))
	assert.NoError(t, err)
	var quoted []string
	for _, path := range pages {
		text, err := os.ReadFile(path)
		assert.NoError(t, err)
		for _, m := range errorInPage.FindAllStringSubmatch(strings.Join(strings.Fields(string(text)), " "), -1) {
			quoted = append(quoted, m[2])
		}
	}
	for _, text := range slices.Sorted(maps.Keys(code)) {
		explained := slices.ContainsFunc(quoted, func(q string) bool {
			return len(strings.Fields(q)) > 1 && strings.HasPrefix(text, q) || q == "panicked" && strings.Contains(text, q)
		})
		switch _, excepted := unexplained[text]; {
		case explained && excepted:
			t.Errorf("a page explains %q, which is an exception here", text)
		case !explained && !excepted:
			t.Errorf("no page explains %q", text)
		}
		delete(unexplained, text)
	}
	for text := range unexplained {
		t.Errorf("no code logs %q", text)
	}
	if len(code) < 30 {
		t.Errorf("%d errors: these are not all", len(code))
	}
}
