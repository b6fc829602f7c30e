// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command build builds the control plane and what simulated nodes need if they are missing, and
// prints the folder of the control plane.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	dir, err := controlplane.Ensure(ctx, os.Stderr)
	if err == nil {
		_, _, err = cluster.BuildNodes(ctx, os.Stderr)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
	fmt.Println(dir)
}
