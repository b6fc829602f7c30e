// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package replication copies Secrets and ConfigMaps to other namespaces. A push source says where
// its copies go; a pull target names its source, which must permit that.
//
// An event enqueues the targets that it may concern and does nothing else. Reconciling a target
// decides in package policy, which is pure, on what the cache has: hashes in place of values. Only
// if a write is due, source and target are read live, the decision is made again on them, and one
// request is sent. No value outlives that.
//
//	events.go      what enters, and whom it concerns
//	controller.go  a reconcile
//	write.go       requests, Events
//	memory.go      what a run remembers of a target
//
// What a copy is a copy of is on the copy: in its marker, or in what the original wrote. So a new
// leader finds everything that is left to do. A run remembers besides, in memory.go:
//
//	field    what it is                                  set by                cleared by
//	targets  how each target stands, and how often a     each decision, each   the decision that the
//	         drift was repaired                          write                 object is no target
//	gone     since when a source has been gone           the first look at it  its creation
//	told     the Events of the last ten minutes          each Event            age
package replication

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// Name is the name of the controller.
const Name = "replication"

// attempts limits the decisions in one reconcile. After a conflict, the next is made on another live
// read.
const attempts = 4

// originalsSelector has the label that the originals' charts and manifests set.
const originalsSelector = "app.kubernetes.io/name in (reflector,kubernetes-reflector,replicator,kubernetes-replicator)"

// writesPerSecond limits a fan-out: on an API server with two cores, other users' requests would take
// several times as long. A few targets at once do not wait.
const (
	writesPerSecond = 120
	writesAtOnce    = 20
)

// Informers are the caches that the controller reads. Secrets and ConfigMaps are stored as
// [policy.Cached], with the result of [policy.Digester.Digest]. Of Namespaces, the labels and the
// time of deletion are read; they are nil with Config.Scope.
type Informers struct {
	Objects    map[policy.Kind]cache.SharedIndexInformer
	Namespaces cache.SharedIndexInformer
}

// Controller copies objects. Build it with [New].
type Controller struct {
	cfg      Config
	rules    *policy.Rules
	digester *policy.Digester
	in       Informers
	client   kubernetes.Interface
	events   record.EventRecorder
	clock    clock.WithTicker
	metrics  *domainMetrics
	memory   *memory
	writes   *rate.Limiter
	loop     *controllers.Loop[policy.Key]
}

var _ controllers.Controller = &Controller{}

// New checks the configuration and adds indexers and handlers to the informers, so it must be called
// before they are started. The digester must be the one that the caches use.
func New(cfg Config, digester *policy.Digester, in Informers, client kubernetes.Interface, events record.EventRecorder,
	loop controllers.Options, reg metrics.KubeRegistry,
) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.NoNamespaces = len(cfg.Scope) > 0
	c := &Controller{
		cfg: cfg, digester: digester, in: in, client: client, events: events, clock: loop.Clock,
		writes: rate.NewLimiter(writesPerSecond, writesAtOnce),
	}
	c.metrics = newDomainMetrics(reg, cfg.CopiedKinds())
	c.memory = newMemory(c.metrics)
	c.rules = policy.NewRules(cfg.Options)
	for kind, informer := range in.Objects {
		if err := informer.AddIndexers(cache.Indexers{index: c.indexOf(kind)}); err != nil {
			return nil, fmt.Errorf("add index of %s: %w", ResourceOf(kind).Resource, err)
		}
	}
	var err error
	loop.Workers = cfg.Workers
	c.loop, err = controllers.NewLoop(loop, c.reconcile, c.watches()...)
	return c, err
}

