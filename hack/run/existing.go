// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// runExisting runs one manager on the cluster of a kubeconfig, as its user. It applies nothing
// there.
func runExisting(ctx context.Context, opts options, dir string, lock *os.File) (err error) {
	path, err := filepath.Abs(opts.kubeconfig)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	fmt.Println("Building the manager")
	binary, err := cluster.BuildManager(ctx, false)
	if err != nil {
		return err
	}
	box, err := sandbox.New(ctx, dir, lock)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, box.Close())
		if err == nil {
			fmt.Println("Stopped.")
		}
	}()
	f := &fleet{dir: dir, out: os.Stdout}
	if f.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	const name = "quartermaster"
	defer f.stop()
	m, err := cluster.StartManagerIn(box, name, path, cluster.ManagerOptions{Binary: binary, Args: append([]string{"--v=2"}, opts.args...)})
	if err != nil {
		return err
	}
	f.add(ctx, name, m)
	printExisting(f.out, config.Host, path, dir, m)
	return f.follow(ctx, "")
}
