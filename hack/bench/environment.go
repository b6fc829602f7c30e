// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// environment is everything besides the programs that the figures depend on.
type environment struct {
	Date                  string
	Commit                string
	Go                    string
	ClientGo              string
	Kubernetes            string
	ControllerRuntime     string
	Machine               string // processor and memory
	Kernel                string
	LoadBefore, LoadAfter string
	Busy                  bool // the load before was over half of the cores
	Flags                 string
}

func (b *bench) readEnvironment(ctx context.Context, loadBefore string) environment {
	env := environment{
		Date: b.begin.UTC().Format(time.DateTime) + " UTC",
		// run has checked that the manager's sources have no changes, unless the figures go elsewhere.
		Commit:     commandOutput(ctx, b.root, "git", "describe", "--tags", "--always"),
		Go:         strings.TrimPrefix(runtime.Version(), "go"),
		Kubernetes: strings.TrimPrefix(commandOutput(ctx, b.root, b.cluster.Binary("kube-controller-manager"), "--version"), "Kubernetes "),
		Kernel:     commandOutput(ctx, b.root, "uname", "-sr"),
		LoadBefore: loadBefore,
		Flags:      strings.Join(os.Args[1:], " "),
	}
	var load float64
	if _, err := fmt.Sscan(loadBefore, &load); err == nil && load > float64(runtime.NumCPU())/2 {
		env.Busy = true
		b.logProgress("The load is %.2f on %d cores: do not compare the times with those of an idle machine", load, runtime.NumCPU())
	}
	env.ControllerRuntime = readField(filepath.Join(b.root, "hack", "bench", "peer", "go.mod"), "sigs.k8s.io/controller-runtime")
	var kib float64
	// Without a number of KiB, the machine has 0 GiB.
	_, _ = fmt.Sscan(readField("/proc/meminfo", "MemTotal"), &kib)
	env.Machine = fmt.Sprintf("%d cores, %.0f GiB; %s", runtime.NumCPU(), kib/(1<<20), readField("/proc/cpuinfo", "model name"))
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "k8s.io/client-go" {
				env.ClientGo = m.Version
			}
		}
	}
	return env
}

// commandOutput returns the output of a command as one line. It returns "unknown" if the command fails,
// since the figures do not depend on it.
func commandOutput(ctx context.Context, dir, name string, args ...string) string {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// readField finds the first line of a file that begins with name, and returns what follows the name and
// an optional colon.
func readField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(strings.TrimSpace(lines.Text()), name); ok {
			return strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(value), ":"))
		}
	}
	return "unknown"
}

// loadAverage returns the load of the last 1, 5 and 15 minutes.
func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(data))[:3], " ")
}
