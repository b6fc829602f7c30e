// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Cluster is the API server of another cluster, see Host.Cluster. Before you open a cluster, read "Other
// clusters" in docs/operate/security.md.
type Cluster struct {
	// ControllerCache is for informers.Follow, in all namespaces of that cluster.
	informers.ControllerCache
	// RESTConfig makes clients. Their writes pass the fence of the election and --dry-run, but not the
	// fence in our own API server, and they do not hold up the release of our Lease. RESTConfig
	// does not contain the credentials. Clients do not follow redirects.
	RESTConfig *rest.Config
	// LoopOptions is for the NewLoop of a loop that works there. Its reconciles in flight have 2 s to drain,
	// since the other API server may not answer. Whoever builds the loop runs it, such as in
	// LoopOptions.Background, and closes it.
	LoopOptions LoopOptions
	// Close ends what is followed, its metrics and the connections. A second call does nothing.
	Close func()
}
