// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// markdown returns bench.md: where the figures come from, the bars, and all rows.
func markdown(rows []row, env environment) string {
	var s strings.Builder
	s.WriteString("# Benchmarks\n\nWritten by `make bench`; do not edit. [README.md](README.md) tells what each row means and how it is measured.\n\n")
	writeEnvironment(&s, rows, env)
	writeBars(&s, rows)
	for _, p := range parts() {
		var of []row
		for _, r := range rows {
			if r.part() == p.name {
				of = append(of, r)
			}
		}
		if len(of) > 0 {
			fmt.Fprintf(&s, "\n## %s\n\n", p.name)
			writeTable(&s, of)
		}
	}
	return s.String()
}

func writeEnvironment(s *strings.Builder, rows []row, env environment) {
	s.WriteString("| | |\n|---|---|\n")
	for _, line := range [][2]string{
		{"last run", env.Date + ", `make bench` " + code(env.Flags)},
		{"Quartermaster", env.Commit},
		{"built with", "Go " + env.Go + ", client-go " + env.ClientGo},
		{"control plane, kube-controller-manager", env.Kubernetes},
		{"controller-runtime", env.ControllerRuntime},
		{"machine", fmt.Sprintf("%d cores, %s; %s; %s", env.Cores, env.Memory, env.CPU, env.Kernel)},
		{"load average (1, 5, 15 minutes)", env.LoadBefore + " before, " + env.LoadAfter + " after"},
	} {
		fmt.Fprintf(s, "| %s | %s |\n", line[0], line[1])
	}
	var dates []string
	for _, r := range rows {
		if !slices.Contains(dates, r.Date) {
			dates = append(dates, r.Date)
		}
	}
	if len(dates) > 1 {
		s.WriteString("\nRows of an earlier date are of an earlier run than this table describes.\n")
	}
}

func code(text string) string {
	if text == "" {
		return "without arguments"
	}
	return "`ARGS='" + text + "'`"
}

func writeTable(s *strings.Builder, rows []row) {
	s.WriteString("| bench | subject | n | min | median | p99 | max | unit | date |\n|---|---|--:|--:|--:|--:|--:|---|---|\n")
	for _, r := range rows {
		_, bench, _ := strings.Cut(r.Bench, "/")
		fmt.Fprintf(s, "| %s | %s | %d | %s | %s | %s | %s | %s | %s |\n", bench, r.Subject, r.N,
			number(r.Min), number(r.Median), number(r.P99), number(r.Max), r.Unit, r.Date)
	}
}

func writeBars(s *strings.Builder, rows []row) {
	s.WriteString("\n## Bars\n\nQuoted figures were measured earlier, on the same kind of machine, on the programs that the column names; " +
		"the rows below have those of this run.\n\n" +
		"| | elsewhere, measured earlier | bar | ours | met |\n|---|---|---|--:|---|\n")
	for _, b := range bars() {
		value, ok := b.value(table(rows))
		shown, met := "not measured", ""
		if ok {
			shown, met = number(round(value)), "no"
			if value <= b.limit {
				met = "yes"
			}
		}
		fmt.Fprintf(s, "| %s | %s | at most %s %s | %s | %s |\n", b.name, b.elsewhere, number(b.limit), b.unit, shown, met)
	}
}
