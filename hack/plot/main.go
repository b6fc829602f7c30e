// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command plot draws the pictures of docs/bench from latest.json, in the folder named by its argument.
// `make bench` and `make generate` run it, `make verify` compares the pictures.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "Usage: plot FOLDER")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "latest.json"))
	if err != nil {
		return err
	}
	var rows []row
	if err := json.Unmarshal(text, &rows); err != nil {
		return err
	}
	for name, p := range pictures {
		svg, err := p.draw(rows)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name+".svg"), svg, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// row has the fields of a row of latest.json that are drawn.
type row struct {
	Bench, Subject, Unit, Date, Machine string
	Min, Median, P99                    float64
}

// picture is what there is to draw: groups of lines, one below the other, on one axis.
type picture struct {
	title, subtitle string
	log             bool // the axis is of seconds, and logarithmic; otherwise of MiB, from 0
	min, max        float64
	groups          []group
}

type group struct {
	title string
	lines []line
}

// line is a row of latest.json under another name. Without a row, it is a quotation.
type line struct {
	name, bench, subject string
	quoted               row
	substitute           string // of a figure, why there is none
}

const (
	quartermaster = "quartermaster"
	kcm           = "kube-controller-manager"
	peer          = "controller-runtime"
	quotedSuffix  = ", measured earlier"
)

// pictures by the names of their files.
var pictures = map[string]picture{
	"leader": {
		title:    "Time without a leader",
		subtitle: "From the signal until another replica holds the Lease: least, median and 99th percentile, on a logarithmic scale",
		log:      true, min: 0.004, max: 60,
		groups: []group{
			{"after SIGTERM, as in an upgrade or a drain", []line{
				{name: "Quartermaster", bench: handover, subject: quartermaster},
				{name: kcm + ", alpha gate", bench: handover, subject: kcm + ", release gate"},
				{name: peer, bench: handover, subject: peer},
				{name: kcm, bench: handover, subject: kcm},
			}},
			{"after SIGKILL, as in a crash", []line{
				{name: "Quartermaster", bench: crash, subject: quartermaster},
				{name: kcm, bench: crash, subject: kcm},
				{name: peer, bench: crash, subject: peer},
			}},
		},
	},
	"memory": {
		title:    "Memory by number of Secrets",
		subtitle: "Resident memory of the leader, with all Secrets in its cache",
		max:      700,
		groups: []group{
			{"empty cluster", steady("memory/empty cluster")},
			{"50,000 Secrets of 1 KiB", steady("memory/50000 Secrets of 1 KiB")},
			{"200,000 Secrets of 256 bytes", append(steady("scale/200000 Secrets of 256 bytes")[:2], line{name: kcm, substitute: "not measured"})},
		},
	},
	"reload": {
		title:    "From a changed ConfigMap to the rolled Deployment",
		subtitle: "Without the quiet period of 1 s: least, median and 99th percentile, on a logarithmic scale",
		log:      true, min: 0.004, max: 60,
		groups: []group{
			{"one change", []line{
				{name: "Quartermaster", bench: "reload/one change, update received to patch written, by the audit log", subject: quartermaster},
				{name: "Reloader" + quotedSuffix, quoted: row{Min: 0.0096, Median: 0.0096, P99: 0.016}},
			}},
			{"100 changes at once, until all are rolled", []line{
				{name: "Quartermaster", bench: "reload/burst of 100 ConfigMaps of 100 Deployments, all patched", subject: quartermaster},
				{name: "Reloader" + quotedSuffix, quoted: row{Min: 10, Median: 10, P99: 10}},
			}},
			{"changed while nothing ran, from the next start", []line{
				{name: "Quartermaster", bench: "reload/changed while down, start to patched", subject: quartermaster},
				{name: "Reloader" + quotedSuffix, substitute: "never: the change is lost"},
			}},
		},
	},
}

const (
	handover = "handover/SIGTERM to new holder, as a watch sees it"
	crash    = "failover/15/10/2, SIGKILL to new holder"
)

// steady returns the lines of one data set.
func steady(set string) []line {
	return []line{
		{name: "Quartermaster", bench: set + ", RSS steady", subject: quartermaster + ": leader"},
		{name: peer, bench: set + ", RSS steady", subject: peer + ": leader"},
		{name: kcm, bench: set + ", RSS steady", subject: kcm + ": leader"},
	}
}

// findRow finds the row of the line, in seconds if it is a time.
func (l line) findRow(rows []row) (row, error) {
	if l.bench == "" {
		return l.quoted, nil
	}
	i := slices.IndexFunc(rows, func(r row) bool { return r.Bench == l.bench && r.Subject == l.subject })
	if i < 0 {
		return row{}, fmt.Errorf("no row %s of %s", l.bench, l.subject)
	}
	r := rows[i]
	if r.Unit == "ms" {
		r.Min, r.Median, r.P99 = r.Min/1000, r.Median/1000, r.P99/1000
	}
	return r, nil
}

// provenance says when and on which machines the rows were measured.
func (p picture) provenance(rows []row) (string, error) {
	machines := map[string][]string{}
	for _, g := range p.groups {
		for _, l := range g.lines {
			r, err := l.findRow(rows)
			if err != nil {
				return "", err
			}
			if r.Date != "" && !slices.Contains(machines[r.Machine], r.Date) {
				machines[r.Machine] = append(machines[r.Machine], r.Date)
			}
		}
	}
	var all []string
	for machine, dates := range machines {
		slices.Sort(dates)
		all = append(all, strings.Join(dates, " and ")+" on "+machine)
	}
	slices.Sort(all)
	return "Measured " + strings.Join(all, "; "), nil
}
