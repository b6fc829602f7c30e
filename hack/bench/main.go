// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures the manager and its peers, all on one control plane on loopback, and
// writes the figures to docs/bench: bench.md for people, latest.json for programs. `make bench
// ARGS='-run idle'` runs a part and replaces only the rows of that part. docs/bench/README.md
// describes what is measured, and how.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

// options are the flags.
type options struct {
	run      []string
	subjects []string
	out      string
	profiles string

	handovers     int // of ours and of controller-runtime
	slowHandovers int // of kube-controller-manager, 17 s each
	crashes       int
	failovers     int
	stops         int
	idle          time.Duration
	settle        time.Duration
	scale         float64 // of the data sets
	updates       int
	starts        int
	takeovers     int
	restarts      int
	drops         int
	partition     time.Duration
	changes       int
	bursts        int
	reloads       int
	downs         int
	widgets       int
}

// parts returns the benchmarks in the order in which they run. Those that need an empty cluster
// come first.
func parts() []part {
	return []part{
		{"handover", (*bench).handovers},
		{"failover", (*bench).failovers},
		{"network", (*bench).network},
		{"idle", (*bench).idle},
		{"reload", (*bench).reload},
		{"limits", (*bench).limits},
		{"replication", (*bench).replication},
		{"widgets", (*bench).widgets},
		{"memory", (*bench).memory},
		{"scale", (*bench).scale},
	}
}

type part struct {
	name string
	run  func(*bench, context.Context) error
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	opts, err := parseFlags()
	if err == nil {
		err = run(ctx, opts)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func parseFlags() (options, error) {
	var names []string
	for _, p := range parts() {
		names = append(names, p.name)
	}
	var o options
	benches := flag.String("run", strings.Join(names, ","), "the benchmarks to run")
	subjects := flag.String("subjects", "", "only those whose names begin with this: quartermaster, kube-controller-manager, controller-runtime (default all)")
	flag.StringVar(&o.out, "out", "", "the folder of bench.md and latest.json (default docs/bench)")
	flag.StringVar(&o.profiles, "profiles", "", "memory: write heap profiles of the managers to this folder")
	flag.IntVar(&o.handovers, "handovers", 50, "handover: graceful hand-overs of each subject")
	flag.IntVar(&o.slowHandovers, "slow-handovers", 10, "handover: those of kube-controller-manager without its release gate")
	flag.IntVar(&o.failovers, "failovers", 50, "failover: crashes of quartermaster at the default timing")
	flag.IntVar(&o.crashes, "crashes", 5, "failover: crashes of each other subject, and at each other timing")
	flag.IntVar(&o.stops, "stops", 10, "failover: times that a leader of quartermaster is stopped by SIGSTOP")
	flag.IntVar(&o.restarts, "restarts", 10, "failover: times that the only container of quartermaster is restarted in its Pod")
	flag.IntVar(&o.drops, "drops", 10, "network: times that all packets of a leader of quartermaster are dropped")
	flag.DurationVar(&o.partition, "partition", 10*time.Minute, "network: how long the replicas do not reach each other")
	flag.DurationVar(&o.idle, "idle", 3*time.Minute, "idle: how long requests are counted, in whole minutes")
	flag.DurationVar(&o.settle, "settle", 150*time.Second, "memory, scale, replication, widgets: the time from synced to steady; Go collects garbage at least every 2 minutes")
	flag.Float64Var(&o.scale, "scale", 1, "memory, scale, replication: multiplies the numbers of objects; less than 1 for a trial")
	flag.IntVar(&o.updates, "updates", 10000, "memory, scale: updates while CPU time is taken")
	flag.IntVar(&o.starts, "starts", 5, "memory, scale: starts whose time to synced is taken")
	flag.IntVar(&o.takeovers, "takeovers", 5, "memory, scale: hand-overs whose time to the first reconcile is taken")
	flag.IntVar(&o.changes, "changes", 200, "reload, replication: changes one at a time")
	flag.IntVar(&o.bursts, "bursts", 5, "reload, limits, replication: bursts of changes")
	flag.IntVar(&o.reloads, "reloads", 1000, "limits: Deployments in a burst")
	flag.IntVar(&o.downs, "downs", 5, "reload: times that all managers are down during a change")
	flag.IntVar(&o.widgets, "widgets", 10000, "widgets: the number of Widgets")
	flag.Parse()

	o.run = strings.Split(*benches, ",")
	for _, name := range o.run {
		if !slices.Contains(names, name) {
			return o, fmt.Errorf("-run: %q is none of %s", name, strings.Join(names, ", "))
		}
	}
	if *subjects != "" {
		o.subjects = strings.Split(*subjects, ",")
	}
	if flag.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if o.idle < time.Minute || o.scale <= 0 || min(o.handovers, o.slowHandovers, o.crashes, o.failovers, o.stops, o.restarts, o.drops, o.updates, o.starts,
		o.takeovers, o.changes, o.bursts, o.reloads, o.downs, o.widgets) < 1 {
		return o, errors.New("every count must be at least 1, -idle at least 1m, -scale greater than 0")
	}
	return o, nil
}

// wants reports whether a subject is to be measured.
func (o *options) wants(subject string) bool {
	return o.subjects == nil || slices.ContainsFunc(o.subjects, func(prefix string) bool { return strings.HasPrefix(subject, prefix) })
}

func run(ctx context.Context, opts options) (err error) {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	if opts.out == "" {
		opts.out = filepath.Join(root, "docs", "bench")
	}
	b, err := newBench(ctx, root, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stop()) }()
	begin := time.Now()
	for _, p := range parts() {
		if !slices.Contains(opts.run, p.name) {
			continue
		}
		b.progress("--- %s (load %s)", p.name, loadAverage())
		if err := p.run(b, ctx); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", p.name, err), b.write())
		}
		// The rows are written after every part, so that they are not lost if a later part fails.
		if err := b.write(); err != nil {
			return err
		}
	}
	b.progress("Done after %s", time.Since(begin).Round(time.Second))
	return printTable(os.Stdout, b.rows)
}
