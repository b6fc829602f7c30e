// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestBuildIsReproducible builds for real, from two folders that differ in everything that must not
// matter.
func TestBuildIsReproducible(t *testing.T) {
	var first []string // of all tools
	for _, tool := range []string{"podman", "buildah"} {
		t.Run(tool, func(t *testing.T) {
			if _, err := exec.LookPath(tool); err != nil {
				t.Skip(tool + " is not installed")
			}
			useOwnStorage(t)
			b := build{Name: "quartermaster-test", Version: "v1.2.3", Revision: "0123abc", Epoch: 1700000000,
				Platforms: []string{"linux/amd64", "linux/arm64"}}
			digests := func(content string, mode os.FileMode, owner int) []string {
				b.Dir = newContext(t, b.Platforms, content, mode, owner)
				got, err := b.with(t.Context(), tool)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			one := digests("binary", 0o755, os.Getuid())
			if first == nil {
				first = one
			}
			owner := os.Getuid()
			if owner == 0 {
				owner = 65532 // only root may give files away
			}
			if two := digests("binary", 0o700, owner); !slices.Equal(one, two) {
				t.Errorf("the same binaries give %q, then %q", one, two)
			}
			if !slices.Equal(one, first) {
				t.Errorf("the digests are %q, with another tool %q", one, first)
			}
			if other := digests("another binary", 0o755, os.Getuid()); slices.Contains(one, other[0]) || slices.Contains(one, other[1]) {
				t.Errorf("other binaries give the same digests: %q, %q", one, other)
			}
		})
	}
}

// useOwnStorage keeps the images of the test separate from the user's.
func useOwnStorage(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	conf := filepath.Join(dir, "storage.conf")
	text := fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = %q\nrunroot = %q\n", filepath.Join(dir, "images"), filepath.Join(dir, "run"))
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CONTAINERS_STORAGE_CONF", conf)
}

// newContext returns a folder with the Containerfile and a placeholder for each binary.
func newContext(t *testing.T, platforms []string, content string, mode os.FileMode, owner int) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"Containerfile", ".containerignore"} {
		text, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, platform := range platforms {
		path := filepath.Join(dir, "bin", platform, "manager")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content+" for "+platform), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, owner, -1); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestDigestsMustBeOfThePlatforms(t *testing.T) {
	const list = `{"manifests":[{"digest":"sha256:a","platform":{"os":"linux","architecture":"amd64"}},
		{"digest":"sha256:b","platform":{"os":"linux","architecture":"arm64"}}]}`
	for name, test := range map[string]struct {
		platforms []string
		want      []string
	}{
		"all of them":              {[]string{"linux/amd64", "linux/arm64"}, []string{"sha256:a", "sha256:b"}},
		"one is missing":           {[]string{"linux/amd64", "linux/arm64", "linux/s390x"}, nil},
		"one of an earlier build":  {[]string{"linux/amd64"}, nil},
		"the order is another one": {[]string{"linux/arm64", "linux/amd64"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := build{Platforms: test.platforms}.digests(list)
			if (err == nil) != (test.want != nil) || !slices.Equal(got, test.want) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestListIsAFullName(t *testing.T) {
	got := map[string]string{}
	for _, name := range []string{"quartermaster", "team/quartermaster", "registry.example/quartermaster", "registry:5000/quartermaster", "localhost/quartermaster"} {
		got[name] = build{Name: name, Version: "v1"}.list()
	}
	want := map[string]string{
		"quartermaster":                  "localhost/quartermaster:v1",
		"team/quartermaster":             "localhost/team/quartermaster:v1",
		"registry.example/quartermaster": "registry.example/quartermaster:v1",
		"registry:5000/quartermaster":    "registry:5000/quartermaster:v1",
		"localhost/quartermaster":        "localhost/quartermaster:v1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestPick(t *testing.T) {
	const works, fails = "#!/bin/sh\n", "#!/bin/sh\necho 'no daemon' >&2; exit 1\n"
	for name, test := range map[string]struct {
		installed map[string]string
		wanted    string
		want      string
		wantErr   string
	}{
		"podman comes first":                   {map[string]string{"podman": works, "buildah": works, "docker": works}, "", "podman", ""},
		"buildah comes before docker":          {map[string]string{"buildah": works, "docker": works}, "", "buildah", ""},
		"docker is better than nothing":        {map[string]string{"docker": works}, "", "docker", ""},
		"one that is broken is passed over":    {map[string]string{"podman": fails, "docker": works}, "", "docker", ""},
		"the user may say which":               {map[string]string{"podman": works, "docker": works}, "docker", "docker", ""},
		"docker without its daemon is of none": {map[string]string{"docker": fails}, "", "", "no daemon"},
		"nothing is installed":                 {nil, "", "", "install podman, buildah or docker"},
		"the one that was asked for is not":    {map[string]string{"podman": works}, "buildah", "", "buildah version"},
		"what was asked for is unknown":        {map[string]string{"podman": works}, "kaniko", "", "TOOL=kaniko"},
	} {
		t.Run(name, func(t *testing.T) {
			install(t, test.installed)
			got, err := pick(t.Context(), test.wanted)
			if got != test.want || (err != nil) != (test.wantErr != "") || err != nil && !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// TestDockerIsAsked cannot check docker's result, only that docker is called for the same image.
func TestDockerIsAsked(t *testing.T) {
	args := filepath.Join(t.TempDir(), "args")
	install(t, map[string]string{"docker": "#!/bin/sh\nprintf '%s\\n' \"$@\" >" + args + "\n"})
	b := build{Name: "quartermaster", Version: "v1.2.3", Revision: "0123abc", Epoch: 1700000000,
		Platforms: []string{"linux/amd64", "linux/arm64"}, Dir: "dir"}
	if _, err := b.with(t.Context(), "docker"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(args)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"buildx", "build", "--provenance=false", "--build-arg=SOURCE_DATE_EPOCH=1700000000", "--platform=linux/amd64,linux/arm64",
		"--tag=quartermaster:v1.2.3", "--tag=quartermaster:latest", "--file=dir/Containerfile", "--build-arg=VERSION=v1.2.3",
		"--build-arg=REVISION=0123abc", "--build-arg=CREATED=2023-11-14T22:13:20Z", "dir",
	}
	if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(string(text)), "\n")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// install makes the scripts the only programs of the test.
func install(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}
