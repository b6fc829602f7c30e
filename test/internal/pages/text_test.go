// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// It finds a key that is there twice, too.
func TestDocsYAMLIsYAML(t *testing.T) {
	found := 0
	for _, p := range readPages(t) {
		for _, b := range p.YAML {
			found++
			var value any
			if err := yaml.UnmarshalStrict([]byte(b.Script), &value); err != nil {
				t.Errorf("%s:%d: %v", p.Path, b.Line, err)
			}
		}
	}
	if found < 5 {
		t.Errorf("%d blocks: these are not all", found)
	}
}

var (
	target    = regexp.MustCompile(`(?m)^([a-z-]+):`)
	word      = regexp.MustCompile(`^[a-z-]+$`)
	makeLines = regexp.MustCompile(`(?m)^make( .*)?$`)
)

func TestDocsNameMakeTargetsThatExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	assert.NoError(t, err)
	targets := map[string]bool{}
	for _, m := range target.FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	found := 0
	check := func(page string, line int, words []string) {
		found++
		for _, w := range words {
			if w == "#" {
				return
			}
			if word.MatchString(w) && !targets[w] {
				t.Errorf("%s:%d: make has no target %s", page, line, w)
			}
		}
	}
	for _, p := range readPages(t) {
		for _, m := range p.Text {
			if m.Words[0] == "make" {
				check(p.Path, m.Line, m.Words[1:])
			}
		}
		for _, b := range p.Blocks {
			for _, m := range makeLines.FindAllStringSubmatch(b.Script, -1) {
				check(p.Path, b.Line, strings.Fields(m[1]))
			}
		}
	}
	if found < 20 {
		t.Errorf("%d commands of make: these are not all", found)
	}
}

// testReference is a test that a page names. `TestLong...` in CONTRIBUTING.md is the beginning of names, and
// does not match.
var testReference = regexp.MustCompile("`(Test[A-Z]\\w+)`")

// makefileTest is a test that the Makefile names, or several with one beginning, or the beginning of names.
var makefileTest = regexp.MustCompile(`\bTest(?:\(([\w|]+)\)|(\w+))(\$\$)?`)

func TestDocsNameTestsThatExist(t *testing.T) {
	var tests strings.Builder
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		tests.Write(text)
		return err
	})
	assert.NoError(t, err)
	found := 0
	for path := range readPages(t) {
		text, err := os.ReadFile(filepath.Join(root, path))
		assert.NoError(t, err)
		for _, m := range testReference.FindAllStringSubmatch(string(text), -1) {
			found++
			if !strings.Contains(tests.String(), "func "+m[1]+"(") {
				t.Errorf("%s names the test %s, which does not exist", path, m[1])
			}
		}
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	assert.NoError(t, err)
	for _, m := range makefileTest.FindAllStringSubmatch(string(makefile), -1) {
		for name := range strings.SplitSeq(m[1]+m[2], "|") {
			found++
			if name += strings.ReplaceAll(m[3], "$$", "("); !strings.Contains(tests.String(), "func Test"+name) {
				t.Errorf("the Makefile names the test Test%s, which does not exist", strings.TrimSuffix(name, "("))
			}
		}
	}
	if found < 15 {
		t.Errorf("%d names of tests: these are not all", found)
	}
}

// repositoryPath is a folder or a file of the repository, or a pattern of such.
var repositoryPath = regexp.MustCompile("`((?:cmd|deploy|examples|hack|internal|pkg|test)(?:/[\\w.*/-]+)?)`")

func TestArchitectureNamesPathsThatExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	assert.NoError(t, err)
	found := repositoryPath.FindAllSubmatch(text, -1)
	for _, m := range found {
		if matches, err := filepath.Glob(filepath.Join(root, string(m[1]))); err != nil || len(matches) == 0 {
			t.Errorf("ARCHITECTURE.md names %s, which does not exist: %v", m[1], err)
		}
	}
	if len(found) < 35 {
		t.Errorf("%d names: these are not all", len(found))
	}
}

// pageReference is a page that a file names, by its address or by its path.
var pageReference = regexp.MustCompile(`(?:https://github\.com/quartermaster-dev/quartermaster/blob/main/|\b)(docs/[\w./-]+\.md)(?:#([\w-]+))?`)

