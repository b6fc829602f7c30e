// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// newBuilder returns a builder for a module with two programs, whose go.mod names a version of
// Kubernetes without requiring it.
func newBuilder(t *testing.T) (*builder, *bytes.Buffer) {
	t.Helper()
	dir, out := t.TempDir(), &bytes.Buffer{}
	b := &builder{
		module:  filepath.Join(dir, "module"),
		cache:   filepath.Join(dir, "cache"),
		product: "the control plane",
		bins:    []binary{{"one", "./one"}, {"two", "./two"}},
		out:     out,
	}
	write(t, filepath.Join(b.module, "go.mod"), "module example.com/tools\n\ngo 1.26.0\n\nexclude (\n\tk8s.io/kubernetes v1.2.3\n)\n")
	write(t, filepath.Join(b.module, "go.sum"), "")
	for _, bin := range b.bins {
		write(t, filepath.Join(b.module, bin.name, "main.go"), "package main\n\nfunc main() {}\n")
	}
	return b, out
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// cached returns the entries of the cache, except for the lock.
func cached(t *testing.T, b *builder) []string {
	t.Helper()
	entries, err := os.ReadDir(b.cache)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != "lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestBuildIsDoneOnceForAKey(t *testing.T) {
	b, out := newBuilder(t)
	dir, err := b.ensure(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(filepath.Base(dir), "v1.2.3-") || !b.isComplete(dir) {
		t.Errorf("the folder %s is not named by the version, or not complete", dir)
	}
	if diff := cmp.Diff([]string{filepath.Base(dir)}, cached(t, b)); diff != "" {
		t.Error(diff)
	}
	for _, want := range []string{"[1/2] one: built in ", "[2/2] two: built in ", "Kubernetes v1.2.3"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the progress:\n%s", want, out)
		}
	}

	out.Reset()
	if rebuilt, err := b.ensure(t.Context()); err != nil || rebuilt != dir || out.Len() > 0 {
		t.Errorf("the second time: %s, %v, and it said %q", rebuilt, err, out)
	}
	if err := os.Remove(filepath.Join(dir, "two")); err != nil {
		t.Fatal(err)
	}
	if rebuilt, err := b.ensure(t.Context()); err != nil || rebuilt != dir || !b.isComplete(dir) {
		t.Errorf("after a program was deleted: %s, %v, complete: %v", rebuilt, err, b.isComplete(dir))
	}
	setLastUse(t, dir, retention+time.Hour)
	if _, err := b.ensure(t.Context()); err != nil { // uses it
		t.Fatal(err)
	}
	write(t, filepath.Join(b.module, "go.sum"), "\n")
	other, err := b.ensure(t.Context())
	if err != nil || other == dir {
		t.Errorf("after go.sum changed: %s again, %v", other, err)
	}
	if n := len(cached(t, b)); n != 2 {
		t.Errorf("%d builds are kept, want both", n)
	}
	setLastUse(t, dir, retention+time.Hour)
	write(t, filepath.Join(b.module, "go.sum"), "\n\n")
	if _, err := b.ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unused build is kept (%v)", err)
	}
	if !b.isComplete(other) {
		t.Error("a build that was used a moment ago is gone")
	}
}

// setLastUse makes a build look as if nobody had used it for that long.
func setLastUse(t *testing.T, dir string, d time.Duration) {
	t.Helper()
	last := time.Now().Add(-d)
	if err := os.Chtimes(dir, last, last); err != nil {
		t.Fatal(err)
	}
}

func TestBuildTwiceAtOnceBuildsOnce(t *testing.T) {
	first, out := newBuilder(t)
	second := *first
	second.out = &bytes.Buffer{}
	var builds sync.WaitGroup
	for _, b := range []*builder{first, &second} {
		builds.Go(func() {
			if _, err := b.ensure(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	builds.Wait()
	output := out.String() + second.out.(*bytes.Buffer).String()
	if n := strings.Count(output, "Built the control plane"); n != 1 {
		t.Errorf("built %d times:\n%s", n, output)
	}
}

func TestBuildThatFailsLeavesNothing(t *testing.T) {
	b, _ := newBuilder(t)
	write(t, filepath.Join(b.module, "two", "main.go"), "package main\n\nfunc main() { nonsense }\n")
	if _, err := b.ensure(t.Context()); err == nil || !strings.Contains(err.Error(), "undefined: nonsense") {
		t.Errorf("error %v, want what the compiler says", err)
	}
	if left := cached(t, b); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
