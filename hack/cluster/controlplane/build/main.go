// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command build builds the control plane if it is missing, and prints its folder. With -nodes it also
// builds what simulated nodes need.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

func main() {
	nodes := flag.Bool("nodes", false, "build what simulated nodes need, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	dir, err := controlplane.Ensure(ctx, os.Stderr)
	if err == nil && *nodes {
		_, _, err = cluster.BuildNodes(ctx, os.Stderr)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
	fmt.Println(dir)
}
