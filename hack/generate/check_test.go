// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckComparesACopyWithTheFolder(t *testing.T) {
	for name, tc := range map[string]struct{ script, want string }{
		"a generator that writes the same content": {script: "echo old > a"},
		"a generator that writes other content":    {script: "echo new > a", want: "is not up to date; run make generate"},
		"a generator that writes one file more":    {script: "echo old > b", want: "is not up to date; run make generate"},
		"a generator that fails":                   {script: "echo why; exit 1", want: "why"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			if err := os.MkdirAll("docs/bench", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile("docs/bench/a", []byte("old\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			err := checkFolder("docs/bench", func(folder string) *exec.Cmd {
				cmd := exec.Command("sh", "-c", tc.script)
				cmd.Dir = folder
				return cmd
			})
			if (err != nil) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if left, err := filepath.Glob(".cache/*"); err != nil || len(left) > 0 {
				t.Errorf("it leaves %q, %v", left, err)
			}
			if kept, err := os.ReadFile("docs/bench/a"); err != nil || string(kept) != "old\n" {
				t.Errorf("the folder has %q, %v", kept, err)
			}
		})
	}
}
