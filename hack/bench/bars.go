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

// readBars reads that table.
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

// check returns the statistic of the row, and whether it is at most the limit.
func (b bar) check(rows []row) (value float64, met bool, err error) {
	if value, err = b.of(rows, b.subject); err != nil {
		return 0, false, err
	}
	var limit float64
	number, _, _ := strings.Cut(b.limit, " ")
	if limit, err = strconv.ParseFloat(number, 64); err != nil {
		return 0, false, err
	}
	if _, other, ok := strings.Cut(b.limit, " times that of "); ok {
		theirs, err := b.of(rows, other)
		return value, value <= limit*theirs, err
	}
	return value, value <= limit, nil
}

func (b bar) of(rows []row, subject string) (float64, error) {
	at := slices.IndexFunc(rows, func(r row) bool { return r.Bench == b.bench && r.Subject == subject })
	if at < 0 {
		return 0, fmt.Errorf("no row %s of %s", b.bench, subject)
	}
	return map[string]float64{"median": rows[at].Median, "p99": rows[at].P99, "max": rows[at].Max}[b.statistic], nil
}
