// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	leaseName = "quartermaster"

	// leaderTimeout is longer than the lease of a leader that ended without a release, 15 s.
	leaderTimeout = time.Minute

	// stopGrace is longer than a manager's --shutdown-timeout, 20 s.
	stopGrace = 30 * time.Second

	pollInterval = 250 * time.Millisecond
)

// fleet holds the managers of a run and what is printed about them.
type fleet struct {
	dir      string
	out      io.Writer
	client   kubernetes.Interface
	cluster  *cluster.Cluster // nil on an existing cluster
	managers []*cluster.Manager
	logs     sync.WaitGroup // follow the managers' logs
}

// add prints the relevant lines of the manager's log from now on.
func (f *fleet) add(ctx context.Context, name string, m *cluster.Manager) {
	f.managers = append(f.managers, m)
	f.logs.Go(func() { showLog(context.WithoutCancel(ctx), f.out, name, m) })
}

// leader returns the Pod of the Lease's holder, empty if nobody leads.
func (f *fleet) leader(ctx context.Context) (pod string, err error) {
	lease, err := f.client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return "", err
	}
	pod, _, _ = strings.Cut(*lease.Spec.HolderIdentity, "_") // PODNAME_UUID
	return pod, nil
}

// waitForLeader waits until one of the managers leads.
func (f *fleet) waitForLeader(ctx context.Context) (pod string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, leaderTimeout, fmt.Errorf("nobody leads after %v, see %s", leaderTimeout, filepath.Join(f.dir, "logs")))
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if pod, err := f.leader(ctx); err == nil && pod != "" {
			return pod, f.writeLeaderPID(pod)
		}
		if err := f.checkCluster(); err != nil {
			return "", err
		}
		for _, m := range f.managers {
			if code := m.ExitCode(); code >= 0 {
				return "", fmt.Errorf("%s ended with code %d; its last lines:\n%s", m.Name, code, m.Tail(15))
			}
		}
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// checkCluster returns an error if a process of the control plane has ended. Nothing restarts it.
func (f *fleet) checkCluster() error {
	if f.cluster == nil {
		return nil
	}
	if err := f.cluster.Check(); err != nil {
		return fmt.Errorf("the control plane is gone: %w", err)
	}
	return nil
}

// follow prints who leads when it changes, and which managers have ended, until ctx or the control
// plane ends.
func (f *fleet) follow(ctx context.Context, last string) error {
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
		if err := f.checkCluster(); err != nil {
			fmt.Fprintln(f.out, "The control plane is gone; stopping the managers, then everything else")
			return err
		}
		// The managers' logs show the errors.
		if pod, err := f.leader(ctx); err == nil && pod != last {
			last = pod
			if pod == "" {
				pod = "Nobody"
			}
			fmt.Fprintf(f.out, "%s leads\n", pod)
			if err := f.writeLeaderPID(last); err != nil {
				fmt.Fprintln(f.out, "Error:", err)
			}
		}
		for _, m := range f.managers {
			if code := m.ExitCode(); code >= 0 && !ended[m.Name] {
				ended[m.Name] = true
				fmt.Fprintf(f.out, "%s ended with code %d; %s. Ctrl-C stops the rest.\n", m.Name, code, left(len(f.managers)-len(ended)))
			}
		}
	}
}

func left(managers int) string {
	switch managers {
	case 0:
		return "no manager is left"
	case 1:
		return "one manager is left"
	default:
		return fmt.Sprintf("%d managers are left", managers)
	}
}

// writeLeaderPID writes the file from which the command for stopping the leader reads. It removes
// the file if none of our managers leads.
func (f *fleet) writeLeaderPID(pod string) error {
	path := filepath.Join(f.dir, "leader.pid")
	for _, m := range f.managers {
		if m.Pod == pod && pod != "" {
			return os.WriteFile(path, []byte(strconv.Itoa(m.PID())+"\n"), 0o600)
		}
	}
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
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
