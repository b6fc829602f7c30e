// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"
)

// mapperPatience is how long a RESTMapper believes that there is no kind that it does not know.
const mapperPatience = 10 * time.Second

// newMapper returns a mapper that asks the API server when it is first used.
func newMapper(c connection) (meta.RESTMapper, error) {
	client, err := discovery.NewDiscoveryClientForConfig(c.named("discovery"))
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(&agingDiscovery{CachedDiscoveryInterface: memory.NewMemCacheClient(client)}), nil
}

// agingDiscovery makes the mapper ask again for a kind that it does not know: its custom resource
// definition may be newer than what is cached.
type agingDiscovery struct {
	discovery.CachedDiscoveryInterface
	mu    sync.Mutex
	asked time.Time
}

// Fresh reports whether it is of no use to ask again.
func (d *agingDiscovery) Fresh() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.CachedDiscoveryInterface.Fresh() && time.Since(d.asked) < mapperPatience
}

// Invalidate makes the next use ask.
func (d *agingDiscovery) Invalidate() {
	d.mu.Lock()
	d.asked = time.Now()
	d.mu.Unlock()
	d.CachedDiscoveryInterface.Invalidate()
}
