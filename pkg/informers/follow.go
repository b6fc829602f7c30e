// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/klog/v2"
)

// Following is the informer of a resource that a controller has asked for at run time, see [Follow].
type Following[T any] struct {
	*Informer[T]
	cluster *ClusterCache
}

// Follow returns the informer of a resource that the entry does not declare in Needs, with the type of its
// objects as with [For]. The resource is watched until Stop or until Run of the controller returns; what
// Entry.New follows is watched until Stop, from the time when the declared informers start. Two controllers
// that follow the same resource have a watch each. Failures fail the controller's health check only if
// Entry.New follows the resource, in the process's own cluster; Status reports them in any case. They are
// retried at least once a minute, if a list slot is free: two resources that a controller follows in a
// cluster are listed at once.
func Follow[T any](host HasCache, need Need) (*Following[T], error) {
	c := host.cache()
	need.controller = c.controller
	i, err := c.follow(need, reflect.TypeFor[T]())
	if err != nil {
		return nil, err
	}
	return &Following[T]{&Informer[T]{i, &i.plan.needs[0]}, c.cluster}, nil
}

func (c Cache) follow(need Need, t reflect.Type) (*informer, error) {
	cluster := c.cluster
	plans, err := newPlans([]Need{need}, cluster.clients.scheme, cluster.cfg.Namespaces)
	if err != nil {
		return nil, err
	}
	logger := klog.LoggerWithValues(klog.Background(), "controller", need.controller)
	if cluster.cfg.Cluster != "" {
		logger = klog.LoggerWithValues(logger, "cluster", cluster.cfg.Cluster)
	}
	i, err := cluster.buildInformer(plans[0], logger)
	if err == nil {
		err = need.checkType(need.Resource, t, cluster.clients.scheme)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", need.controller, err)
	}
	plans[0].expect(t)
	cluster.mu.Lock()
	defer cluster.mu.Unlock()
	if cluster.stopped {
		return nil, errors.New("the informers have been shut down")
	}
	if cluster.listSlots[c.controller] == nil {
		cluster.listSlots[c.controller] = make(chan struct{}, 2)
	}
	for _, feed := range i.feeds {
		feed.listSlots = cluster.listSlots[c.controller]
	}
	i.duringRun = !cluster.started.IsZero()
	cluster.followed = append(cluster.followed, i)
	if i.duringRun || cluster.cfg.Cluster != "" { // otherwise Start starts it; other clusters have no Start
		cluster.start(context.Background(), i)
	}
	return i, nil
}

// EndRun stops what the controller has followed since Start, since its Run has returned.
func (c *ClusterCache) EndRun(controller string) {
	for _, i := range c.followedInformers() {
		if i.duringRun && i.plan.need(controller) != nil {
			c.unfollow(i)
		}
	}
}

// unfollow ends the watch of a followed resource.
func (c *ClusterCache) unfollow(i *informer) {
	c.caches.mu.Lock()
	defer c.caches.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	i.stop()
	if slices.Contains(c.followed, i) {
		c.caches.keepCounts(c.cfg.Cluster, i)
	}
	c.followed = slices.DeleteFunc(c.followed, func(other *informer) bool { return other == i })
}

// Stop ends the watch of the resource. Handlers may call Stop, so it does not wait for them: a handler may be
// called once more while Stop returns. The cached objects stay readable.
func (f *Following[T]) Stop() { f.cluster.unfollow(f.informer) }

// Status returns what is known of the resource and of the requests for it. With --namespaces, Status
// returns the status of the first namespace that has a problem, otherwise of the first namespace.
func (f *Following[T]) Status() ResourceStatus {
	all := f.status()
	index := max(0, slices.IndexFunc(all, func(s ResourceStatus) bool { return s.Problem != "" }))
	return all[index]
}
