// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	// leaderTimeout is longer than the first start of a manager on a busy machine.
	leaderTimeout = time.Minute

	// stopGrace is longer than a manager's --shutdown-timeout, 20 s.
	stopGrace = 30 * time.Second

	pollInterval = 250 * time.Millisecond
)

// fleet holds the managers of a run and what is printed about them.
type fleet struct {
	out      io.Writer
	cluster  *cluster.Cluster
	managers []*cluster.Manager
	logs     sync.WaitGroup // follow the managers' logs

	led   sync.Once
	leads chan struct{} // closed when a manager has begun to lead
}

// add prints the relevant lines of the manager's log from now on.
func (f *fleet) add(ctx context.Context, m *cluster.Manager) {
	f.managers = append(f.managers, m)
	f.logs.Go(func() { f.showLog(context.WithoutCancel(ctx), m) })
}

// lead prints that a manager leads, and writes the file from which the command for stopping the
// leader reads.
func (f *fleet) lead(m *cluster.Manager) {
	fmt.Fprintf(f.out, "%s leads\n", m.Pod)
	if err := os.WriteFile(f.leaderPID(), []byte(strconv.Itoa(m.PID())+"\n"), 0o600); err != nil {
		fmt.Fprintln(f.out, "Error:", err)
	}
	f.led.Do(func() { close(f.leads) })
}

func (f *fleet) leaderPID() string { return filepath.Join(f.cluster.Dir(), "leader.pid") }

// waitForLeader waits until one of the managers leads.
func (f *fleet) waitForLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, fmt.Errorf("nobody leads after %v, see %s", leaderTimeout, f.managers[0].Log))
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		select {
		case <-f.leads:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if err := f.cluster.Check(); err != nil {
			return err
		}
		for _, m := range f.managers {
			if code := m.ExitCode(); code >= 0 {
				return fmt.Errorf("%s ended with code %d; its last lines:\n%s", m.Name, code, m.Tail(15))
			}
		}
	}
}

// follow prints which managers have ended, until ctx or the control plane ends.
func (f *fleet) follow(ctx context.Context) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	ended := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			fmt.Fprintln(f.out, "Stopping the managers, then everything else")
			return nil
		case <-tick.C:
		}
		if err := f.cluster.Check(); err != nil { // nothing restarts it
			fmt.Fprintln(f.out, "The control plane is gone; stopping the managers, then everything else")
			return err
		}
		for _, m := range f.managers {
			if code := m.ExitCode(); code >= 0 && !ended[m.Name] {
				ended[m.Name] = true
				fmt.Fprintf(f.out, "%s ended with code %d; managers left: %d. Ctrl-C stops the rest.\n", m.Name, code, len(f.managers)-len(ended))
			}
		}
	}
}

// stop ends the managers as a rollout would, all at once.
func (f *fleet) stop() {
	var stopping sync.WaitGroup
	for _, m := range f.managers {
		stopping.Go(func() {
			if err := m.Stop(context.Background(), stopGrace); err != nil {
				fmt.Fprintln(f.out, err)
			}
		})
	}
	stopping.Wait()
	f.logs.Wait()
}
