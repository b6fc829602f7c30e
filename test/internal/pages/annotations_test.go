// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
)

var (
	keyInCode = regexp.MustCompile(`"([a-z.]*\b(?:quartermaster\.dev|kubefed\.io)/[a-z-]+)"|\bnativePrefix\s*\+\s*"([a-z-]+)"`)
	keyInPage = regexp.MustCompile("`([a-z.]*\\b(?:quartermaster\\.dev|kubefed\\.io)/[a-z-]+)`")
)

func TestDocsHaveEveryAnnotation(t *testing.T) {
	code := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range keyInCode.FindAllStringSubmatch(string(text), -1) {
			switch key := m[1]; {
			case key == "":
				code["quartermaster.dev/"+m[2]] = true
			case strings.HasSuffix(key, "-"):
				for _, name := range policy.Keys() {
					code[key+name] = true
				}
			case key != "quartermaster.dev/last-event": // an Event that is never sent
				code[key] = true
			}
		}
		return err
	})
	assert.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(root, "docs/controllers/annotations.md"))
	assert.NoError(t, err)
	page := map[string]bool{}
	for _, m := range keyInPage.FindAllStringSubmatch(string(text), -1) {
		page[m[1]] = true
		if !code[m[1]] {
			t.Errorf("the page has %s, and the code has not", m[1])
		}
	}
	for key := range code {
		if !page[key] {
			t.Errorf("the page lacks %s", key)
		}
	}
	if len(code) < 30 {
		t.Errorf("%d keys: these are not all", len(code))
	}
}
