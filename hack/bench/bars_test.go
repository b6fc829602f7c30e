// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBarsAreAboutRows also compares bench.md with the rows, apart from what it says about the last
// run.
func TestBarsAreAboutRows(t *testing.T) {
	dir := filepath.Join("..", "..", "docs", "bench")
	bars, err := readBars(dir)
	if err != nil || len(bars) < 30 {
		t.Fatalf("%d bars: these are not all: %v", len(bars), err)
	}
	rows, err := readRows(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bars {
		if _, _, err := b.check(rows); err != nil {
			t.Errorf("%+v: %v", b, err)
		}
	}
	page, err := os.ReadFile(filepath.Join(dir, "bench.md"))
	if err != nil {
		t.Fatal(err)
	}
	if _, want, _ := strings.Cut(markdown(rows, bars, environment{}), "## Bars"); !strings.HasSuffix(string(page), want) {
		t.Error("bench.md does not have the bars and rows of README.md and latest.json")
	}
}
