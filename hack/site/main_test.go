// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
	"testing/fstest"
)

func TestSiteHasEveryPageAndNoBrokenLink(t *testing.T) {
	repository := os.DirFS("../..")
	files, err := build(repository, "v0.1.0", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := check(files); err != nil {
		t.Error(err)
	}
	pages, err := fs.Glob(repository, "*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages = append(pages, "deploy/components/README.md", "deploy/examples/README.md", "deploy/helm/quartermaster/README.md", "examples/README.md")
	err = fs.WalkDir(repository, "docs", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ".md" {
			pages = append(pages, name)
		}
		return err
	})
	if err != nil || len(pages) < 70 {
		t.Fatalf("%d pages, error %v", len(pages), err)
	}
	home, index := string(files["index.html"]), string(files["index.js"])
	for _, name := range pages {
		url := strings.TrimSuffix(strings.Replace(name, "README.md", "index.md", 1), ".md") + ".html"
		if files[url] == nil || !strings.Contains(home, `<a href="`+url+`"`) || !strings.Contains(index, `"URL":"`+url+"#") {
			t.Errorf("%s is not in the site, its navigation or its search: docs/README.md must link to it in a list", name)
		}
	}
}

func TestLinksLeadToTheSiteOrTheForge(t *testing.T) {
	const tag, main = "v1.2.0", "v1.2.0-3-gabcdef0"
	for name, tc := range map[string]struct{ version, link, want string }{
		"a page":                           {main, "[l](../b.md)", `<a href="../../x/b.html">`},
		"a heading of a page":              {main, "[l](../b.md#c-d)", `<a href="../../x/b.html#c-d">`},
		"a heading of the same page":       {main, "[l](#a)", `<a href="../../x/a/a.html#a">`},
		"the first page":                   {main, "[l](../../README.md)", `<a href="../../index.html">`},
		"the index of a folder":            {main, "[l](../../docs)", `<a href="../../docs/index.html">`},
		"code":                             {main, "[l](../../pkg/x.go#L3)", `<a href="` + forge + `/blob/main/pkg/x.go#L3">`},
		"code of a release":                {tag, "[l](../../pkg/x.go)", `<a href="` + forge + `/blob/v1.2.0/pkg/x.go">`},
		"code of a candidate of a release": {"v1.2.0-rc.1", "[l](../../pkg/x.go)", `<a href="` + forge + `/blob/v1.2.0-rc.1/pkg/x.go">`},
		"a folder of code":                 {tag, "[l](../../pkg)", `<a href="` + forge + `/tree/v1.2.0/pkg">`},
		"a picture":                        {main, "![p](p.svg)", `<img src="../../x/a/p.svg"`},
		"another site":                     {main, "[l](https://example.com/b.md)", `<a href="https://example.com/b.md">`},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := build(repository(tc.link), tc.version, "")
			if err != nil {
				t.Fatal(err)
			}
			if got := string(files["x/a/a.html"]); !strings.Contains(got, tc.want) {
				t.Errorf("no %s in\n%s", tc.want, got)
			}
		})
	}
}

func TestCheckFindsWhatIsBroken(t *testing.T) {
	for name, tc := range map[string]struct{ link, want string }{
		"a heading that does not exist":                  {"[l](../b.md#d)", "x/a/a.html has a link to ../../x/b.html#d"},
		"a heading that does not exist on the same page": {"[l](#d)", "x/a/a.html has a link to ../../x/a/a.html#d"},
		"a page that does not exist":                     {"[l](c.md)", "x/a/c.md: file does not exist"},
		"a picture that does not exist":                  {"![p](q.svg)", "x/a/q.svg: file does not exist"},
		"a way out of the repository":                    {"[l](../../../x.md)", "../x.md: file does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := build(repository(tc.link), "", "")
			if err == nil {
				err = check(files)
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
}

func TestListBesideThePageHasShortNamesOfAlerts(t *testing.T) {
	for title, want := range map[string]string{"QuartermasterDown": "Down", "Quartermaster": "Quartermaster",
		"Quartermaster's alerts": "Quartermaster's alerts", "Down": "Down"} {
		if got := (&section{Title: title}).Short(); got != want {
			t.Errorf("%s is shortened to %s, want %s", title, got, want)
		}
	}
}

// repository has a page x/a/a.md with the link.
func repository(link string) fs.FS {
	files := fstest.MapFS{}
	for name, content := range map[string]string{
		"README.md": "# Q", "docs/README.md": "# D\n## E\n- [A](../x/a/a.md)\n- [B](../x/b.md)", "x/a/a.md": "# A\n" + link, "x/b.md": "# B\n## `C` d",
		"x/a/p.svg": "<svg/>", "pkg/x.go": "package x",
	} {
		files[name] = &fstest.MapFile{Data: []byte(content)}
	}
	return files
}
