// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command generate writes what derives from the registry of controllers: the roles below deploy/,
// as `manager rbac` prints them, the components that change them, the chart's roles, schema and
// README, the federated types of deploy/federation, and the pages of the metrics, the flags and the
// commands. With --check it writes nothing: it fails if one of these files, a generated file of
// examples/widget or a picture of docs/bench is not up to date.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

func main() {
	check := flag.Bool("check", false, "Write nothing, and fail if a generated file is not up to date.")
	flag.Parse()
	err := run("deploy", *check)
	if *check {
		err = errors.Join(err, checkModules())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

// run writes nothing if check is set, and returns an error if a file is not up to date.
func run(dir string, check bool) error {
	files, err := manifestFiles(dir)
	if err != nil {
		return err
	}
	chart, err := chartFiles(dir)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	maps.Copy(files, chart)
	federation, err := federationFiles()
	if err != nil {
		return err
	}
	maps.Copy(files, federation)
	for _, generate := range []func(string) (map[string][]byte, error){metricsPage, flagsPage, commandsPage} {
		page, err := generate(dir)
		if err != nil {
			return err
		}
		maps.Copy(files, page)
	}
	var outdated []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path, manifest := filepath.Join(dir, name), files[name]
		have, err := os.ReadFile(path)
		if err == nil && bytes.Equal(have, manifest) {
			continue
		}
		if check {
			outdated = append(outdated, fmt.Errorf("%s is not up to date; run make generate", path))
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, manifest, 0o644); err != nil {
			return err
		}
		fmt.Println("wrote", path)
	}
	return errors.Join(outdated...)
}
