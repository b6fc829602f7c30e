// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// runManagers runs the managers on a control plane of their own.
func runManagers(ctx context.Context, opts options, root, dir string, lock *os.File) (err error) {
	fmt.Println("Building the manager")
	binary, err := cluster.BuildManager(ctx, false)
	if err != nil {
		return err
	}
	c, err := startCluster(ctx, dir, opts.nodes, lock)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, c.Stop())
		if err == nil {
			fmt.Println("Stopped.")
		}
	}()
	ms := &managers{out: os.Stdout, cluster: c, leading: make(chan struct{})}
	if err := installSample(ctx, c, root); err != nil {
		return err
	}
	if err := grantRoles(ctx, c, binary, opts.args); err != nil {
		return err
	}
	start := c.StartManager
	if len(opts.args) > 0 { // they replace the Deployment's: two --controllers would add up
		start = c.StartBare
	}
	defer ms.stop()
	for i := range opts.replicas {
		replica, err := c.NewReplica(ctx, strconv.Itoa(i+1))
		if err != nil {
			return err
		}
		// Level 2 logs the writes, some of which the terminal shows.
		m, err := start(replica, cluster.ManagerOptions{Binary: binary, Args: append([]string{"--v=2"}, opts.args...)})
		if err != nil {
			return err
		}
		ms.add(ctx, m)
	}
	if err := ms.waitForLeader(ctx); err != nil {
		return err
	}
	ms.printIntroduction(binary, opts.nodes)
	return ms.watchExits(ctx)
}

// startCluster starts the control plane. The end of ctx ends the start, but not the started
// cluster: at Ctrl-C the managers stop before it.
func startCluster(ctx context.Context, dir string, nodes int, lock *os.File) (*cluster.Cluster, error) {
	clusterCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stopLink := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	defer stopLink()
	return cluster.Start(clusterCtx, cluster.Options{Dir: dir, Hold: []*os.File{lock}, Nodes: nodes, Progress: os.Stdout})
}

// installSample applies what an administrator would apply before the managers start, except for the
// manager's Deployment, whose replicas run as processes.
func installSample(ctx context.Context, c *cluster.Cluster, root string) error {
	if err := c.InstallComponents(ctx); err != nil {
		return err
	}
	if err := c.ApplyDir(ctx, filepath.Join(root, "hack", "run", "sample.yaml")); err != nil {
		return err
	}
	// Short commands to paste, which write nothing to the user's home.
	script := fmt.Sprintf("#!/bin/sh\nexec %s --kubeconfig=%s --cache-dir=%s \"$@\"\n", quote(c.Binary("kubectl")),
		quote(c.Kubeconfig()), quote(filepath.Join(c.Dir(), "kubectl-cache")))
	return os.WriteFile(filepath.Join(c.Dir(), "kubectl"), []byte(script), 0o700)
}

// grantRoles applies the roles that managers with these flags need. Without flags deploy/ has them.
func grantRoles(ctx context.Context, c *cluster.Cluster, binary string, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var problems bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, append([]string{"rbac"}, args...)...)
	cmd.Stderr = &problems
	roles, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("manager rbac: %w: %s", err, strings.TrimSpace(problems.String()))
	}
	file := filepath.Join(c.Dir(), "roles.yaml")
	if err := os.WriteFile(file, roles, 0o600); err != nil {
		return err
	}
	return c.ApplyDir(ctx, file)
}
