// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// markdown returns bench.md: a summary, where the figures come from, and the bars.
func markdown(rows []row, bars []bar, env environment) string {
	var s strings.Builder
	s.WriteString("# Benchmarks\n\nWritten by `make bench`; do not edit. [README.md](README.md) tells what each row means and how it is measured.\n\n")
	writeSummary(&s, rows)
	for _, picture := range [][2]string{{"Time without a leader", "leader"}, {"Memory by number of Secrets", "memory"}, {"Time to roll", "reload"}} {
		fmt.Fprintf(&s, "![%s](%s.svg)\n\n", picture[0], picture[1])
	}
	writeEnvironment(&s, env)
	writeBars(&s, rows, bars)
	return s.String()
}

// rowsMarkdown returns rows.md: all rows, by part.
func rowsMarkdown(rows []row) string {
	var s strings.Builder
	s.WriteString("# Rows of the benchmarks\n\nWritten by `make bench`; do not edit. [bench.md](bench.md) has them in short.\n" +
		"[README.md](README.md) tells what each row means and how it is measured.\n")
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

// summary are the rows of which bench.md shows the medians first. The subjects are a program and its suffix.
var summary = []struct{ what, bench, suffix string }{
	{"no leader after a stop (SIGTERM)", "handover/SIGTERM to new holder, as a watch sees it", ""},
	{"no leader after a crash (SIGKILL)", "failover/15/10/2, SIGKILL to new holder", ""},
	{"no leader after a process hangs (SIGSTOP)", "failover/15/10/2, SIGSTOP to new holder", ""},
	{"a ConfigMap changes, until its Deployment is patched", "reload/one change, sent to patch seen by a watch", ""},
	{"100 ConfigMaps change, until 100 Deployments are patched", "reload/burst of 100 ConfigMaps of 100 Deployments, all patched", ""},
	{"one Secret is copied to 200 namespaces", "replication/one Secret to 200 namespaces, all created", ""},
	{"memory of the leader, empty cluster", "memory/empty cluster, RSS steady", ": leader"},
	{"memory of the leader, 5,000 Secrets, 5,000 ConfigMaps, 500 Deployments", "memory/5000 Secrets and 5000 ConfigMaps of 4 KiB, 500 Deployments, RSS steady", ": leader"},
	{"memory of the leader, 50,000 Secrets", "memory/50000 Secrets of 1 KiB, RSS steady", ": leader"},
	{"memory of the leader, 200,000 Secrets", "scale/200000 Secrets of 256 bytes, RSS steady", ": leader"},
}

func writeSummary(s *strings.Builder, rows []row) {
	programs := []string{"quartermaster", "controller-runtime", "kube-controller-manager"}
	fmt.Fprintf(s, "## In short\n\nMedians:\n\n| | %s |\n|---|--:|--:|--:|\n", strings.Join(programs, " | "))
	for _, line := range summary {
		fmt.Fprintf(s, "| %s |", line.what)
		for _, program := range programs {
			value, unit, err := bar{bench: line.bench, statistic: "median"}.valueFor(rows, program+line.suffix)
			if err != nil {
				s.WriteString(" |")
				continue
			}
			switch { // a time below a second is in ms, any other in s
			case unit == "s" && value < 1:
				value, unit = 1000*value, "ms"
			case unit == "ms" && value >= 1000:
				value, unit = value/1000, "s"
			}
			fmt.Fprintf(s, " %.4g %s |", value, unit)
		}
		s.WriteString("\n")
	}
	s.WriteString("\nAn empty cell was not measured. [All rows](rows.md) have their date, machine, minimum, p99 and maximum.\n" +
		"config-reload was measured with `--config-reload-quiet-period=0`: by default it waits 1 s for further changes.\n\n")
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
	s.WriteString("\n## Bars\n\nLimits that Quartermaster has set itself. [README.md](README.md#bars) has the figures of others beside them.\n\n" +
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
