// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ttl deletes annotated objects whose time has passed.
//
// types.go follows every type of objects that the flags and the API server permit. A handler per type
// records the objects that have an annotation, in book.go, and enqueues them; nothing is known of other
// objects. Reconciling one decides in package policy, which is pure, when it is due, and comes back
// then. What is due is read live, decided on again, and deleted with the UID and the version that were
// read.
//
//	controller.go  a reconcile
//	delete.go      requests, what becomes of their answers, Events
//	book.go        what a run remembers
//	types.go       discovery
//
// The state of a run, none of which outlives it:
//
//	field      what it is                                 set by               cleared by
//	records    the annotated objects                      the type's handler   the same, the end of the type
//	told       the warnings that its owner has had        each decision        another UID or annotation
//	failures   refusals in a row                          each refusal         a success
//	breaker    the deletions of the last minute           each deletion        time
package ttl

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// Name is the name of the controller.
const Name = "ttl"

// breakerSpread is the time over which objects come back after the breaker has closed.
const breakerSpread = 10 * time.Second

// Controller deletes objects. Build it with [New].
type Controller struct {
	cfg      Config
	rules    policy.Options
	keys     []string
	follow   Follow
	client   kubernetes.Interface
	objects  objects
	events   record.EventRecorder
	clock    clock.WithTicker
	metrics  *domainMetrics
	book     *book
	unlisted sync.Once // items of include-resources that match no type are logged
	loop     *controllers.Loop[key]

	mu      sync.Mutex
	breaker policy.Breaker
	paused  time.Time // nothing is deleted before, since the clocks are apart
}

var _ controllers.Controller = &Controller{}

// New checks the configuration. config is that of clients which write only while this replica leads.
func New(cfg Config, follow Follow, client kubernetes.Interface, config *rest.Config, events record.EventRecorder,
	loop controllers.Options, reg metrics.KubeRegistry,
) (*Controller, error) {
	objects, err := newAPI(config)
	if err != nil {
		return nil, err
	}
	return build(cfg, follow, client, objects, events, loop, reg)
}

func build(cfg Config, follow Follow, client kubernetes.Interface, objects objects, events record.EventRecorder,
	loop controllers.Options, reg metrics.KubeRegistry,
) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Controller{
		cfg: cfg, rules: cfg.rules(), follow: follow, client: client, objects: objects, events: events, clock: loop.Clock,
		book:    newBook(),
		breaker: policy.Breaker{Limit: cfg.MaxDeletionsPerMinute, Cooldown: cfg.BreakerCooldown},
	}
	c.keys = policy.Keys(c.rules.Families)
	c.metrics = newDomainMetrics(reg, c)
	var err error
	loop.Workers, loop.Beside = cfg.Workers, c.followTypes
	c.loop, err = controllers.NewLoop(loop, c.reconcile)
	return c, err
}

// Run reconciles until ctx ends and every worker and every watch has ended.
func (c *Controller) Run(ctx context.Context) error {
	defer c.book.clear()
	var wg sync.WaitGroup
	defer wg.Wait()
	if len(c.cfg.Compat) > 0 {
		wg.Go(func() { c.warnOfOriginals(ctx) })
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop, and of each type.
func (c *Controller) Status() controllers.Status {
	s := c.loop.Status()
	s.Details = c.book.status(c.clock.Now())
	return s
}

func (c *Controller) reconcile(ctx context.Context, k key) (time.Duration, error) {
	r := c.book.get(k)
	if r == nil {
		return 0, nil
	}
	now := c.clock.Now()
	d := c.rules.Decide(r.describe(), now)
	c.book.decided(r, &d)
	c.warn(r, &d)
	if !d.Due(now) {
		return c.wait(&d, now), nil
	}
	if open := c.breakerOpen(now); open > 0 {
		return open + spread(), nil
	}
	klog.FromContext(ctx).V(4).Info("Due", "annotation", d.Key, "deadline", d.Deadline)
	return c.expire(ctx, r)
}

// wait returns when to look at an object again; 0 is never.
func (c *Controller) wait(d *policy.Decision, now time.Time) time.Duration {
	if d.Deadline.IsZero() {
		return 0
	}
	return min(d.Deadline.Sub(now), c.cfg.RecheckInterval)
}

func (c *Controller) breakerOpen(now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.breaker.Open(now)
}

func spread() time.Duration { return rand.N(breakerSpread) }
