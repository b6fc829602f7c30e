// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures the manager and its peers, all on one control plane on loopback, and
// writes the figures to docs/bench: bench.md and rows.md for people, latest.json for programs. `make bench
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
	parts    []string
	subjects []string
	outDir   string

	idle   time.Duration
	settle time.Duration
	scale  float64
}

// parts returns the benchmarks in the order in which they run. Those that need an empty cluster
// come first.
func parts() []part {
	return []part{
		{"handover", (*bench).benchmarkHandovers},
		{"failover", (*bench).benchmarkFailovers},
		{"idle", (*bench).benchmarkIdle},
		{"reload", (*bench).benchmarkReload},
		{"replication", (*bench).benchmarkReplication},
		{"widgets", (*bench).benchmarkWidgets},
		{"memory", (*bench).benchmarkMemory},
		{"scale", (*bench).benchmarkScale},
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
	flag.StringVar(&o.outDir, "out", "", "the folder of bench.md, rows.md and latest.json (default docs/bench)")
	flag.DurationVar(&o.idle, "idle", 3*time.Minute, "idle: how long requests are counted, in whole minutes")
	flag.DurationVar(&o.settle, "settle", 150*time.Second, "memory, scale, replication, widgets: the time from synced to steady; Go collects garbage at least every 2 minutes")
	flag.Float64Var(&o.scale, "scale", 1, "multiplies the numbers of repetitions and of objects; less than 1 for a trial")
	flag.Parse()

	o.parts = strings.Split(*benches, ",")
	for _, name := range o.parts {
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
	if o.idle < time.Minute || o.scale <= 0 {
		return o, errors.New("-idle must be at least 1m, -scale greater than 0")
	}
	return o, nil
}

// scaled returns a usual number of repetitions or of objects, scaled.
func (o *options) scaled(n int) int { return max(1, int(float64(n)*o.scale)) }

// wants reports whether a subject is to be measured.
func (o *options) wants(subject string) bool {
	return o.subjects == nil || slices.ContainsFunc(o.subjects, func(prefix string) bool { return strings.HasPrefix(subject, prefix) })
}

func run(ctx context.Context, opts options) (err error) {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	if opts.outDir == "" {
		opts.outDir = filepath.Join(root, "docs", "bench")
		if changed := commandOutput(ctx, root, "git", "status", "--porcelain", "--", ".", ":!docs/bench"); changed != "" {
			return fmt.Errorf("commit first, since bench.md names the commit that is measured, or write elsewhere with -out:\n%s", changed)
		}
	}
	b, err := newBench(ctx, root, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stop()) }()
	begin := time.Now()
	for _, p := range parts() {
		if !slices.Contains(opts.parts, p.name) {
			continue
		}
		b.logProgress("--- %s (load %s)", p.name, loadAverage())
		if err := p.run(b, ctx); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", p.name, err), b.writeResults())
		}
		// The rows are written after every part, so that they are not lost if a later part fails.
		if err := b.writeResults(); err != nil {
			return err
		}
	}
	b.logProgress("Done after %s", time.Since(begin).Round(time.Second))
	return nil
}
