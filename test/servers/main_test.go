// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package servers injects faults into managers on a control plane with two API servers, of which the
// leader's lags behind, and checks by the audit logs of both that no former leader wrote after its
// successor.
//
// The second API server reaches etcd through a proxy, see test/internal/holdproxy. While the
// connections of Namespaces and Leases stand still, this API server does not see who is named as
// the leader and does not answer requests for a Lease, but stores everything else: which is what
// happens when watch caches lag. The managers reach the API servers through proxies of their own.
// What a manager asks an API server by its address in the EndpointSlice default/kubernetes does not
// go through these proxies.
package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/holdproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/netns"
)

// All tests of the package share them.
var (
	shared    *fleet.Fleet
	etcdProxy *holdproxy.Proxy // between the second API server and etcd
)

func startEtcdProxy(socket, target string) (_ io.Closer, err error) {
	etcdProxy, err = holdproxy.Start(socket, target)
	return etcdProxy, err
}

func TestMain(m *testing.M) {
	code, err := netns.Run(buildPrograms, func() int {
		return fleet.Main(m, &shared, fleet.Options{
			Cluster: cluster.Options{WithoutControllerManager: true, SecondAPIServer: startEtcdProxy}})
	})
	if errors.Is(err, netns.ErrForbidden) {
		fmt.Println("SKIP: all tests of two API servers:", err)
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		code = 1
	}
	os.Exit(code)
}

// buildPrograms builds what the tests run, since a build may have to download modules.
func buildPrograms() error {
	if !fleet.Wanted() {
		return nil
	}
	ctx := context.Background()
	_, err := cluster.BuildProgram(ctx, "cmd/manager", fleet.Race())
	if err == nil {
		_, err = controlplane.Ensure(ctx, io.Discard)
	}
	return err
}
