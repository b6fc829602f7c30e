// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// Tests of the whole controller, which are in package federation_test, use what follows.
const (
	KubeFedLock  = kubeFedLock
	MetricPrefix = metricPrefix
)

var (
	KubeFedClusters           = kubeFedClusters
	KubeFedConfigs            = kubeFedConfigs
	FederatedTypeConfigs      = federatedTypeConfigs
	CustomResourceDefinitions = customResourceDefinitions
	PropagatedVersions        = propagatedVersions
	ServiceDNSRecords         = serviceDNSRecords
)

// Ready reports whether a cluster is ready, and since when.
func Ready(c controllers.Controller, name string) (bool, time.Time) {
	state := c.(*controller).clusters.state(name)
	return state.health.Ready(), state.readySince
}

// Running returns the types that run.
func Running(c controllers.Controller) []policy.TypeConfig {
	return c.(*controller).types.runningTypes()
}

// EndLoop ends what a cluster's loop follows, as its early end does. The returned function is its next start.
func EndLoop(c controllers.Controller, name string) (restart func(context.Context)) {
	r := c.(*controller).readyCluster(name)
	ended, end := context.WithCancel(context.Background())
	end()
	_ = r.runBackground(ended)
	return func(ctx context.Context) { go func() { _ = r.runBackground(ctx) }() }
}

// SetLookup has host names resolved in the network of a test.
func SetLookup(t *testing.T, lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)) {
	t.Helper()
	before := lookupNetIP
	lookupNetIP = lookup
	t.Cleanup(func() { lookupNetIP = before })
}
