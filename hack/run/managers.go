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
	list    []*cluster.Manager
	logs    sync.WaitGroup // follow the managers' logs

	leadOnce sync.Once
	leading  chan struct{} // closed when a manager has begun to lead
}

// add prints the relevant lines of the manager's log from now on.
func (ms *managers) add(ctx context.Context, m *cluster.Manager) {
	ms.list = append(ms.list, m)
	ms.logs.Go(func() { ms.showLog(context.WithoutCancel(ctx), m) })
}

// recordLeader prints that a manager leads, and writes the file from which the command for stopping the
// leader reads.
func (ms *managers) recordLeader(m *cluster.Manager) {
	fmt.Fprintf(ms.out, "%s leads\n", m.Pod)
	if err := os.WriteFile(ms.leaderPID(), []byte(strconv.Itoa(m.PID())+"\n"), 0o600); err != nil {
		fmt.Fprintln(ms.out, "Error:", err)
	}
	ms.leadOnce.Do(func() { close(ms.leading) })
}

func (ms *managers) leaderPID() string { return filepath.Join(ms.cluster.Dir(), "leader.pid") }

// waitForLeader waits until one of the managers leads.
func (ms *managers) waitForLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, fmt.Errorf("nobody leads after %v, see %s", leaderTimeout, ms.list[0].Log))
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		select {
		case <-ms.leading:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if err := ms.cluster.Check(); err != nil {
			return err
		}
		for _, m := range ms.list {
			if code := m.ExitCode(); code >= 0 {
				return fmt.Errorf("%s ended with code %d; its last lines:\n%s", m.Name, code, m.Tail(15))
			}
		}
	}
}

// watchExits prints which managers have ended, until ctx or the control plane ends.
func (ms *managers) watchExits(ctx context.Context) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	exited := map[string]bool{}
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
		for _, m := range ms.list {
			if code := m.ExitCode(); code >= 0 && !exited[m.Name] {
				exited[m.Name] = true
				fmt.Fprintf(ms.out, "%s ended with code %d; managers left: %d. Ctrl-C stops the rest.\n", m.Name, code, len(ms.list)-len(exited))
			}
		}
	}
}

// stop ends the managers as a rollout would, all at once.
func (ms *managers) stop() {
	var stopping sync.WaitGroup
	for _, m := range ms.list {
		stopping.Go(func() {
			if err := m.Stop(context.Background(), stopGrace); err != nil {
				fmt.Fprintln(ms.out, err)
			}
		})
	}
	stopping.Wait()
	ms.logs.Wait()
}
