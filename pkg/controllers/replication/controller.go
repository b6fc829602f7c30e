// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

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
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/originals"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/retrystale"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the name of the controller.
const Name = "replication"

// originalsSelector has the label that the originals' charts and manifests set.
const originalsSelector = "app.kubernetes.io/name in (reflector,kubernetes-reflector,replicator,kubernetes-replicator)"

// writesPerSecond limits a fan-out: on an API server with two cores, other users' requests would take several
// times as long. The first writesAtOnce writes do not wait.
const (
	writesPerSecond = 120
	writesAtOnce    = 20
)

// informerSet is the caches that the controller reads. Secrets and ConfigMaps are stored as [policy.Cached],
// with the result of [policy.Digester.Digest]. Namespaces is nil with Config.Scope; otherwise the controller
// reads only their labels and times of creation and deletion.
type informerSet struct {
	Objects    map[policy.Kind]*informers.Informer[policy.Cached]
	Namespaces *informers.Informer[metav1.Object]
}

// controller copies objects.
type controller struct {
	cfg          Config
	evaluator    *policy.Evaluator
	digester     *policy.Digester
	informers    informerSet
	client       kubernetes.Interface
	events       record.EventRecorder
	metrics      *controllerMetrics
	memory       *memory
	writeLimiter *rate.Limiter
	loop         *controllers.Loop[task]
}

var _ controllers.Controller = &controller{}

// newController adds indexes and handlers to the informers, so it must be called before they are started. The
// configuration must have passed Validate. The caches must use the same digester.
func newController(cfg Config, digester *policy.Digester, set informerSet, client kubernetes.Interface, events record.EventRecorder,
	loop controllers.LoopOptions, reg controllers.MetricsRegistry,
) (*controller, error) {
	cfg.NoNamespaces, cfg.Options.MaxSpread = len(cfg.Scope) > 0, cfg.MaxSpread.Value()
	c := &controller{
		cfg: cfg, digester: digester, informers: set, client: client, events: events,
		writeLimiter: rate.NewLimiter(writesPerSecond, writesAtOnce),
	}
	c.metrics = newControllerMetrics(reg, cfg.CopiedKinds())
	c.memory = newMemory(c.metrics)
	c.evaluator = policy.NewEvaluator(cfg.Options)
	for kind, informer := range set.Objects {
		informer.AddIndex(participantsIndex, c.indexFunc(kind))
	}
	var err error
	c.loop, err = controllers.NewLoop(loop, c.reconcile, c.watches()...)
	return c, err
}

