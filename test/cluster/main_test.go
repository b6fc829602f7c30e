// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster_test tests hack/cluster on the real programs.
package cluster_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

// ownerEnv makes this test binary start a cluster, tell about it, and wait to be ended.
const ownerEnv = "CLUSTER_TEST_OWNER"

// shared is the cluster of the tests that do not stop theirs.
var shared *cluster.Cluster

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		owner()
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx := context.Background()
	if _, err := controlplane.Ensure(ctx, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var err error
	if shared, err = cluster.Start(ctx, cluster.Options{Progress: os.Stderr}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { // also when a test panics
		if err := shared.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	if err := shared.ApplyDir(ctx, "testdata", "Deployment"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := shared.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

func owner() {
	c, err := cluster.Start(context.Background(), cluster.Options{})
	if err != nil {
		panic(err)
	}
	fmt.Println(c.Dir(), strings.Join(pids(c.Dir()), " "))
	select {}
}

// pids are the processes of the cluster: the names of the files by which they register.
func pids(dir string) []string {
	files, err := os.ReadDir(filepath.Join(dir, "pids"))
	if err != nil {
		panic(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// checkNothingLeft waits for the directory and the processes to be gone: they may be in another process's hands.
func checkNothingLeft(t *testing.T, dir string, pids []string) {
	t.Helper()
	eventually(t, dir+" is removed", func() bool {
		_, err := os.Lstat(dir)
		return os.IsNotExist(err)
	})
	for _, pid := range pids {
		eventually(t, "process "+pid+" is gone", func() bool {
			out, err := exec.Command("ps", "-o", "stat=", "-p", pid).Output()
			return err != nil || strings.HasPrefix(strings.TrimSpace(string(out)), "Z")
		})
	}
}

// within bounds a wait generously, so that a test that fails says where.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(time.Minute)
	for !cond() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}
