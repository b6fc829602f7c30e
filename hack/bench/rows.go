// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// row is one line of the table. The part before the first slash of Bench is the benchmark that -run
// names.
type row struct {
	Bench   string  `json:"bench"`
	Subject string  `json:"subject"`
	N       int     `json:"n"`
	Min     float64 `json:"min"`
	Median  float64 `json:"median"`
	P99     float64 `json:"p99"`
	Max     float64 `json:"max"`
	Unit    string  `json:"unit"`
	Date    string  `json:"date"` // of the run; a run of one part keeps the other rows
	Machine string  `json:"machine"`
	Commit  string  `json:"commit,omitempty"` // unknown of rows before 2026-11-25
}

func (r row) part() string {
	part, _, _ := strings.Cut(r.Bench, "/")
	return part
}

// newRow summarises one or more values. The percentiles are nearest-rank: the p99 of fewer than 100
// values is their maximum, and every figure was measured.
func newRow(bench, subject, unit, date string, values []float64) row {
	sorted := slices.Sorted(slices.Values(values))
	rank := func(p float64) float64 {
		return roundFigure(sorted[max(0, int(math.Ceil(p*float64(len(sorted))))-1)])
	}
	return row{
		Bench: bench, Subject: subject, N: len(sorted), Unit: unit, Date: date,
		Min: roundFigure(sorted[0]), Median: rank(0.5), P99: rank(0.99), Max: roundFigure(sorted[len(sorted)-1]),
	}
}

// roundFigure keeps four significant digits, and every digit before the point.
func roundFigure(v float64) float64 {
	if v == 0 {
		return 0
	}
	digits := 3 - int(math.Floor(math.Log10(math.Abs(v))))
	scale := math.Pow(10, float64(max(digits, 0)))
	return math.Round(v*scale) / scale
}

// mergeRows replaces all old rows of a part and subject by the fresh ones.
func mergeRows(old, fresh []row) []row {
	type key struct{ part, subject string }
	measured := map[key]bool{}
	for _, r := range fresh {
		measured[key{r.part(), r.Subject}] = true
	}
	merged := slices.DeleteFunc(slices.Clone(old), func(r row) bool { return measured[key{r.part(), r.Subject}] })
	merged = append(merged, fresh...)
	order := map[string]int{}
	for i, p := range parts() {
		order[p.name] = i
	}
	slices.SortStableFunc(merged, func(a, b row) int { return order[a.part()] - order[b.part()] })
	return merged
}

// readRows returns the rows of latest.json, none if there is no such file.
func readRows(dir string) ([]row, error) {
	data, err := os.ReadFile(filepath.Join(dir, "latest.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var rows []row
	if err := json.Unmarshal(data, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, "latest.json"), err)
	}
	return rows, nil
}

func writeRows(dir string, rows []row) error {
	var lines []string
	for _, r := range rows {
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		lines = append(lines, string(data))
	}
	return os.WriteFile(filepath.Join(dir, "latest.json"), []byte("[\n"+strings.Join(lines, ",\n")+"\n]\n"), 0o644)
}

func formatNumber(v float64) string { return fmt.Sprintf("%.10g", v) }