// Run reconciles until ctx ends and every worker has returned.
func (c *controller) Run(ctx context.Context) error {
	defer c.memory.clear()
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.cfg.Reflector || c.cfg.Replicator {
		if c.cfg.PushNamespaces == "" {
			klog.FromContext(ctx).Error(nil, "Anybody who may write Secrets or ConfigMaps can push them to all namespaces",
				"because", "--compat", "restrictedBy", "--"+flagPrefix+"push-namespaces")
		}
		wg.Go(func() {
			originals.Warn(ctx, c.client, c.cfg.Scope, originalsSelector, "emberstack/kubernetes-reflector", "mittwald/kubernetes-replicator")
		})
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop.
func (c *controller) Status() controllers.Status { return c.loop.Status() }

func (c *controller) reconcile(ctx context.Context, t task) (time.Duration, error) {
	now := time.Now()
	switch t.subject {
	case subjectSource:
		return c.expandSource(ctx, t.Key, now), nil
	case subjectNamespace:
		c.expandNamespace(ctx, t.Namespace)
		return 0, nil
	}
	return c.reconcileTarget(ctx, t.Key, now)
}

func (c *controller) reconcileTarget(ctx context.Context, key policy.Key, now time.Time) (time.Duration, error) {
	plan := c.evaluator.Decide(c, key, now)
	c.memory.setTarget(key, &plan, now)
	c.report(plan.Problems)
	if plan.Action == policy.Nothing {
		return plan.RequeueAfter, nil
	}
	klog.FromContext(ctx).V(4).Info("Decided from the cache", "action", plan.Action, "source", plan.Source.String())
	version := ""
	if source := c.Get(plan.Source); source != nil {
		version = source.Version
	}
	if wait := c.memory.writeDelay(key, plan.Action, version, now); wait > 0 {
		return wait, nil
	}
	if err := c.writeLimiter.Wait(ctx); err != nil {
		return 0, err
	}
	isOutdated := func(err error) bool { return errors.Is(err, errOutdated) }
	return retrystale.Do(isOutdated, func(first, _ bool) (time.Duration, error) {
		return c.decideLive(ctx, key, plan.Source, first)
	})
}

// decideLive reads target and source live, decides again, and writes. The first time it does not read a
// target that the cache lacks: a creation would be refused if the target exists.
func (c *controller) decideLive(ctx context.Context, key, source policy.Key, first bool) (time.Duration, error) {
	view := liveView{c, map[policy.Key]*policy.Body{}}
	unread := []policy.Key{source}
	if !first || c.Get(key) != nil {
		unread = append(unread, key)
	} else {
		view.bodies[key] = nil // even if the cache has the target by now: the decision was to create it
	}
	for {
		if err := view.read(ctx, unread); err != nil {
			return 0, err
		}
		plan := c.evaluator.Decide(view, key, time.Now())
		if plan.Action == policy.Nothing {
			c.memory.setTarget(key, &plan, time.Now())
			c.report(plan.Problems)
			return plan.RequeueAfter, nil
		}
		if _, read := view.bodies[plan.Source]; read {
			return c.write(ctx, key, &plan, view)
		}
		unread = []policy.Key{plan.Source}
	}
}

// liveView is the cache with the live objects laid over it.
type liveView struct {
	*controller
	bodies map[policy.Key]*policy.Body // nil: does not exist
}

// read reads objects, all at the same time.
func (l liveView) read(ctx context.Context, keys []policy.Key) error {
	bodies, errs := make([]*policy.Body, len(keys)), make([]error, len(keys))
	var wg sync.WaitGroup
	for i, key := range keys {
		wg.Go(func() {
			// The loop contains a panic in its own goroutine only.
			_, panicked := panics.Recover(func() error { bodies[i], errs[i] = l.get(ctx, key); return nil })
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
func (l liveView) Get(key policy.Key) *policy.Object {
	b, read := l.bodies[key]
	switch {
	case !read:
		return l.controller.Get(key)
	case b == nil:
		return nil
	}
	return l.digester.Describe(b)
}

// Sources implements policy.View.
func (l liveView) Sources(kind policy.Kind, name string) (list []*policy.Object) {
	list = slices.DeleteFunc(l.controller.Sources(kind, name), func(o *policy.Object) bool {
		_, read := l.bodies[o.Key]
		return read
	})
	// The cache may not know yet that one of the live objects pushes.
	for key, b := range l.bodies {
		if b != nil && key.Kind == kind && key.Name == name {
			list = append(list, l.Get(key))
		}
	}
	return list
}

// Get implements policy.View.
func (c *controller) Get(key policy.Key) *policy.Object {
	obj, exists := c.informers.Objects[key.Kind].Get(cache.NewObjectName(key.Namespace, key.Name))
	if !exists {
		return nil
	}
	return policy.Decode(key.Kind, obj, Name)
}

// Sources implements policy.View.
func (c *controller) Sources(kind policy.Kind, name string) (list []*policy.Object) {
	for _, key := range c.indexedKeys(kind, pushPrefix+name) {
		if o := c.Get(key); o != nil {
			list = append(list, o)
		}
	}
	return list
}

// Spread implements policy.View.
func (c *controller) Spread(obj *policy.Object, now time.Time) int {
	if n, known := c.memory.source(obj.Key); known {
		return n
	}
	return c.survey(obj, now).Spread
}

// Maker implements policy.View.
func (c *controller) Maker(target policy.Key) policy.Key {
	return c.memory.target(target).unmarkedSource
}

// UnwantedSince implements policy.View.
func (c *controller) UnwantedSince(target policy.Key, reason policy.Unwanted, now time.Time) time.Time {
	if e := c.memory.target(target); e.unwanted == reason {
		return e.unwantedSince
	}
	return now
}

// Namespace implements policy.View.
func (c *controller) Namespace(name string) *policy.Namespace {
	if c.informers.Namespaces == nil {
		if slices.Contains(c.cfg.Scope, name) {
			return &policy.Namespace{Name: name}
		}
		return nil
	}
	obj, exists := c.informers.Namespaces.Get(cache.NewObjectName("", name))
	if !exists {
		return nil
	}
	return namespaceOf(obj)
}

// namespaces returns all namespaces; without labels if Namespaces are not read.
func (c *controller) namespaces() (list []*policy.Namespace) {
	for _, namespace := range c.cfg.Scope {
		list = append(list, c.Namespace(namespace))
	}
	if c.informers.Namespaces != nil {
		for _, obj := range c.informers.Namespaces.List("", nil) {
			list = append(list, namespaceOf(obj))
		}
	}
	return list
}

func namespaceOf(obj metav1.Object) *policy.Namespace {
	return &policy.Namespace{
		Name: obj.GetName(), Created: obj.GetCreationTimestamp().Time, Labels: obj.GetLabels(), Terminating: obj.GetDeletionTimestamp() != nil,
	}
}
