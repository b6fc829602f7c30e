// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
)

// Caches are the caches of a process: the cache of its own cluster, and one for each other open cluster.
// Their metrics have one collector, since component-base keeps every collector that was ever registered.
type Caches struct {
	metrics.BaseStableCollector
	metrics []resourceMetric

	mu    sync.Mutex
	all   []*ClusterCache
	ended map[seriesLabels]ResourceStatus // what informers have counted that have ended in the clusters of all
}

// NewCaches returns Caches without a cluster, and registers their metrics.
func NewCaches(reg metrics.KubeRegistry) (*Caches, error) {
	c := &Caches{metrics: resourceMetrics(), ended: map[seriesLabels]ResourceStatus{}}
	if err := reg.CustomRegister(c); err != nil {
		return nil, fmt.Errorf("register informer metrics: %w", err)
	}
	return c, nil
}

func (c *Caches) remove(cluster *ClusterCache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = slices.DeleteFunc(c.all, func(other *ClusterCache) bool { return other == cluster })
	maps.DeleteFunc(c.ended, func(labels seriesLabels, _ ResourceStatus) bool {
		return !slices.ContainsFunc(c.all, func(open *ClusterCache) bool { return open.cfg.Cluster == labels[0] })
	})
}

func (c *Caches) clusters() []*ClusterCache {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.all)
}

// CacheConfig says what a ClusterCache is of.
type CacheConfig struct {
	// Cluster is the label cluster of the metrics: empty for the cluster that the process runs in.
	Cluster string
	// Namespaces are the only namespaces that are read; empty means all.
	Namespaces []string
	// Scheme has the types that are read as Go types. Others are read as unstructured objects.
	Scheme *runtime.Scheme

	needs []Need
}

// Declare adds the needs of the named controller. The name is that of its digests too.
func (c *CacheConfig) Declare(controller string, needs ...Need) {
	for _, n := range needs {
		n.controller = controller
		c.needs = append(c.needs, n)
	}
}

// Check returns the error with which [Caches.AddCluster] refuses the needs, or nil.
func (c *CacheConfig) Check() error {
	_, err := newPlans(c.needs, c.Scheme, c.Namespaces)
	return err
}

// ClusterCache has the informers of the process for one cluster.
type ClusterCache struct {
	cfg       CacheConfig
	clients   readers
	sourceFor func(p *plan, namespace string) (source, error)
	informers []*informer // of the declared needs
	caches    *Caches
	// countPanic is called for each panic in a function of the controller.
	countPanic func(controller string)

	mu       sync.Mutex
	started  time.Time // when Start was called; zero before
	stopped  bool
	followed []*informer
	// listSlots has the slots of each controller: lists of what it follows hold one each while they are read.
	listSlots map[string]chan struct{}
	wg        sync.WaitGroup
	ended     sync.Once // whether Shutdown has waited
}

// AddCluster builds the informers for the declared needs, and starts none. They read through one HTTP client,
// in connection's content type, or protobuf if it names none. countPanic is called for each panic in a
// function of the named controller. AddCluster returns an error if connection is invalid or the needs cannot
// be met.
func (c *Caches) AddCluster(
	cfg CacheConfig, connection *rest.Config, countPanic func(controller string),
) (*ClusterCache, error) {
	clients, err := newReaders(connection, cfg.Scheme)
	if err != nil {
		return nil, err
	}
	cluster := &ClusterCache{cfg: cfg, clients: clients, sourceFor: clients.sourceFor, countPanic: countPanic, caches: c,
		listSlots: map[string]chan struct{}{}}
	plans, err := newPlans(cfg.needs, cfg.Scheme, cfg.Namespaces)
	if err != nil {
		return nil, err
	}
	for _, p := range plans {
		i, err := cluster.buildInformer(p, klog.Background())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(p.controllers(), ", "), err)
		}
		cluster.informers = append(cluster.informers, i)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, cluster)
	return cluster, nil
}

// buildInformer returns an informer with a feed for each namespace that is read.
func (c *ClusterCache) buildInformer(p *plan, logger klog.Logger) (*informer, error) {
	i := newInformer(p, logger, c.countPanic)
	namespaces := c.cfg.Namespaces
	if p.namespace != "" || p.clusterScoped || len(namespaces) == 0 {
		namespaces = []string{p.namespace}
	}
	for _, namespace := range namespaces {
		src, err := c.sourceFor(p, namespace)
		if err != nil {
			return nil, err
		}
		name := i.name
		if namespace != "" {
			name += " in " + namespace
		}
		state := newState(name, logger)
		state.recorded = ResourceStatus{
			Cluster: c.cfg.Cluster, Namespace: namespace,
			Group: p.resource.Group, Version: p.resource.Version, Resource: p.resource.Resource,
			LabelSelector: p.labelSelector, FieldSelector: p.fieldSelector,
			For: p.controllers(), Form: p.form(), Content: p.content(),
		}
		f := &feed{
			informer: i, namespace: namespace, source: src, state: state,
			discover: func(ctx context.Context) error {
				_, err := c.clients.discovery.Version(ctx, p.resource.GroupResource())
				return err
			},
		}
		i.feeds = append(i.feeds, f)
	}
	return i, nil
}

// start starts the feeds of an informer until ctx ends. The caller holds mu.
func (c *ClusterCache) start(ctx context.Context, i *informer) {
	ctx, i.cancel = context.WithCancel(ctx)
	for _, feed := range i.feeds {
		c.wg.Go(func() { pprof.Do(ctx, pprof.Labels("informer", feed.state.name), feed.run) })
	}
	c.wg.Go(func() { i.detector.Run(ctx.Done()) })
}

