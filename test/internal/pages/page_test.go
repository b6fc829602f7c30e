// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

const root = "../../.."

func readPages(t *testing.T) map[string]*Page {
	t.Helper()
	list, err := ReadAll(root)
	assert.NoError(t, err)
	paths := map[string]*Page{}
	for _, p := range list {
		paths[p.Path] = p
	}
	return paths
}

// ReadAll returns an error if a block of commands is not marked, or has prompts.
func TestDocsCommandsAreRunOrSayWhyNot(t *testing.T) {
	run, explained := 0, 0
	for _, p := range readPages(t) {
		for _, b := range p.Blocks {
			if b.Run {
				run++
			} else {
				explained++
			}
		}
	}
	if run < 5 || explained < 5 {
		t.Errorf("%d blocks that are run and %d that are not: these are not all", run, explained)
	}
}

func TestDocsLinksLeadSomewhere(t *testing.T) {
	all := readPages(t)
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/README.md", "deploy/helm/quartermaster/README.md"} {
		if all[name] == nil {
			t.Errorf("no page %s", name)
		}
	}
	for _, p := range all {
		for _, l := range p.Links {
			if strings.Contains(l, "://") || strings.HasPrefix(l, "mailto:") {
				continue
			}
			path, fragment, _ := strings.Cut(l, "#")
			target := p.Path
			if path != "" {
				target = filepath.Join(filepath.Dir(p.Path), path)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", p.Path, l)
			} else if other := all[target]; fragment != "" && other != nil && !other.Anchors[fragment] {
				t.Errorf("%s links to %s, and there is no such heading", p.Path, l)
			}
		}
	}
}

func TestDocsPagesAreInTheIndex(t *testing.T) {
	all := readPages(t)
	found := map[string]bool{}
	for _, index := range []string{"docs/README.md", "docs/adr/README.md"} {
		for _, l := range all[index].Links {
			path, _, _ := strings.Cut(l, "#")
			found[filepath.Join(filepath.Dir(index), path)] = true
		}
	}
	for path := range all {
		if strings.HasPrefix(path, "docs/") && path != "docs/README.md" && !strings.HasPrefix(path, "docs/adr/0") && !found[path] {
			t.Errorf("docs/README.md has no link to %s", path)
		}
	}
}

func TestDocsReadmesListTheirFolders(t *testing.T) {
	all := readPages(t)
	for _, dir := range []string{"deploy/components", "deploy/examples", "examples"} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		assert.NoError(t, err)
		for _, e := range entries {
			if page := all[dir+"/README.md"]; e.IsDir() && (page == nil || !slices.Contains(page.Links, e.Name())) {
				t.Errorf("%s/README.md has no link to %s", dir, e.Name())
			}
		}
	}
}

func TestParseChecksEachBlock(t *testing.T) {
	const block = "```"
	for name, tc := range map[string]struct {
		page string
		want *Page
		err  string
	}{
		"a script": {"<!-- not run: too long -->\n" + block + "sh\nfor f in a; do\n  true\ndone\n" + block,
			&Page{Blocks: []Block{{Line: 2, Reason: "too long", Script: "for f in a; do\n  true\ndone\n"}}}, ""},
		"a script in a list": {"- a\n  <!-- run -->\n  " + block + "sh\n  # b\n  cat <<E | \\\n    cat\n  c\n  E\n  " + block,
			&Page{Blocks: []Block{{Line: 3, Run: true, Script: "# b\ncat <<E | \\\n  cat\nc\nE\n"}}}, ""},
		"output in a block of its own": {"<!-- run -->\n" + block + "sh\ntrue\n" + block + "\n\n" + block + "console\nNAME\n" + block,
			&Page{Blocks: []Block{{Line: 2, Run: true, Script: "true\n"}}}, ""},
		"a prompt":                     {"<!-- run -->\n" + block + "sh\ntrue\n$ true\n" + block, nil, "page.md:2: commands are in a block sh without prompts"},
		"a prompt in a list":           {"- a\n  " + block + "\n  $ true\n  " + block, nil, "page.md:2: commands are in a block sh without prompts"},
		"no mark":                      {"text\n" + block + "sh\ntrue\n" + block, nil, `page.md:2: the line above these commands must be`},
		"a mark without a reason":      {"<!-- not run: -->\n" + block + "sh\ntrue\n" + block, nil, `is "<!-- not run: -->"`},
		"another mark":                 {"<!-- runs -->\n" + block + "sh\ntrue\n" + block, nil, "page.md:2"},
		"a mark above output":          {"<!-- run -->\n" + block + "console\ntrue\n" + block, nil, `page.md:2: commands are in a block sh, and this one is "console"`},
		"a block that does not end":    {block + "yaml\na: b\n", nil, "page.md:1: the block does not end"},
		"other blocks are no commands": {block + "go\na b\n" + block + "\n" + block + "\na `drawing b`\n" + block, &Page{}, ""},
		"YAML in a list": {"- a\n  " + block + "yaml\n  a:\n    b: c\n  " + block,
			&Page{YAML: []Block{{Line: 2, Script: "a:\n  b: c\n"}}}, ""},
		"commands in the text": {"# A\n`kubectl get`, `kubectl` and `kubectl\nget pods`.\n\n| `a b` |", &Page{Anchors: map[string]bool{"a": true},
			Text: []Mention{{2, []string{"kubectl", "get"}}, {2, []string{"kubectl", "get", "pods"}}, {5, []string{"a", "b"}}}}, ""},
		"links and headings":            {"# A `b`, (c)!\n[a](b.md#c) and `[x](y)`", &Page{Links: []string{"b.md#c"}, Anchors: map[string]bool{"a-b-c": true}}, ""},
		"no links and headings in code": {block + "go\n# a\n[a](b)\n" + block, &Page{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parse("page.md", tc.page)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error %v, want %s", err, tc.err)
				}
				return
			}
			assert.NoError(t, err)
			tc.want.Path = "page.md"
			if tc.want.Anchors == nil {
				tc.want.Anchors = map[string]bool{}
			}
			assert.Equal(t, "page", tc.want, got)
		})
	}
}
