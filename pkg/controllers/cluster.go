// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Cluster is the API server of another cluster, see Host.Cluster. What docs/operate/security.md says of
// clusters is for whoever opens one.
type Cluster struct {
	// RESTConfig makes clients. Their writes pass the fence of the election and --dry-run, but not the
	// fence in our own API server, and they do not hold up the release of our Lease. RESTConfig
	// does not contain the credentials. Clients do not follow redirects.
	RESTConfig *rest.Config
	// Follow is Host.Follow in that cluster, for all its namespaces.
	Follow func(context.Context, informers.Need, chan struct{}, cache.ResourceEventHandler) (*informers.Following, error)
	// LoopOptions is for the NewLoop of a loop that works there. Its reconciles in flight have 2 s to drain,
	// since the other API server may not answer. Whoever builds the loop runs it, such as in Options.Beside, and
	// closes it.
	LoopOptions Options
	// Close ends what Follow follows, its metrics and the connections. It is to be called once, and not by a
	// handler that Follow calls.
	Close func()
}
