// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package release tests that `make release` is reproducible.
package release

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	version = "v0.0.1-test.1"
	// platforms are some platforms of a release, since the first build for each takes two minutes.
	platforms = "linux/amd64 linux/arm64 windows/amd64"
)

// TestLongReleaseIsReproducible releases the working tree from two folders, whose users differ in
// what must not matter.
func TestLongReleaseIsReproducible(t *testing.T) {
	fleet.Require(t)
	fleet.DependOn("cmd", "deploy", "docs", "examples", "hack", "internal", "pkg")
	for _, file := range []string{"CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "go.mod", "go.sum"} {
		if _, err := os.ReadFile(filepath.Join("..", "..", file)); err != nil {
			t.Fatal(err)
		}
	}
	first := filepath.Join(t.TempDir(), "first")
	second := filepath.Join(t.TempDir(), "second", "with-a-longer-name")
	makeRelease(t, first, "umask 022; make release RELEASED='"+platforms+"' VERSION="+version)
	makeRelease(t, second, "umask 077; touch -d 2001-01-01 LICENSE; "+
		"TZ=Pacific/Auckland GOFLAGS=-tags=netgo GOAMD64=v3 make release RELEASED='"+platforms+"' VERSION="+version+" LDFLAGS= PLATFORMS=linux/386")

	if diff := cmp.Diff(strings.Split(verifiedSums(t, first), "\n"), strings.Split(verifiedSums(t, second), "\n")); diff != "" {
		t.Errorf("-first +second:\n%s", diff)
	}

	const base = "quartermaster-0.0.1-test.1"
	want := []string{"RELEASE_NOTES.md", "SHA256SUMS", base + "-image.oci.tar", base + ".tgz"}
	for _, platform := range strings.Fields(strings.ReplaceAll(platforms, "/", "-")) {
		archive := base + "-" + platform + ".tar.gz"
		if platform == "windows-amd64" {
			archive = base + "-" + platform + ".zip"
		}
		want = append(want, archive, base+"-"+platform+".cdx.json")
	}
	slices.Sort(want)
	entries, err := os.ReadDir(filepath.Join(first, "dist"))
	assert.NoError(t, err)
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	assert.Equal(t, "dist/", want, got)

	manager := extract(t, filepath.Join(first, "dist", base+"-linux-amd64.tar.gz"), "manager")
	for name, secret := range map[string]string{"the folder": first, "Go's modules": goEnv(t, "GOMODCACHE"), "Go": goEnv(t, "GOROOT")} {
		if bytes.Contains(manager, []byte(secret)) {
			t.Errorf("the binary contains the path of %s, %s", name, secret)
		}
	}
	program := filepath.Join(t.TempDir(), "manager")
	assert.NoError(t, os.WriteFile(program, manager, 0o755))
	if out, err := exec.CommandContext(t.Context(), program, "--version").CombinedOutput(); err != nil || !strings.Contains(string(out), version) {
		t.Errorf("--version: %v: %s", err, out)
	}
}

// makeRelease runs a script in a copy of the working tree, in a repository with one commit.
func makeRelease(t *testing.T, dir, script string) {
	t.Helper()
	root := filepath.Join("..", "..")
	assert.NoError(t, os.MkdirAll(dir, 0o755))
	runScript(t, root, `git ls-files -z --cached --others --exclude-standard --deduplicate | while IFS= read -r -d '' f; do
		if [ -e "$f" ]; then printf '%s\0' "$f"; fi; done | tar --null -T - -cf - | tar -xf - -C '`+dir+`'`)
	changelog := filepath.Join(dir, "CHANGELOG.md")
	text, err := os.ReadFile(changelog)
	assert.NoError(t, err)
	released := strings.Replace(string(text), "\n## Unreleased\n", "\n## Unreleased\n\n## "+version+" - 2026-11-24\n\n- A test.\n", 1)
	assert.NoError(t, os.WriteFile(changelog, []byte(released), 0o644))
	runScript(t, dir, "git init -q; git add .; git commit -q -m 'The same commit'")
	runScript(t, dir, script)
}

func runScript(t *testing.T, dir, script string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-e", "-o", "pipefail", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(),
		"GIT_AUTHOR_NAME=somebody", "GIT_AUTHOR_EMAIL=somebody@example.com", "GIT_AUTHOR_DATE=2026-11-24T12:00:00Z",
		"GIT_COMMITTER_NAME=somebody", "GIT_COMMITTER_EMAIL=somebody@example.com", "GIT_COMMITTER_DATE=2026-11-24T12:00:00Z")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v:\n%s", script, err, out)
	}
}

func verifiedSums(t *testing.T, dir string) string {
	t.Helper()
	runScript(t, filepath.Join(dir, "dist"), "sha256sum --quiet -c SHA256SUMS")
	text, err := os.ReadFile(filepath.Join(dir, "dist", "SHA256SUMS"))
	assert.NoError(t, err)
	return string(text)
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
	assert.NoError(t, err)
	return strings.TrimSpace(string(out))
}

// extract returns a file of a gzipped tar.
func extract(t *testing.T, archive, name string) []byte {
	t.Helper()
	f, err := os.Open(archive)
	assert.NoError(t, err)
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	assert.NoError(t, err)
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			t.Fatalf("%s has no %s", archive, name)
		}
		assert.NoError(t, err)
		if header.Name == name {
			content, err := io.ReadAll(r)
			assert.NoError(t, err)
			return content
		}
	}
}
