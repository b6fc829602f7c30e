// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command run is `make run`: a control plane on loopback, managers on it and a sample, until
// Ctrl-C.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

const usage = `Usage: run [flags] [-- flags of the managers]

Starts a Kubernetes control plane with simulated nodes, managers and a sample, and
stops them at Ctrl-C. It grants the managers what their flags need.

`

// options are the command line.
type options struct {
	replicas int
	nodes    int
	args     []string // for the managers
}

func main() {
	opts, err := parseFlags(os.Args[1:])
	if errors.Is(err, pflag.ErrHelp) {
		return
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		// A second signal ends this process at once; the reaper cleans up.
		context.AfterFunc(ctx, stop)
		err = run(ctx, opts)
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("interrupted: %w", err)
		}
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (options, error) {
	var o options
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	fs.IntVar(&o.replicas, "replicas", 2, "managers")
	fs.IntVar(&o.nodes, "nodes", 2, "simulated nodes, on which Pods seem to run")
	fs.Usage = func() { fmt.Fprint(os.Stderr, usage+fs.FlagUsages()) }
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	o.args = fs.Args()
	for _, arg := range o.args {
		if !strings.HasPrefix(arg, "-") {
			return o, fmt.Errorf("unexpected argument %q", arg)
		}
	}
	if o.replicas < 1 || o.replicas > 20 {
		return o, fmt.Errorf("--replicas=%d: must be from 1 to 20", o.replicas)
	}
	if o.nodes < 0 || o.nodes > 100 {
		return o, fmt.Errorf("--nodes=%d: must be from 0 to 100", o.nodes)
	}
	return o, nil
}

func run(ctx context.Context, opts options) error {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	lock, err := lockCheckout(root)
	if err != nil {
		return err
	}
	defer lock.Close()
	dir := filepath.Join(root, ".run")
	if err := os.RemoveAll(dir); err != nil { // left over if the machine lost its power
		return err
	}
	return runManagers(ctx, opts, root, dir, lock)
}

// lockCheckout prevents a second run in the same checkout. The reaper holds the lock too, until the
// clean-up of this run is done.
func lockCheckout(root string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(root, ".cache"), 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(root, ".cache", "run.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("make run is already running in %s: stop it first, or use another checkout", root)
		}
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return lock, nil
}
