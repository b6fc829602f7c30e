// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const metricsIntro = `# Metrics

<!-- Written by make generate. -->

These are the metrics at ` + "`/metrics`" + ` with all controllers and otherwise default flags; [Operating](operating.md#metrics)
says which are not listed. ` + "`--federation-dns`" + ` adds the loop ` + "`dns`" + `. The label ` + "`kind`" + ` has further values with flags
that add kinds, such as ` + "`--scale-schedule-kinds`" + `.

The manager's own are ALPHA: a release may rename them, and [CHANGELOG.md](../../CHANGELOG.md) says so. The
values of a label are listed if the manager knows them at its start and they are at most twelve. API groups are not
listed, nor are values that exist only from their first occurrence on, such as most [reasons](monitoring.md#events) of
` + "`quartermaster_replication_problems_total`" + `.
`

// metricsGroups are the sections of the page, by the prefix of a metric. The last section takes the metrics
// that no other prefix matches.
var metricsGroups = []struct{ prefix, title, note string }{
	{prefix: "quartermaster_leader_election_", title: "Election"},
	{prefix: "quartermaster_controller_", title: "All controllers"},
	{prefix: "quartermaster_informer_", title: "Cache"},
	{prefix: "quartermaster_config_reload_", title: "config-reload"},
	{prefix: "quartermaster_csr_approver_", title: "csr-approver"},
	{prefix: "quartermaster_federation_", title: "federation"},
	{prefix: "quartermaster_replication_", title: "replication"},
	{prefix: "quartermaster_scale_schedule_", title: "scale-schedule"},
	{prefix: "quartermaster_ttl_", title: "ttl"},
	{prefix: "quartermaster_", title: "Others"},
	{prefix: "", title: "Libraries", note: "`workqueue_work_duration_seconds`, `workqueue_unfinished_work_seconds` and `workqueue_longest_running_processor_seconds`\n" +
		"have no series for the loops of controllers. `quartermaster_controller_reconcile_duration_seconds` and\n" +
		"`quartermaster_controller_longest_running_reconcile_seconds` take their place.\n\n"},
}

// conditions say when a metric exists, where the list knows only a manager without a flag.
var conditions = map[string]string{
	"quartermaster_ttl_rule_errors_total": " from the start for each rule of `--ttl-rules`, and not without rules",
}

// fewValues is how many values of a label are listed at most.
const fewValues = 12

// metricsPage returns the page of the metrics, from the list that a test of pkg/app takes from the registry.
func metricsPage(dir string) (map[string][]byte, error) {
	golden, err := os.ReadFile(filepath.Join(dir, "..", "pkg", "app", "testdata", "metrics.golden"))
	if err != nil {
		return nil, err
	}
	rows := make([]string, len(metricsGroups))
	for entry := range strings.SplitSeq(strings.ReplaceAll(string(golden), "\n    ", "\x00"), "\n") {
		lines := strings.Split(entry, "\x00")
		if len(lines) < 2 {
			continue // after the last one
		}
		name, kind, _ := strings.Cut(lines[0], " ")
		kind, condition, _ := strings.Cut(kind, ",")
		help := lines[1]
		if strings.HasPrefix(help, "[") { // the stability
			_, help, _ = strings.Cut(help, "] ")
		}
		if condition = cmp.Or(conditions[name], condition); condition != "" {
			help += " Exists" + condition + "."
		}
		var labels []string
		for _, line := range lines[2:] {
			label, values, _ := strings.Cut(line, ":")
			label = "`" + label + "`"
			if listed := strings.Fields(values); len(listed) > 0 && len(listed) <= fewValues && label != "`group`" {
				slices.SortFunc(listed, compareNumbers)
				label += ": " + strings.Join(listed, ", ")
			}
			labels = append(labels, label)
		}
		for i, group := range metricsGroups {
			if strings.HasPrefix(name, group.prefix) {
				rows[i] += fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, strings.Join(labels, "; "), help)
				break
			}
		}
	}
	page := bytes.NewBufferString(metricsIntro)
	for i, group := range metricsGroups {
		if rows[i] != "" {
			fmt.Fprintf(page, "\n## %s\n\n%s| metric | type | labels | meaning |\n|---|---|---|---|\n%s", group.title, group.note, rows[i])
		}
	}
	return map[string][]byte{"../docs/operate/metrics.md": page.Bytes()}, nil
}

// compareNumbers compares numbers, and then texts.
func compareNumbers(a, b string) int {
	m, _ := strconv.Atoi(a)
	n, _ := strconv.Atoi(b)
	return cmp.Or(cmp.Compare(m, n), strings.Compare(a, b))
}
