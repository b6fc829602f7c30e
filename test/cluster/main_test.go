// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster_test tests hack/cluster with the real programs.
package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// ownerEnv makes this test binary start a cluster, print its directory and processes, and wait to
// be killed.
const ownerEnv = "CLUSTER_TEST_OWNER"

// shared is the cluster of the tests that do not stop their own.
var shared *cluster.Cluster

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		owner()
	}
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	ctx := context.Background()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "FAIL:", err)
			code = 1
		}
	}
	var err error
	if shared, err = cluster.Start(ctx, cluster.Options{Progress: os.Stderr}); err != nil {
		fail(err)
		return code
	}
	defer func() { // also if a test panics
		fail(shared.Stop())
		fail(goleak.Find())
	}()
	if err := shared.ApplyDir(ctx, "testdata", "Deployment"); err != nil {
		fail(err)
		return code
	}
	return m.Run()
}

func owner() {
	c, err := cluster.Start(context.Background(), cluster.Options{})
	if err != nil {
		panic(err)
	}
	fmt.Println(c.Dir(), strings.Join(pids(c.Dir()), " "))
	select {}
}

// pids returns the ids of the cluster's processes: the names of the files by which they register.
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

// checkNothingLeft waits until the directory and the processes are gone, since another process may
// be removing them.
func checkNothingLeft(t *testing.T, dir string, pids []string) {
	t.Helper()
	ctx := fleet.Context(t)
	fleet.Eventually(ctx, t, func() error {
		if _, err := os.Lstat(dir); !os.IsNotExist(err) {
			return fmt.Errorf("%s is still there (%w)", dir, err)
		}
		for _, pid := range pids {
			out, err := exec.CommandContext(ctx, "ps", "-o", "stat=", "-p", pid).Output()
			if err == nil && !strings.HasPrefix(strings.TrimSpace(string(out)), "Z") {
				return fmt.Errorf("process %s is still there", pid)
			}
		}
		return nil
	})
}

// waitForAudit waits for an event of the audit log that matches.
func waitForAudit(t *testing.T, match func(auditv1.Event) bool) (found auditv1.Event) {
	t.Helper()
	fleet.Eventually(fleet.Context(t), t, func() error {
		events, err := shared.AuditEvents()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(events, match)
		if i < 0 {
			return errors.New("the event is not in the audit log")
		}
		found = events[i]
		return nil
	})
	return found
}
