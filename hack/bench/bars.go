// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// bar is what a row must not exceed: a line of the table of bars in docs/bench/README.md.
type bar struct {
	bench, subject, statistic string
	limit                     string // a number with its unit, or a factor with " times that of " and another subject
}

// readBars reads the table of bars.
func readBars(dir string) (bars []bar, err error) {
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(readme)) {
		cells := strings.Split(line, "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) == 7 && slices.Contains([]string{"median", "p99", "max"}, cells[3]) {
			bars = append(bars, bar{cells[1], cells[2], cells[3], cells[4]})
		}
	}
	return bars, nil
}

// check returns the statistic of the row with its unit, and whether it is at most the limit. For a factor,
// measured also has the factor that was measured and the statistic of the other subject.
func (b bar) check(rows []row) (measured string, met bool, err error) {
	value, unit, err := b.valueFor(rows, b.subject)
	if err != nil {
		return "", false, err
	}
	measured = strings.TrimSpace(formatNumber(value) + " " + unit)
	limitNumber, _, _ := strings.Cut(b.limit, " ")
	limit, err := strconv.ParseFloat(limitNumber, 64)
	if err != nil {
		return "", false, err
	}
	if _, otherSubject, ok := strings.Cut(b.limit, " times that of "); ok {
		otherValue, _, err := b.valueFor(rows, otherSubject)
		if err != nil {
			return "", false, err
		}
		limit *= otherValue
		measured += fmt.Sprintf(" (%.3g times %s %s)", value/otherValue, formatNumber(otherValue), unit)
	}
	return measured, value <= limit, nil
}

// valueFor returns the statistic of the bar's row of a subject, and the row's unit.
func (b bar) valueFor(rows []row, subject string) (value float64, unit string, err error) {
	i := slices.IndexFunc(rows, func(r row) bool { return r.Bench == b.bench && r.Subject == subject })
	if i < 0 {
		return 0, "", fmt.Errorf("no row %s of %s", b.bench, subject)
	}
	r := rows[i]
	return map[string]float64{"median": r.Median, "p99": r.P99, "max": r.Max}[b.statistic], r.Unit, nil
}