// stop ends the feeds, if they run, and the calls of listeners.
func (i *informer) stop() {
	i.stopped.Store(true)
	if i.cancel != nil {
		i.cancel()
	}
}

// informerFor returns the informer that serves the controller's need of a resource, and the need, or nil. It
// does not compare versions; [For] does.
func (c *ClusterCache) informerFor(controller string, resource schema.GroupResource) (*informer, *Need) {
	for _, i := range c.informers {
		if need := i.plan.need(controller); need != nil && need.Resource.GroupResource() == resource {
			return i, need
		}
	}
	return nil, nil
}

// Declared returns the informers of what the controller declares in Needs.
func (c *ClusterCache) Declared(controller string) (all []*Informer[*Object]) {
	for _, i := range c.informers {
		if need := i.plan.need(controller); need != nil {
			all = append(all, &Informer[*Object]{i, need})
		}
	}
	return all
}

// Start starts all informers and returns at once. They run until Shutdown, or until ctx ends. A
// second call does nothing, nor does one after Shutdown.
func (c *ClusterCache) Start(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.started.IsZero() || c.stopped {
		return
	}
	c.started = time.Now()
	for _, i := range slices.Concat(c.informers, c.followed) {
		c.start(ctx, i)
	}
	klog.FromContext(ctx).Info("Informers started", "informers", len(c.informers))
}

// allInformers returns the informers of declared and of followed resources.
func (c *ClusterCache) allInformers() []*informer {
	return slices.Concat(c.informers, c.followedInformers())
}

// required returns the informers without those that were followed while Run of their controller ran.
func (c *ClusterCache) required() []*informer {
	return slices.DeleteFunc(c.allInformers(), func(i *informer) bool { return i.duringRun })
}

func (c *ClusterCache) followedInformers() []*informer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.followed)
}

// shutdownTimeout is how long Shutdown waits for a Digest, a Filter or an index function that does not
// return.
const shutdownTimeout = 5 * time.Second

// Stop stops the informers and removes their metrics, and waits for nothing. The caches stay readable. Stop
// may be called without Start. A second call does nothing.
func (c *ClusterCache) Stop() {
	c.mu.Lock()
	again := c.stopped
	c.stopped = true
	c.mu.Unlock()
	if again {
		return
	}
	for _, i := range c.followedInformers() { // their controllers have not called Stop
		c.unfollow(i)
	}
	for _, i := range c.informers {
		i.stop()
	}
	c.caches.remove(c)
}

// Shutdown calls Stop, and returns when the informers begin no more requests, or after shutdownTimeout. A
// call of a controller's function that has begun may go on: one that hangs must not keep the process from
// ending.
func (c *ClusterCache) Shutdown() {
	c.Stop()
	c.ended.Do(func() {
		ended := make(chan struct{})
		go func() { c.wg.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(shutdownTimeout):
			klog.Background().Error(nil, "Informers did not stop: "+
				"a function of a controller hangs, or client-go waits as the API server asked", "after", shutdownTimeout)
		}
	})
}

// Problem returns what keeps the cache of a controller from being complete and current: an informer that has
// not synced, a verb that RBAC does not allow, requests that have failed for more than a minute, a function
// of the controller that panics or hangs. For a resource that is followed while Run runs, no request is a
// problem: it may be that no user wants the resource. Problem returns nil if there is no problem. Before
// Start, as on a cold standby, no request is a problem.
func (c *ClusterCache) Problem(controller string) error {
	started := !c.startedAt().IsZero()
	var errs []error
	for _, i := range c.allInformers() {
		if i.plan.need(controller) == nil {
			continue
		}
		if started && !i.duringRun {
			errs = append(errs, i.problem())
		}
		errs = append(errs, i.bad.problem(controller))
	}
	return errors.Join(errs...)
}

// maxFirstList is how long a first list may take before CheckSync passes without it.
const maxFirstList = 5 * time.Minute

// CheckSync is the health check informers-sync. It fails until every informer has synced once. It does not
// wait for informers whose list the server refuses, nor, if others have synced, for informers that have
// failed for a minute, as with a broken conversion webhook, or whose list has taken maxFirstList: a new
// version must be able to roll out although one controller has such a trouble. Problem reports these
// informers.
func (c *ClusterCache) CheckSync(*http.Request) error {
	startedAt := c.startedAt()
	if startedAt.IsZero() {
		return errors.New("informers are not started")
	}
	var errs []error
	required := c.required()
	waiting := slices.DeleteFunc(slices.Clone(required), (*informer).hasSynced)
	anySynced := len(waiting) < len(required)
	hangs := time.Since(startedAt) >= maxFirstList
	for _, i := range waiting {
		for _, feed := range i.feeds {
			if first := feed.state.firstList(); first == pending && !hangs || feed.missing() && !anySynced {
				errs = append(errs, feed.state.problem())
			}
		}
	}
	return errors.Join(errs...)
}

// startedAt returns when Start was called; zero before.
func (c *ClusterCache) startedAt() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.started
}

// problem returns what is wrong with the requests of an informer.
func (i *informer) problem() error {
	var errs []error
	for _, f := range i.feeds {
		errs = append(errs, f.state.problem())
	}
	return errors.Join(errs...)
}
