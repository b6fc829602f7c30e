// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pages reads the commands, the YAML and the links of the documentation, so that tests
// can run the commands. Each fenced block sh has commands, and one of two comments in the line above it,
// which the rendered page does not show:
//
//	<!-- run -->
//	<!-- not run: why -->
//
// It has neither prompts nor output, so that a reader can copy it. Output is in a block of its own, console.
package pages

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Page is a file of the documentation.
type Page struct {
	// Path is relative to the root of the repository.
	Path   string
	Blocks []Block
	// YAML has the blocks of that language, as Script.
	YAML []Block
	// Text has the commands with arguments that the text names, in code.
	Text []Mention
	// Links are the targets of the links to other files or places, as written.
	Links []string
	// Anchors are the fragments by which its headings can be linked to, as GitHub makes them.
	Anchors map[string]bool
}

// Mention is code in the text of a page, of several words.
type Mention struct {
	Line  int
	Words []string
}

// Block is a fenced block of commands.
type Block struct {
	Line int // of the fence
	// Run says that the commands are run; otherwise Reason says why not.
	Run    bool
	Reason string
	Script string
}

var (
	fence   = regexp.MustCompile("^\\s*```\\s*([a-z]*)")
	mark    = regexp.MustCompile(`^\s*<!-- (run|not run: \S.*) -->$`)
	heading = regexp.MustCompile(`^#+ (.*)$`)
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	code    = regexp.MustCompile("`[^`]*`")
	prompt  = regexp.MustCompile(`(?m)^\s*\$ `)
	shells  = map[string]bool{"sh": true, "bash": true, "shell": true}
)

// ReadAll reads all pages below root, the root of the repository. It returns an error for each that is
// not as this package wants it.
func ReadAll(root string) (pages []*Page, err error) {
	var errs []error
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case isSkipped(root, path, d), d.IsDir() && d.Name() == "testdata":
			return filepath.SkipDir
		case filepath.Ext(path) != ".md":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		page, err := parse(name, string(text))
		pages, errs = append(pages, page), append(errs, err)
		return nil
	})
	return pages, errors.Join(append(errs, err)...)
}

// isSkipped reports whether a folder has what is built, or what is not ours.
func isSkipped(root, path string, d fs.DirEntry) bool {
	switch {
	case !d.IsDir() || path == root:
		return false
	case filepath.Dir(path) == filepath.Clean(root) && (d.Name() == "bin" || d.Name() == "dist"):
		return true
	}
	return strings.HasPrefix(d.Name(), ".")
}

// parse returns an error for a block of commands that has no mark, or has prompts.
func parse(path, text string) (*Page, error) {
	p := &Page{Path: path, Anchors: map[string]bool{}}
	lines := strings.Split(text, "\n")
	prose := slices.Clone(lines) // lines of blocks are empty
	for i := 0; i < len(lines); i++ {
		if m := heading.FindStringSubmatch(lines[i]); m != nil {
			p.Anchors[anchor(m[1])] = true
		}
		m := fence.FindStringSubmatch(lines[i])
		if m == nil {
			// A link may be continued in the next line.
			for _, l := range link.FindAllStringSubmatch(code.ReplaceAllString(lines[i], "`"), -1) {
				p.Links = append(p.Links, l[1])
			}
			continue
		}
		start := i
		for i++; i < len(lines) && fence.FindString(lines[i]) == ""; i++ {
		}
		if i == len(lines) {
			return nil, fmt.Errorf("%s:%d: the block does not end", path, start+1)
		}
		clear(prose[start : i+1])
		text := unindent(lines[start : i+1])
		if m[1] == "yaml" {
			p.YAML = append(p.YAML, Block{Line: start + 1, Script: text})
		}
		above := ""
		if start > 0 {
			above = lines[start-1]
		}
		found := mark.FindStringSubmatch(above)
		switch {
		case prompt.MatchString(text):
			return nil, fmt.Errorf("%s:%d: commands are in a block sh without prompts, and their output is in a block console after it",
				path, start+1)
		case found == nil && shells[m[1]]:
			return nil, fmt.Errorf("%s:%d: the line above these commands must be <!-- run --> or <!-- not run: why -->, and is %q",
				path, start+1, above)
		case found == nil:
			continue
		case m[1] != "sh":
			return nil, fmt.Errorf("%s:%d: commands are in a block sh, and this one is %q", path, start+1, m[1])
		}
		b := Block{Line: start + 1, Script: text}
		b.Reason, _ = strings.CutPrefix(found[1], "not run: ")
		if b.Run = found[1] == "run"; b.Run {
			b.Reason = ""
		}
		p.Blocks = append(p.Blocks, b)
	}
	p.Text = mentions(prose)
	return p, nil
}

// mentions returns the code of several words in the lines. It may go on in the next line of a paragraph.
func mentions(lines []string) (found []Mention) {
	for start := 0; start < len(lines); {
		end := start + 1
		for end < len(lines) && strings.TrimSpace(lines[end]) != "" {
			end++
		}
		paragraph := strings.Join(lines[start:end], "\n")
		for _, span := range code.FindAllStringIndex(paragraph, -1) {
			if words := strings.Fields(strings.Trim(paragraph[span[0]:span[1]], "`")); len(words) > 1 {
				found = append(found, Mention{Line: start + 1 + strings.Count(paragraph[:span[0]], "\n"), Words: words})
			}
		}
		start = end
	}
	return found
}

// unindent returns what is between the fences, without their indentation.
func unindent(block []string) string {
	indent, _, _ := strings.Cut(block[0], "`")
	var b strings.Builder
	for _, line := range block[1 : len(block)-1] {
		b.WriteString(strings.TrimPrefix(line, indent) + "\n")
	}
	return b.String()
}

// anchor returns the fragment that GitHub gives a heading.
func anchor(title string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.TrimSpace(title)) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			b.WriteRune(r)
		}
	}
	return b.String()
}
