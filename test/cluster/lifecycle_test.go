// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

func TestStopLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	c, err := cluster.Start(t.Context(), cluster.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	started := pids(c.Dir())
	if len(started) != 3 {
		t.Errorf("%d processes, want 3", len(started))
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	checkNothingLeft(t, dir, started)
	if err := c.Stop(); err != nil {
		t.Errorf("second Stop: %v", err)
	}
}

func TestTheEndOfTheContextStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c, err := cluster.Start(ctx, cluster.Options{WithoutControllerManager: true})
	if err != nil {
		t.Fatal(err)
	}
	started := pids(c.Dir())
	cancel()
	checkNothingLeft(t, c.Dir(), started)
}

func TestAFailedStartLeavesNothingAndSaysWhy(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		args []string
		want string
	}{
		"a flag that kube-apiserver does not know": {t.Context(), []string{"--no-such-flag"}, "unknown flag: --no-such-flag"},
		"a cancelled context":                      {cancelled, nil, context.Canceled.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			_, err := cluster.Start(test.ctx, cluster.Options{Dir: filepath.Join(parent, "run"), APIServerArgs: test.args})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if left, _ := os.ReadDir(parent); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if out, err := exec.Command("ps", "-eo", "args").Output(); err != nil || strings.Contains(string(out), parent) {
				t.Errorf("a process is left (%v):\n%s", err, out)
			}
		})
	}
}

func TestAKilledOwnerLeavesNothing(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the kill
	fields := strings.Fields(line)
	if len(fields) != 4 {
		t.Fatalf("the owner said %q, want a directory and three processes", line)
	}
	checkNothingLeft(t, fields[0], fields[1:])
}