// Run reconciles until ctx ends and every worker has returned.
func (c *Controller) Run(ctx context.Context) error {
	defer c.memory.clear()
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.cfg.Reflector || c.cfg.Mittwald {
		wg.Go(func() {
			controllers.WarnOfOriginals(ctx, c.client, c.cfg.Scope, originalsSelector, "emberstack/kubernetes-reflector", "mittwald/kubernetes-replicator")
		})
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop.
func (c *Controller) Status() controllers.Status { return c.loop.Status() }

func (c *Controller) reconcile(ctx context.Context, key policy.Key) (time.Duration, error) {
	now := c.clock.Now()
	p := c.rules.Decide(c, key, now)
	c.memory.note(key, &p)
	c.report(&p)
	if p.Action == policy.Nothing {
		return p.After, nil
	}
	klog.FromContext(ctx).V(4).Info("Decided by the cache", "action", p.Action, "source", p.Source.String())
	version := ""
	if source := c.Get(p.Source); source != nil {
		version = source.Version
	}
	if wait := c.memory.pace(key, p.Action, version, now); wait > 0 {
		return wait, nil
	}
	if err := c.writes.Wait(ctx); err != nil {
		return 0, err
	}
	for attempt := 1; ; attempt++ {
		after, err := c.act(ctx, key, p.Source, attempt == 1)
		if attempt == attempts || !outdated(err) {
			return after, err
		}
	}
}

// outdated reports whether the target is not what the decision was made on.
func outdated(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// act reads target and source live, decides again on them, and writes. That the target does not
// exist is at first left to the cache: a creation would be refused.
func (c *Controller) act(ctx context.Context, key, source policy.Key, first bool) (time.Duration, error) {
	l := live{c, map[policy.Key]*policy.Body{}}
	wanted := []policy.Key{source}
	if !first || c.Get(key) != nil {
		wanted = append(wanted, key)
	} else {
		l.bodies[key] = nil // also if it appears meanwhile, since nothing is known of it
	}
	for {
		if err := l.read(ctx, wanted); err != nil {
			return 0, err
		}
		p := c.rules.Decide(l, key, c.clock.Now())
		if p.Action == policy.Nothing {
			c.memory.note(key, &p)
			c.report(&p)
			return p.After, nil
		}
		if _, read := l.bodies[p.Source]; read {
			return 0, c.write(ctx, key, &p, l)
		}
		wanted = []policy.Key{p.Source}
	}
}

// live is the cache with what was read live laid over it.
type live struct {
	*Controller
	bodies map[policy.Key]*policy.Body // nil: does not exist
}

// read reads objects at once: a pull target waits for it.
func (l live) read(ctx context.Context, keys []policy.Key) error {
	bodies, errs := make([]*policy.Body, len(keys)), make([]error, len(keys))
	var wg sync.WaitGroup
	for i, key := range keys {
		wg.Go(func() {
			// The loop contains a panic in its own goroutine only.
			_, panicked := controllers.Contain(func() error { bodies[i], errs[i] = l.get(ctx, key); return nil })
			errs[i] = errors.Join(errs[i], panicked)
		})
	}
	wg.Wait()
	for i, key := range keys {
		if errs[i] != nil && !apierrors.IsNotFound(errs[i]) {
			return fmt.Errorf("get %s: %w", key, errs[i])
		}
		l.bodies[key] = bodies[i]
	}
	return nil
}

// Get implements policy.View.
func (l live) Get(key policy.Key) *policy.Object {
	b, read := l.bodies[key]
	switch {
	case !read:
		return l.Controller.Get(key)
	case b == nil:
		return nil
	}
	return l.digester.Describe(b)
}

// Sources implements policy.View.
func (l live) Sources(kind policy.Kind, name string) (list []*policy.Object) {
	list = slices.DeleteFunc(l.Controller.Sources(kind, name), func(o *policy.Object) bool {
		_, read := l.bodies[o.Key]
		return read
	})
	// The cache may not know yet that one of these pushes.
	for key, b := range l.bodies {
		if b != nil && key.Kind == kind && key.Name == name {
			list = append(list, l.Get(key))
		}
	}
	return list
}

// Get implements policy.View.
func (c *Controller) Get(key policy.Key) *policy.Object {
	obj, exists, err := c.in.Objects[key.Kind].GetIndexer().GetByKey(key.NamespacedName.String())
	if err != nil || !exists {
		return nil
	}
	return policy.Decode(key.Kind, obj.(policy.Cached), Name)
}

// Sources implements policy.View.
func (c *Controller) Sources(kind policy.Kind, name string) []*policy.Object {
	return c.indexed(kind, pushers+name)
}

// GoneSince implements policy.View.
func (c *Controller) GoneSince(key policy.Key) time.Time {
	return c.memory.goneSince(key, c.clock.Now())
}

// Namespace implements policy.View.
func (c *Controller) Namespace(name string) *policy.Namespace {
	if c.in.Namespaces == nil {
		if slices.Contains(c.cfg.Scope, name) {
			return &policy.Namespace{Name: name}
		}
		return nil
	}
	obj, exists, err := c.in.Namespaces.GetIndexer().GetByKey(name)
	if err != nil || !exists {
		return nil
	}
	return namespaceOf(obj.(metav1.Object))
}

// namespaces returns all namespaces; without their labels if these are not read.
func (c *Controller) namespaces() (list []*policy.Namespace) {
	for _, namespace := range c.cfg.Scope {
		list = append(list, c.Namespace(namespace))
	}
	if c.in.Namespaces != nil {
		for _, obj := range c.in.Namespaces.GetIndexer().List() {
			list = append(list, namespaceOf(obj.(metav1.Object)))
		}
	}
	return list
}

func namespaceOf(obj metav1.Object) *policy.Namespace {
	return &policy.Namespace{Name: obj.GetName(), Labels: obj.GetLabels(), Terminating: obj.GetDeletionTimestamp() != nil}
}
