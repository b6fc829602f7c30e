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
)

// reason is the reason of an Event, a condition or a status.
var reason = regexp.MustCompile("`([A-Z][A-Za-z]{7,})`")

// What a page says of an object that is left alone is what the controllers say.
func TestDocsNameReasonsThatExist(t *testing.T) {
	var code strings.Builder
	err := filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		code.Write(text)
		return err
	})
	assert.NoError(t, err)
	found, sections := 0, 0
	for path := range readPages(t) {
		text, err := os.ReadFile(filepath.Join(root, path))
		assert.NoError(t, err)
		_, section, ok := strings.Cut(string(text), "\n## It does nothing for my object\n")
		if !ok {
			continue
		}
		sections++
		section, _, _ = strings.Cut(section, "\n## ")
		for _, m := range reason.FindAllStringSubmatch(section, -1) {
			found++
			if !strings.Contains(code.String(), m[1]) {
				t.Errorf("%s: no controller says %s", path, m[1])
			}
		}
	}
	if found < 50 || sections != 6 {
		t.Errorf("%d reasons in %d sections: these are not all", found, sections)
	}
}
