// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command image builds the manager's image from Containerfile and the binaries bin/OS/ARCH/manager,
// for several platforms under one name, with podman, buildah or docker, whichever is installed.
// `make image` runs it.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b := build{Out: os.Stdout}
	var with string
	flag.StringVar(&with, "tool", "", "podman, buildah or docker; the first that works if empty")
	flag.StringVar(&b.Name, "image", "quartermaster", "name of the image, without a tag")
	flag.StringVar(&b.Version, "version", "", "tag of the image, besides latest")
	flag.StringVar(&b.Revision, "revision", "", "commit that the image is built from")
	flag.Int64Var(&b.Epoch, "epoch", 0, "time of that commit in seconds since 1970: everything in the image has this time")
	flag.StringVar(&b.Dir, "context", ".", "folder with Containerfile and bin/")
	flag.Parse()
	b.Platforms = flag.Args()
	if err := run(ctx, with, b); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, with string, b build) error {
	if b.Version == "" || len(b.Platforms) == 0 {
		return fmt.Errorf("usage: image --version=TAG OS/ARCH [OS/ARCH]")
	}
	tool, err := pick(ctx, with)
	if err != nil {
		return err
	}
	digests, err := b.with(ctx, tool)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.Out, "Built %s with %s, also as %s:latest\n", b.tagged(), tool, b.Name)
	for i, digest := range digests {
		fmt.Fprintf(b.Out, "  %-12s %s\n", b.Platforms[i], digest)
	}
	return nil
}

// tools build images. Those that need neither a daemon nor root come first.
var tools = []string{"podman", "buildah", "docker"}

// pick returns the given tool, or the first one that works.
func pick(ctx context.Context, wanted string) (string, error) {
	if wanted != "" && !slices.Contains(tools, wanted) {
		return "", fmt.Errorf("TOOL=%s: must be one of %s", wanted, strings.Join(tools, ", "))
	}
	var problems []string
	for _, tool := range tools {
		if wanted != "" && tool != wanted {
			continue
		}
		// docker's client does not work without its daemon, which this command asks.
		if _, err := command(ctx, tool, "version"); err != nil {
			problems = append(problems, err.Error())
			continue
		}
		return tool, nil
	}
	return "", fmt.Errorf("no tool to build an image with:\n  %s\ninstall podman, buildah or docker", strings.Join(problems, "\n  "))
}

// command runs a program and returns its stdout. The error contains its stderr.
func command(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(problems.String()))
	}
	return string(out), nil
}