// Alerts, comments and messages name pages, and links do not break with them.
func TestDocsPagesThatAreNamedExist(t *testing.T) {
	all := readPages(t)
	found := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case isSkipped(root, path, d):
			return filepath.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || bytes.IndexByte(text, 0) >= 0 {
			return err
		}
		for _, m := range pageReference.FindAllSubmatch(text, -1) {
			found++
			page, fragment := all[string(m[1])], string(m[2])
			if page == nil || fragment != "" && !page.Anchors[fragment] {
				t.Errorf("%s names %s, which does not exist", path, m[0])
			}
		}
		return nil
	})
	assert.NoError(t, err)
	if found < 50 {
		t.Errorf("%d names: these are not all", found)
	}
}

var listMark = regexp.MustCompile(`^ *(?:[-*+]|[0-9]+[.)]) +`)

// breaksParagraph reports whether line goes on with the paragraph of the line above, and begins with the mark
// of a list, such as the number in "step 1.": then it may be rendered as a list. A list of its own comes
// after an empty line, a full stop or a colon.
func breaksParagraph(above, line string) bool {
	indent := func(s string) int { return len(s) - len(strings.TrimLeft(s, " ")) }
	text := indent(above)
	if mark := listMark.FindString(above); mark != "" {
		text = len(mark)
	}
	return listMark.MatchString(line) && indent(line) == text &&
		strings.TrimSpace(above) != "" && !strings.HasSuffix(above, ":") && !strings.HasSuffix(above, ".")
}

func TestBreaksParagraphFindsListMarks(t *testing.T) {
	for name, tc := range map[string]struct {
		above, line string
		want        bool
	}{
		"a number in an item":       {"4. Do as in step", "   1. Then go on.", true},
		"a number in a paragraph":   {"Do as in step", "1. Then go on.", true},
		"in an item's second line":  {"   as in step", "   1. Then go on.", true},
		"a dash":                    {"A controller", "- one of six - does it.", true},
		"the next item":             {"3. Do this.", "4. Do that.", false},
		"the next item, below text": {"   and this.", "4. Do that.", false},
		"a list after a colon":      {"3. Copy one of these:", "   - this;", false},
		"a list after a sentence":   {"4. Do that.", "   - Until then, wait.", false},
		"a list after a blank line": {"", "1. Do this.", false},
		"a number with a fraction":  {"The version", "1.36 is tested.", false},
	} {
		if got := breaksParagraph(tc.above, tc.line); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

// Tables, blocks, and lines without a blank, such as addresses, cannot be wrapped.
func TestDocsTextIsWrapped(t *testing.T) {
	for _, p := range readPages(t) {
		text, err := os.ReadFile(filepath.Join(root, p.Path))
		assert.NoError(t, err)
		inBlock, above := false, ""
		for i, line := range strings.Split(string(text), "\n") {
			if !inBlock && breaksParagraph(above, line) {
				t.Errorf("%s:%d begins with the mark of a list within a paragraph", p.Path, i+1)
			}
			above = line
			trimmed := strings.TrimSpace(line)
			if strings.HasPrefix(trimmed, "```") {
				inBlock = !inBlock
			}
			if inBlock || strings.HasPrefix(trimmed, "|") || !strings.Contains(trimmed, " ") {
				continue
			}
			if n := utf8.RuneCountInString(line); n > 120 {
				t.Errorf("%s:%d has %d columns, more than 120", p.Path, i+1, n)
			}
		}
	}
}

// TestDocsShowTheExample looks for each line of the steps that come before a heading in the sources of
// examples/widget. A line with "…" stands for what was left out.
func TestDocsShowTheExample(t *testing.T) {
	const path, end = "docs/extend/own-controllers.md", "\n### 8. "
	page, err := os.ReadFile(filepath.Join(root, path))
	assert.NoError(t, err)
	var sources []byte
	for _, file := range []string{"api/v1/groupversion.go", "controller/controller.go"} {
		text, err := os.ReadFile(filepath.Join(root, "examples/widget", file))
		assert.NoError(t, err)
		sources = append(sources, text...)
	}
	steps, _, found := strings.Cut(string(page), end)
	blocks := strings.Split(steps, "```")
	if !found || len(blocks) < 15 {
		t.Fatalf("%s has %d blocks before %q: these are not all", path, len(blocks)/2, end)
	}
	for i := 1; i < len(blocks); i += 2 {
		if strings.HasPrefix(blocks[i], "sh\n") || strings.HasPrefix(blocks[i], "mermaid\n") {
			continue // commands, a diagram
		}
		for line := range strings.SplitSeq(strings.TrimPrefix(blocks[i], "go\n"), "\n") {
			if line = strings.TrimSpace(line); !strings.Contains(line, "…") && !bytes.Contains(sources, []byte(line)) {
				t.Errorf("%s shows a line that examples/widget does not have: %s", path, line)
			}
		}
	}
}
