// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command site writes the pages that docs/README.md links to as a static site with a search, which needs no
// server. It writes nothing if a link of the site leads nowhere. `make site` runs it.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html"
	"html/template"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	chroma "github.com/alecthomas/chroma/v2/formatters/html"
	"github.com/alecthomas/chroma/v2/styles"
	"github.com/yuin/goldmark"
	highlighting "github.com/yuin/goldmark-highlighting/v2"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

const forge = "https://github.com/quartermaster-dev/quartermaster"

var (
	//go:embed page.html site.css site.js
	own      embed.FS
	layout   = template.Must(template.ParseFS(own, "page.html"))
	release  = regexp.MustCompile(`^v\d+\.\d+\.\d+(-(alpha|beta|rc)\.\d+)?$`)
	target   = regexp.MustCompile(`\s(?:href|src)="([^"]*)"`)
	colors   = chroma.New(chroma.WithClasses(true))
	markdown = goldmark.New(goldmark.WithParserOptions(parser.WithAutoHeadingID()), goldmark.WithExtensions(
		extension.GFM, highlighting.NewHighlighting(highlighting.WithFormatOptions(chroma.WithClasses(true)))))
)

// site is what all pages have in common.
type site struct {
	repository fs.FS
	Version    string
	Versions   string // URL of a list of versions, relative to the folder of the site, or empty
	Groups     []*group
	pages      map[string]*page  // by path
	files      map[string][]byte // of the site
}

// group is a part of the navigation. Groups inside a group come after it.
type group struct {
	Title  string
	Inside bool
	Pages  []*page
}

type page struct {
	Path, URL, Title string // Path is relative to the root of the repository, URL to that of the site
	Inside           bool   // is listed by the index of its folder, above it
	Sections         []*section
	source           []byte
	doc              ast.Node
}

// section is a heading with what follows it. The search finds sections.
type section struct {
	Level                  int `json:"-"`
	Page, Title, URL, Text string
}

// Short returns the title for the narrow list beside the page: of an alert such as QuartermasterDown, Down.
func (s *section) Short() string {
	if name, ok := strings.CutPrefix(s.Title, "Quartermaster"); ok && !strings.ContainsAny(s.Title, " '") && name != "" {
		return name
	}
	return s.Title
}

