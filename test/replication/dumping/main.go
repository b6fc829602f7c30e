// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dumping is the manager. At SIGUSR1 it writes the live part of its heap to the file that the
// environment variable HEAP_DUMP names.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for range signals {
			if err := dump(os.Getenv("HEAP_DUMP")); err != nil {
				fmt.Fprintln(os.Stderr, "dump:", err)
			}
		}
	}()
	os.Exit(cli.Run(app.NewCommand(app.With(builtin.Entries()...))))
}

func dump(path string) error {
	file, err := os.Create(path + ".part")
	if err != nil {
		return err
	}
	for range 3 { // pools survive one collection
		runtime.GC()
	}
	debug.WriteHeapDump(file.Fd())
	if err := file.Close(); err != nil {
		return err
	}
	return os.Rename(path+".part", path)
}
