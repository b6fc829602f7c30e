// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// checkModules checks what modules of their own generate.
func checkModules() error {
	return errors.Join(
		checkFolder("examples/widget", func(folder string) *exec.Cmd {
			return exec.Command("go", "-C", folder, "generate", "./...")
		}),
		checkFolder("docs/bench", func(folder string) *exec.Cmd {
			return exec.Command("go", "-C", "hack/plot", "run", ".", folder)
		}))
}

// checkFolder generates into a copy of a folder, and returns an error if the copy then differs. The copy is
// as deep in the repository as the folder, so that the replace directives of a go.mod hold.
func checkFolder(folder string, generate func(folder string) *exec.Cmd) error {
	if err := os.MkdirAll(".cache", 0o755); err != nil {
		return err
	}
	copyDir, err := os.MkdirTemp(".cache", "check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(copyDir)
	if err := os.CopyFS(copyDir, os.DirFS(folder)); err != nil {
		return err
	}
	absolute, err := filepath.Abs(copyDir)
	if err != nil {
		return err
	}
	if out, err := generate(absolute).CombinedOutput(); err != nil {
		return fmt.Errorf("generate %s: %w\n%s", folder, err, out)
	}
	if out, err := exec.Command("diff", "-r", folder, copyDir).CombinedOutput(); err != nil {
		return fmt.Errorf("%s is not up to date; run make generate\n%s", folder, out)
	}
	return nil
}