func main() {
	out := flag.String("out", "../../bin/site", "folder to replace")
	version := flag.String("version", "", "version to show; links to code lead to it if it is a release, otherwise to main")
	versions := flag.String("versions", "", "URL of a list of versions, relative to the folder of the site")
	flag.Parse()
	if err := write(*out, *version, *versions); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func write(out, version, versions string) error {
	files, err := build(os.DirFS("../.."), version, versions)
	if err := errors.Join(err, check(files)); err != nil {
		return err
	}
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	for name, content := range files {
		name = filepath.Join(out, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, content, 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// build returns the files of the site.
func build(repository fs.FS, version, versions string) (map[string][]byte, error) {
	s := &site{repository: repository, Version: version, Versions: versions, pages: map[string]*page{}, files: map[string][]byte{}}
	if err := s.read(); err != nil {
		return nil, err
	}
	var sections []*section
	for _, g := range s.Groups {
		for _, p := range g.Pages {
			if err := s.render(p); err != nil {
				return nil, fmt.Errorf("%s: %w", p.Path, err)
			}
			if p.Path == "docs/bench/rows.md" {
				p.Sections = p.Sections[:1] // the search finds the page, and none of its figures
			}
			sections = append(sections, p.Sections...)
		}
	}
	index, err := json.Marshal(sections)
	// A script and not JSON, which browsers do not read without a server.
	s.files["index.js"] = append([]byte("sections = "), index...)
	s.files["site.js"], _ = own.ReadFile("site.js")
	css, _ := own.ReadFile("site.css")
	b := bytes.NewBuffer(css)
	for _, style := range [][2]string{{"light", "github"}, {"dark", "github-dark"}} {
		fmt.Fprintf(b, "@media (prefers-color-scheme: %s) {\n", style[0])
		err = errors.Join(err, colors.WriteCSS(b, styles.Get(style[1])))
		fmt.Fprintln(b, "}")
	}
	s.files["site.css"] = b.Bytes()
	return s.files, err
}

// read reads the pages in the order of docs/README.md, whose headings, and lines with a colon above a list,
// are the groups.
func (s *site) read() error {
	s.Groups = []*group{{}}
	if err := s.add(false, "README.md", "docs/README.md"); err != nil {
		return err
	}
	index := s.pages["docs/README.md"]
	for n := index.doc.FirstChild(); n != nil; n = n.NextSibling() {
		title, isTitle := strings.CutSuffix(words(n, index.source), ":")
		if heading, ok := n.(*ast.Heading); ok && heading.Level == 2 {
			s.Groups = append(s.Groups, &group{Title: title})
		} else if next := n.NextSibling(); isTitle && next != nil && next.Kind() == ast.KindList {
			s.Groups = append(s.Groups, &group{Title: title, Inside: true})
		} else if len(s.Groups) > 1 {
			if err := s.add(false, links(index.Path, n)...); err != nil {
				return err
			}
		}
	}
	return nil
}

// add adds those of the files that are pages and not yet there to the last group. After the index of a folder
// come the pages of the folder that the index links to.
func (s *site) add(inside bool, names ...string) error {
	g := s.Groups[len(s.Groups)-1]
	for _, name := range names {
		if s.pages[name] != nil || path.Ext(name) != ".md" {
			continue
		}
		source, err := fs.ReadFile(s.repository, name)
		if err != nil {
			return err
		}
		p := &page{Path: name, URL: strings.TrimSuffix(name, ".md") + ".html", Inside: inside, source: source}
		p.doc = markdown.Parser().Parse(text.NewReader(source))
		for n := p.doc.FirstChild(); n != nil; n = n.NextSibling() {
			content := words(n, source)
			if heading, ok := n.(*ast.Heading); ok {
				id, _ := heading.AttributeString("id")
				p.Sections = append(p.Sections, &section{Level: heading.Level, Title: content, URL: fmt.Sprintf("#%s", id)})
			} else if i := len(p.Sections) - 1; i >= 0 {
				p.Sections[i].Text += content + " "
			}
		}
		if len(p.Sections) == 0 {
			return fmt.Errorf("%s has no title", name)
		}
		p.Title, s.pages[name], g.Pages = p.Sections[0].Title, p, append(g.Pages, p)
		if dir, base := path.Split(name); base == "README.md" {
			p.URL = dir + "index.html"
			same := slices.DeleteFunc(links(name, p.doc), func(l string) bool { return path.Dir(l)+"/" != dir })
			if err := s.add(true, same...); err != nil {
				return err
			}
		}
		for _, section := range p.Sections {
			section.Page, section.URL = p.Title, p.URL+section.URL
		}
	}
	return nil
}

func (s *site) render(p *page) error {
	err := ast.Walk(p.doc, func(n ast.Node, entering bool) (_ ast.WalkStatus, err error) {
		if l, ok := n.(*ast.Link); ok && entering {
			l.Destination, err = s.link(p, string(l.Destination))
		} else if i, ok := n.(*ast.Image); ok && entering {
			i.Destination, err = s.link(p, string(i.Destination))
		}
		return ast.WalkContinue, err
	})
	var content, whole bytes.Buffer
	err = errors.Join(err, markdown.Renderer().Render(&content, p.source, p.doc))
	err = errors.Join(err, layout.Execute(&whole, map[string]any{"Site": s, "Page": p, "Root": up(p),
		"Content": template.HTML(content.String()), "Source": forge + "/blob/" + s.ref() + "/" + p.Path}))
	s.files[p.URL] = whole.Bytes()
	return err
}

// link returns where a link of a page leads: in the site, or in the repository on the forge. A picture gets
// into the site.
func (s *site) link(from *page, link string) ([]byte, error) {
	to, fragment, ok := resolve(from.Path, link)
	if !ok {
		return []byte(link), nil
	}
	if fragment != "" {
		fragment = "#" + fragment
	}
	for _, name := range []string{to, path.Join(to, "README.md")} {
		if p := s.pages[name]; p != nil {
			return []byte(up(from) + p.URL + fragment), nil
		}
	}
	info, err := fs.Stat(s.repository, to)
	switch {
	case err != nil:
		return nil, err
	case path.Ext(to) == ".svg":
		s.files[to], err = fs.ReadFile(s.repository, to)
		return []byte(up(from) + to), err
	case info.IsDir():
		return []byte(forge + "/tree/" + s.ref() + "/" + to), nil
	}
	return []byte(forge + "/blob/" + s.ref() + "/" + to + fragment), nil
}

// ref returns the tag or the branch that has the code of the version.
func (s *site) ref() string {
	if release.MatchString(s.Version) {
		return s.Version
	}
	return "main"
}

// up returns the way from a page to the folder of the site.
func up(p *page) string { return strings.Repeat("../", strings.Count(p.URL, "/")) }

// words returns the text of a node, without markup.
func words(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && entering {
			b.Write(t.Value(source))
		} else if n.Kind() == ast.KindFencedCodeBlock && entering {
			b.Write(n.Lines().Value(source))
		}
		if t, ok := n.(*ast.Text); !entering && (n.Type() == ast.TypeBlock || ok && t.SoftLineBreak()) {
			b.WriteByte(' ')
		}
		return ast.WalkContinue, nil
	})
	return strings.Join(strings.Fields(b.String()), " ")
}

// links returns the paths in the repository that the links below a node of a page lead to.
func links(from string, n ast.Node) (paths []string) {
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if l, ok := n.(*ast.Link); ok && entering {
			if to, _, ok := resolve(from, string(l.Destination)); ok {
				paths = append(paths, to)
			}
		}
		return ast.WalkContinue, nil
	})
	return paths
}

// resolve returns the path and the fragment that a link of a file leads to, or false for another host.
func resolve(from, link string) (to, fragment string, ok bool) {
	u, err := url.Parse(link)
	if err != nil || u.IsAbs() || u.Host != "" {
		return "", "", false
	}
	if u.Path == "" {
		return from, u.Fragment, true
	}
	return path.Join(path.Dir(from), u.Path), u.Fragment, true
}

// check returns an error for each link in the files of a site to a file or an anchor that the site does not
// have. A list of versions is outside of the site.
func check(files map[string][]byte) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if path.Ext(name) != ".html" {
			continue
		}
		for _, m := range target.FindAllSubmatch(files[name], -1) {
			to, fragment, ok := resolve(name, html.UnescapeString(string(m[1])))
			content, exists := files[to]
			if ok && !strings.HasPrefix(to, "../") && (!exists || fragment != "" && !bytes.Contains(content, []byte(` id="`+fragment+`"`))) {
				errs = append(errs, fmt.Errorf("%s has a link to %s, which the site does not have", name, m[1]))
			}
		}
	}
	return errors.Join(errs...)
}
