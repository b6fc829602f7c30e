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

// managers holds the managers of a run and what is printed about them.
type managers struct {
	out     io.Writer
	cluster *cluster.Cluster
	all     []*cluster.Manager
	logs    sync.WaitGroup // follow the managers' logs

	led   sync.Once
	leads chan struct{} // closed when a manager has begun to lead
}

// add prints the relevant lines of the manager's log from now on.
func (ms *managers) add(ctx context.Context, m *cluster.Manager) {
	ms.all = append(ms.all, m)
	ms.logs.Go(func() { ms.showLog(context.WithoutCancel(ctx), m) })
}

// lead prints that a manager leads, and writes the file from which the command for stopping the
// leader reads.
func (ms *managers) lead(m *cluster.Manager) {
	fmt.Fprintf(ms.out, "%s leads\n", m.Pod)
	if err := os.WriteFile(ms.leaderPID(), []byte(strconv.Itoa(m.PID())+"\n"), 0o600); err != nil {
		fmt.Fprintln(ms.out, "Error:", err)
	}
	ms.led.Do(func() { close(ms.leads) })
}

func (ms *managers) leaderPID() string { return filepath.Join(ms.cluster.Dir(), "leader.pid") }

// waitForLeader waits until one of the managers leads.
func (ms *managers) waitForLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, fmt.Errorf("nobody leads after %v, see %s", leaderTimeout, ms.all[0].Log))
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		select {
		case <-ms.leads:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if err := ms.cluster.Check(); err != nil {
			return err
		}
		for _, m := range ms.all {
			if code := m.ExitCode(); code >= 0 {
				return fmt.Errorf("%s ended with code %d; its last lines:\n%s", m.Name, code, m.Tail(15))
			}
		}
	}
}

// follow prints which managers have ended, until ctx or the control plane ends.
func (ms *managers) follow(ctx context.Context) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	ended := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			fmt.Fprintln(ms.out, "Stopping the managers, then everything else")
			return nil
		case <-tick.C:
		}
		if err := ms.cluster.Check(); err != nil { // nothing restarts it
			fmt.Fprintln(ms.out, "The control plane is gone; stopping the managers, then everything else")
			return err
		}
		for _, m := range ms.all {
			if code := m.ExitCode(); code >= 0 && !ended[m.Name] {
				ended[m.Name] = true
				fmt.Fprintf(ms.out, "%s ended with code %d; managers left: %d. Ctrl-C stops the rest.\n", m.Name, code, len(ms.all)-len(ended))
			}
		}
	}
}

// stop ends the managers as a rollout would, all at once.
func (ms *managers) stop() {
	var stopping sync.WaitGroup
	for _, m := range ms.all {
		stopping.Go(func() {
			if err := m.Stop(context.Background(), stopGrace); err != nil {
				fmt.Fprintln(ms.out, err)
			}
		})
	}
	stopping.Wait()
	ms.logs.Wait()
}
