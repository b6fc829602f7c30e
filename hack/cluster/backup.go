// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"os"
	"path/filepath"
)

// Backup copies the store to a folder of the cluster's directory, which must not exist. No API server answers
// meanwhile.
func (c *Cluster) Backup(ctx context.Context, name string) error {
	return c.whileStopped(ctx, func(store string) error { return copyStore(filepath.Join(c.box.Dir, name), store) })
}

// Restore puts the store back to what Backup has copied, with the resourceVersions of then.
func (c *Cluster) Restore(ctx context.Context, name string) error {
	return c.whileStopped(ctx, func(store string) error {
		return errors.Join(os.RemoveAll(store), copyStore(store, filepath.Join(c.box.Dir, name)))
	})
}

// whileStopped calls a function with the folder of the store while kube-apiserver and etcd are stopped.
func (c *Cluster) whileStopped(ctx context.Context, do func(store string) error) error {
	if err := errors.Join(c.StopAPIServer(ctx), c.etcd.Stop(ctx, apiServerGrace)); err != nil {
		return err
	}
	if err := errors.Join(do(filepath.Join(c.box.Dir, "etcd")), c.startEtcd()); err != nil {
		return err
	}
	return c.StartAPIServer(ctx)
}

// copyStore copies a folder, and keeps its files to this user: etcd demands that.
func copyStore(target, source string) error {
	if err := os.CopyFS(target, os.DirFS(source)); err != nil {
		return err
	}
	return os.Chmod(target, 0o700)
}
