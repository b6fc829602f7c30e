// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const changelog = `# Changelog

## Unreleased

- Tomorrow's.

## v1.2.0 - 2026-11-24

### Added

- A thing.

## v1.2.0-rc.1 - 2026-11-20

- A thing to try.

## v1.1.0 - 2026-10-01
## v1.0.0 - 2026-09-01

- The first.
`

func TestNotesAreTheSectionOfTheVersion(t *testing.T) {
	for name, test := range map[string]struct{ version, want, wantErr string }{
		"a release":                            {version: "v1.2.0", want: "# Quartermaster v1.2.0 - 2026-11-24\n\n### Added\n\n- A thing.\n"},
		"before a release":                     {version: "v1.2.0-rc.1", want: "# Quartermaster v1.2.0-rc.1 - 2026-11-20\n\n- A thing to try.\n"},
		"the oldest one":                       {version: "v1.0.0", want: "# Quartermaster v1.0.0 - 2026-09-01\n\n- The first.\n"},
		"a version of which nothing is said":   {version: "v1.1.0", wantErr: "says nothing about v1.1.0"},
		"a version without a section":          {version: "v1.3.0", wantErr: `no section "## v1.3.0 - YYYY-MM-DD"`},
		"the beginning of another":             {version: "v1.2.0-rc", wantErr: "no section"},
		"a dot is no other letter":             {version: "v1.2.0-rc-1", wantErr: "no section"},
		"no version":                           {version: "", wantErr: "VERSION=: must be vX.Y.Z"},
		"without v":                            {version: "1.2.0", wantErr: "must be vX.Y.Z"},
		"what git describe returns":            {version: "0123abc", wantErr: "must be vX.Y.Z"},
		"build metadata":                       {version: "v1.2.0+1", wantErr: "must be vX.Y.Z"},
		"a zero before a number":               {version: "v1.02.0", wantErr: "must be vX.Y.Z"},
		"a zero before a number in the suffix": {version: "v1.2.0-rc.01", wantErr: "must be vX.Y.Z"},
		"an empty part":                        {version: "v1.2.0-rc..1", wantErr: "must be vX.Y.Z"},
		"a zero before a letter":               {version: "v1.2.0-0a", wantErr: "no section"},
		"a zero":                               {version: "v1.2.0-0", wantErr: "no section"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := releaseNotes(changelog, test.version)
			if got != test.want || (err != nil) != (test.wantErr != "") || err != nil && !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// TestReleaseRefusedWritesNothing runs in repositories of git without a Makefile: what is not refused
// fails at make.
func TestReleaseRefusedWritesNothing(t *testing.T) {
	for name, test := range map[string]struct {
		version string
		script  string // is run in the repository
		wantErr string
	}{
		"a file was changed":                               {"v1.2.0", "echo >>CHANGELOG.md", "M CHANGELOG.md"},
		"a file is new":                                    {"v1.2.0", "echo >new", "?? new"},
		"the version's tag is on another commit":           {"v1.2.0", "git tag v1.2.0 && git commit -q --allow-empty -m more", "the tag v1.2.0 is on another commit"},
		"the version's annotated tag is on another commit": {"v1.2.0", "git tag -m x v1.2.0 && git commit -q --allow-empty -m more", "the tag v1.2.0 is on another commit"},
		"no notes":                                       {"v1.3.0", "", "no section"},
		"the folder is no repository":                    {"v1.2.0", "rm -r .git", "not a git repository"},
		"a version without a tag":                        {"v1.2.0", "", "make --no-print-directory VERSION=v1.2.0 chart"},
		"a version with a tag on this commit":            {"v1.2.0", "git tag v1.2.0", "make --no-print-directory"},
		"a version with an annotated tag on this commit": {"v1.2.0", "git tag -m x v1.2.0", "make --no-print-directory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			for _, v := range []string{"GIT_AUTHOR_", "GIT_COMMITTER_"} {
				t.Setenv(v+"NAME", "somebody")
				t.Setenv(v+"EMAIL", "somebody@example.com")
			}
			t.Setenv("GIT_CEILING_DIRECTORIES", os.TempDir())
			if err := os.WriteFile("CHANGELOG.md", []byte(changelog), 0o644); err != nil {
				t.Fatal(err)
			}
			script := "set -e; git init -q; git add .; git commit -q -m first; " + test.script
			if out, err := exec.CommandContext(t.Context(), "sh", "-c", script).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			err := release{Version: test.version, Out: "dist", Platforms: []string{"linux/amd64"}, Log: t.Output()}.run(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("got %v", err)
			}
			for _, dir := range []string{"dist", "bin"} {
				if _, err := os.Stat(dir); err == nil {
					t.Errorf("%s/ was written", dir)
				}
			}
		})
	}
}

// TestMakeWorksInAFolderWithASpace looks for the folder's name in the commands that make would run.
func TestMakeWorksInAFolderWithASpace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a b")
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "Makefile"), makefile, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "make", "--dry-run", "VERSION=v1.2.0", "run", "build", "image", "chart", "sbom", "release", "test", "test-chart", "lint", "verify", "generate")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	named := 0
	for line := range strings.Lines(string(out)) {
		named += strings.Count(line, dir)
		if strings.Count(line, dir) != strings.Count(line, "'"+dir) {
			t.Errorf("the folder is not quoted: %s", line)
		}
	}
	if named == 0 {
		t.Errorf("no command names the folder:\n%s", out)
	}
}

func TestWriteReplacesAnEarlierRelease(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, files := range []map[string][]byte{{"old": []byte("1")}, {"b": []byte("2"), "a": []byte("1")}} {
		if err := writeFiles("dist", files); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat("dist/old"); err == nil {
		t.Error("old is still there")
	}
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", "cd dist && sha256sum -c SHA256SUMS").CombinedOutput(); err != nil ||
		string(out) != "a: OK\nb: OK\n" {
		t.Errorf("sha256sum -c: %v:\n%s", err, out)
	}
}

func TestArchivesHoldTheFiles(t *testing.T) {
	modified := time.Unix(1_700_000_000, 0).UTC()
	files := []file{
		{Name: "LICENSE", Mode: 0o644, Content: []byte("text")},
		{Name: "manager", Mode: 0o755, Content: []byte("binary")},
	}
	tgz, err := makeTarGz(modified, append(files, file{Name: plugin, Link: "manager"}))
	if err != nil {
		t.Fatal(err)
	}
	zip, err := makeZip(modified, files)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for name, content := range map[string][]byte{"a.tar.gz": tgz, "a.zip": zip} {
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for command, want := range map[string]string{
		"tar --utc -tvzf a.tar.gz": "-rw-r--r-- 0/0 4 2023-11-14 22:13 LICENSE\n-rwxr-xr-x 0/0 6 2023-11-14 22:13 manager\n" +
			"lrwxrwxrwx 0/0 0 2023-11-14 22:13 kubectl-quartermaster -> manager\n",
		"python3 -m zipfile -t a.zip": "Done testing\n",
	} {
		name, _, _ := strings.Cut(command, " ")
		if _, err := exec.LookPath(name); err != nil {
			continue
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", command+" | tr -s ' '").CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v", command, err)
		}
		if diff := cmp.Diff(want, string(out)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", command, diff)
		}
	}
}
