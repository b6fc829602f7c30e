// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// markdown returns bench.md: where the figures come from, the bars, and all rows.
func markdown(rows []row, bars []bar, env environment) string {
	var s strings.Builder
	s.WriteString("# Benchmarks\n\nWritten by `make bench`; do not edit. [README.md](README.md) tells what each row means and how it is measured.\n\n")
	for _, picture := range [][2]string{{"Time without a leader", "leader"}, {"Memory by number of Secrets", "memory"}, {"Time to roll", "reload"}} {
		fmt.Fprintf(&s, "![%s](%s.svg)\n\n", picture[0], picture[1])
	}
	writeEnvironment(&s, env)
	writeBars(&s, rows, bars)
	for _, p := range parts() {
		var partRows []row
		for _, r := range rows {
			if r.part() == p.name {
				partRows = append(partRows, r)
			}
		}
		if len(partRows) > 0 {
			fmt.Fprintf(&s, "\n## %s\n\n", p.name)
			writeTable(&s, partRows)
		}
	}
	return s.String()
}

func writeEnvironment(s *strings.Builder, env environment) {
	s.WriteString("| | |\n|---|---|\n")
	for _, line := range [][2]string{
		{"last run", env.Date + ", `make bench` " + code(env.Flags)},
		{"Quartermaster", env.Commit},
		{"built with", "Go " + env.Go + ", client-go " + env.ClientGo},
		{"control plane, kube-controller-manager", env.Kubernetes},
		{"controller-runtime", env.ControllerRuntime},
		{"machine", env.Machine + "; " + env.Kernel},
		{"load average (1, 5, 15 minutes)", env.LoadBefore + " before, " + env.LoadAfter + " after"},
	} {
		fmt.Fprintf(s, "| %s | %s |\n", line[0], line[1])
	}
	if env.Busy {
		s.WriteString("\n**The machine did other work before this run**, and may have done so during it: its times are too long.\n")
	}
	s.WriteString("\nRows of an earlier date are of an earlier run than this table describes.\n")
}

func code(text string) string {
	if text == "" {
		return "without arguments"
	}
	return "`ARGS='" + text + "'`"
}

func writeTable(s *strings.Builder, rows []row) {
	var machines []string
	for _, r := range rows {
		m := r.Date + " on " + r.Machine
		if r.Commit != "" {
			m += ", measured at " + r.Commit
		}
		if !slices.Contains(machines, m) {
			machines = append(machines, m)
		}
	}
	fmt.Fprintf(s, "%s.\n\n", strings.Join(slices.Sorted(slices.Values(machines)), ". "))
	s.WriteString("| bench | subject | n | min | median | p99 | max | unit | date |\n|---|---|--:|--:|--:|--:|--:|---|---|\n")
	for _, r := range rows {
		_, bench, _ := strings.Cut(r.Bench, "/")
		fmt.Fprintf(s, "| %s | %s | %d | %s | %s | %s | %s | %s | %s |\n", bench, r.Subject, r.N,
			formatNumber(r.Min), formatNumber(r.Median), formatNumber(r.P99), formatNumber(r.Max), r.Unit, r.Date)
	}
}

func writeBars(s *strings.Builder, rows []row, bars []bar) {
	s.WriteString("\n## Bars\n\nWhat ours must not exceed. [README.md](README.md#bars) has the figures of others beside them.\n\n" +
		"| row | subject | | bar | measured | met |\n|---|---|---|---|--:|---|\n")
	for _, b := range bars {
		measured, met, err := b.check(rows)
		verdict := map[bool]string{true: "yes", false: "no"}[met]
		if err != nil {
			verdict = "not measured"
		}
		fmt.Fprintf(s, "| %s | %s | %s | %s | %s | %s |\n", b.bench, b.subject, b.statistic, b.limit, measured, verdict)
	}
}
