// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// ClusterCache has the informers of the process for one cluster.
type ClusterCache struct {
	cfg       Config
	clock     clock.WithTickerAndDelayedExecution
	clients   Clients
	sourceFor func(p *plan, namespace string) (source, error)
	panicked  func(controller string)
	informers []*informer // of the declared needs
	caches    *Caches

	mu       sync.Mutex
	run      context.Context    // nil until started
	stop     context.CancelFunc // ends run
	stopped  bool
	followed []*informer
	wg       sync.WaitGroup
}

// New builds the informers for needs, and starts none. panicked is called for each panic in a function
// of the named controller. New returns an error if the needs cannot be met.
func (c *Caches) New(cfg Config, clients Clients, needs []Need, clk clock.WithTickerAndDelayedExecution,
	panicked func(controller string)) (*ClusterCache, error) {
	f := &ClusterCache{cfg: cfg, clock: clk, clients: clients, sourceFor: clients.sourceFor, panicked: panicked, caches: c}
	plans, err := newPlans(needs, clients.scheme, cfg.Namespaces)
	if err != nil {
		return nil, err
	}
	for _, p := range plans {
		i, err := f.newInformer(p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(p.controllers(), ", "), err)
		}
		f.informers = append(f.informers, i)
	}
	c.add(f)
	return f, nil
}

// newInformer returns an informer with a feed for each namespace that is read.
func (f *ClusterCache) newInformer(p *plan) (*informer, error) {
	i := newInformer(p, f.panicked)
	namespaces := f.cfg.Namespaces
	if p.namespace != "" || len(namespaces) == 0 {
		namespaces = []string{p.namespace}
	}
	for _, namespace := range namespaces {
		src, err := f.sourceFor(p, namespace)
		if err != nil {
			return nil, err
		}
		name := i.name
		if namespace != "" {
			name += " in " + namespace
		}
		state := newState(name, f.clock)
		state.now = ResourceStatus{
			Cluster: f.cfg.Cluster, Group: p.resource.Group, Version: p.resource.Version, Resource: p.resource.Resource, Namespace: namespace,
			For: p.controllers(), Form: p.form(), Content: p.content(), LabelSelector: p.labelSelector, FieldSelector: p.fieldSelector,
		}
		i.feeds = append(i.feeds, &feed{
			informer: i, namespace: namespace, source: src, state: state, clock: f.clock,
			resync: wait.Jitter(f.cfg.MinResyncPeriod, 1), // so that they do not resync all at once
			exists: func(ctx context.Context) error {
				_, err := f.clients.find(ctx, p.resource.GroupResource())
				return err
			},
		})
	}
	return i, nil
}

// start starts the feeds of an informer until ctx ends.
func (f *ClusterCache) start(ctx context.Context, i *informer) {
	for _, feed := range i.feeds {
		f.wg.Go(func() { pprof.Do(ctx, pprof.Labels("informer", feed.state.name), feed.run) })
	}
	f.wg.Go(func() { i.detector.Run(ctx.Done()) })
}

// informerFor returns the informer that serves the controller's need of a resource, or nil. The
// version does not matter.
func (f *ClusterCache) informerFor(controller string, resource schema.GroupResource) *informer {
	for _, i := range f.informers {
		if i.plan.resource.GroupResource() == resource && i.plan.need(controller) != nil {
			return i
		}
	}
	return nil
}

// Start starts all informers and returns at once. They run until Shutdown, or until ctx ends, and
// log to ctx's logger. A second call does nothing, nor does one after Shutdown.
func (f *ClusterCache) Start(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.run != nil || f.stopped {
		return
	}
	f.run, f.stop = context.WithCancel(ctx)
	for _, i := range f.informers {
		f.start(f.run, i)
	}
	f.wg.Go(func() {
		for _, i := range f.informers {
			select {
			case <-i.synced:
			case <-f.run.Done():
				return
			}
		}
		debug.FreeOSMemory() // what it took to fill the caches is garbage now
	})
	klog.FromContext(ctx).Info("Informers started", "informers", len(f.informers))
}

// all returns the informers, with those of followed resources.
func (f *ClusterCache) all() []*informer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Concat(f.informers, f.followed)
}

// Shutdown stops the informers, removes their metrics and returns when they make no more requests. A
// call of a controller's handler that has begun may go on: one that hangs must not keep the process from
// ending. The caches stay readable. Shutdown may be called without Start.
func (f *ClusterCache) Shutdown() {
	f.mu.Lock()
	if f.stop != nil {
		f.stop()
	}
	f.stopped = true
	followed := slices.Clone(f.followed)
	f.mu.Unlock()
	for _, i := range followed { // whoever asked for them has not given them back
		f.unfollow(i)
	}
	for _, i := range f.informers {
		i.stopped.Store(true)
	}
	f.wg.Wait()
	f.caches.remove(f)
}

// Problem returns what keeps the cache of a controller from being complete and current: an informer
// that has not synced, a verb that RBAC does not allow, requests that have failed for more than a
// minute, an object that does not fit its Go type, a function of the controller that panics. It
// returns nil if nothing does, and before Start, as on a cold standby.
func (f *ClusterCache) Problem(controller string) error {
	if !f.started() {
		return nil
	}
	var errs []error
	for _, i := range f.informers {
		if i.plan.need(controller) != nil {
			errs = append(errs, i.problem(), i.panics.problem(controller))
		}
	}
	return errors.Join(errs...)
}

// CheckSync is the health check informers-sync. It fails until every informer has synced once,
// except those whose list the server refuses, and those that have failed for a minute while others
// have synced, as with a broken conversion webhook. Waiting does not help these, and a new version
// must be able to roll out although one controller has such a trouble. Problem reports them.
func (f *ClusterCache) CheckSync(*http.Request) error {
	if !f.started() {
		return errNotStarted
	}
	var errs []error
	answers := slices.ContainsFunc(f.informers, (*informer).hasSynced)
	for _, i := range f.informers {
		for _, feed := range i.feeds {
			done, refused := feed.state.filled()
			if !done && !refused && (!answers || !feed.state.failsLong()) {
				errs = append(errs, feed.state.problem())
			}
		}
	}
	return errors.Join(errs...)
}

var errNotStarted = errors.New("informers are not started")

func (f *ClusterCache) started() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.run != nil
}

// problem returns what is wrong with the requests of an informer.
func (i *informer) problem() error {
	var errs []error
	for _, f := range i.feeds {
		errs = append(errs, f.state.problem())
	}
	return errors.Join(errs...)
}
