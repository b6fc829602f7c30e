// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command generate writes what derives from the registry of controllers: the roles below deploy/,
// as `manager rbac` prints them, the components that change them, the chart's roles, schema and
// README, and the federated types of deploy/federation.
package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
)

func main() {
	if err := run("deploy", false); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

// run writes nothing if check is set, and returns an error if a file is not up to date.
func run(dir string, check bool) error {
	manifests, err := manifests()
	if err != nil {
		return err
	}
	ofChart, err := chart(dir)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	maps.Copy(manifests, ofChart)
	ofFederation, err := federation()
	if err != nil {
		return err
	}
	maps.Copy(manifests, ofFederation)
	for name, manifest := range manifests {
		path := filepath.Join(dir, name)
		have, err := os.ReadFile(path)
		if err == nil && bytes.Equal(have, manifest) {
			continue
		}
		if check {
			return fmt.Errorf("%s is not up to date; run make generate", path)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, manifest, 0o644); err != nil {
			return err
		}
		fmt.Println("wrote", path)
	}
	return nil
}
