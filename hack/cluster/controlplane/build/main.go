// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command build builds the control plane if it is missing, and prints its folder.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	dir, err := controlplane.Ensure(ctx, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
	fmt.Println(dir)
}
