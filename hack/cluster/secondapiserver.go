// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"io"
	"path/filepath"

	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// With two API servers, each has an address of its own in TEST-NET-1, since EndpointSlices take no
// loopback addresses. Both listen on the same port, since all API servers of a cluster share one
// EndpointSlice, default/kubernetes. Package netns gives a process such addresses.
const (
	firstAddress  = "192.0.2.1"
	secondAddress = "192.0.2.2"

	// etcdHoldSocket is where the second API server connects to.
	etcdHoldSocket = "localhost:3"
)

// secondAPIServer is a second kube-apiserver on the same etcd. It has the flags, certificates and keys of the
// first, and a host name of its own: an API server derives the name of its identity Lease from that.
type secondAPIServer struct {
	process  *sandbox.Process
	etcd     io.Closer // passes on its requests
	auditLog string
}

func (c *Cluster) startSecondAPIServer(ctx context.Context) (err error) {
	s := &secondAPIServer{auditLog: filepath.Join(c.box.Dir, "audit-2.log")}
	s.etcd, err = c.opts.SecondAPIServer(filepath.Join(c.box.Dir, etcdHoldSocket), filepath.Join(c.box.Dir, etcdName))
	if err != nil {
		return err
	}
	c.second = s
	err = withHostname("second-api-server", func() (err error) {
		s.process, err = c.box.Start(sandbox.Command{
			Name: "kube-apiserver-2",
			Path: c.Binary("kube-apiserver"),
			Args: c.apiServerArgs(secondAddress, "unix://"+etcdHoldSocket, s.auditLog),
			Env:  CleanEnv(),
		})
		return err
	})
	if err != nil {
		return err
	}
	return waitUntilReady(ctx, s.process, c.SecondConfig())
}

// SecondConfig is AdminConfig for the second API server.
func (c *Cluster) SecondConfig() *rest.Config {
	config := c.AdminConfig()
	config.Host = c.serverURL(secondAddress)
	return config
}
