// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBarsAreAboutRows also compares bench.md and rows.md with the rows, apart from what bench.md says about
// the last run, and the figures that other pages quote.
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
	missed := 0
	for _, b := range bars {
		_, met, err := b.check(rows)
		if err != nil {
			t.Errorf("%+v: %v", b, err)
		}
		if !met {
			missed++
		}
	}
	page, err := os.ReadFile(filepath.Join(dir, "bench.md"))
	if err != nil {
		t.Fatal(err)
	}
	if _, want, _ := strings.Cut(markdown(rows, bars, environment{}), "## Bars"); !strings.HasSuffix(string(page), want) {
		t.Error("bench.md does not have the bars of README.md with the rows of latest.json")
	}
	if page, err := os.ReadFile(filepath.Join(dir, "rows.md")); err != nil || string(page) != rowsMarkdown(rows) {
		t.Errorf("rows.md does not have the rows of latest.json: %v", err)
	}
	if summary, _, _ := strings.Cut(markdown(rows, nil, environment{}), "!["); !strings.HasPrefix(string(page), summary) {
		t.Errorf("bench.md does not begin with the medians of latest.json:\n%s", summary)
	}
	median := func(bench, subject string) float64 {
		value, _, err := bar{bench: bench, statistic: "median"}.valueFor(rows, subject)
		if err != nil {
			t.Error(err)
		}
		return value
	}
	const leader, emptyCluster = "quartermaster: leader", "memory/empty cluster"
	sizing := func(cluster, bench string) string {
		return fmt.Sprintf("| %s | %.0f MiB | %.0f MiB |", cluster, median(bench+", RSS steady", leader), max(
			median(bench+", RSS peak since the start", leader), median(bench+", RSS peak since the start", "quartermaster: warm standby")))
	}
	for page, want := range map[string][]string{
		"README.md": {
			fmt.Sprintf("%.0f MiB on an empty cluster. One manager of controller-runtime takes %.0f MiB without metrics.",
				median(emptyCluster+", RSS steady", leader), median(emptyCluster+", RSS steady", "controller-runtime: leader")),
			fmt.Sprintf("Of %d limits that the project has set itself, [%d are not met](docs/bench/bench.md#bars)", len(bars), missed),
		},
		"docs/operate/operating.md": {
			sizing("nothing", emptyCluster),
			sizing("5,000 Secrets and 5,000 ConfigMaps of 4 KiB, 500 Deployments", "memory/5000 Secrets and 5000 ConfigMaps of 4 KiB, 500 Deployments"),
			sizing("50,000 Secrets", "memory/50000 Secrets of 1 KiB"),
			sizing("200,000 Secrets", "scale/200000 Secrets of 256 bytes"),
		},
	} {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(page)))
		if err != nil {
			t.Fatal(err)
		}
		for _, sentence := range want {
			if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), sentence) {
				t.Errorf("%s does not say, as the rows do: %s", page, sentence)
			}
		}
	}
}
