// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package configreload rolls workloads whose ConfigMaps or Secrets changed.
//
// A change of a source enqueues the workloads that it concerns and does nothing else. Reconciling a
// workload compares the sources that it watches with what an annotation of the workload records of
// them. If they differ, one patch marks the pod template and records the new state together, so
// that a crash neither loses nor repeats a reload. The steps of a reconcile are in files of their
// own:
//
//	annotations.go, patterns.go   what the workload asks for
//	workload.go                   what it refers to
//	decide.go                     what is to be done, and when: pure
//	patch.go                      the bytes that do it: pure
//	controller.go, write.go       reading, writing, Events
//
// With Config.Compat, the annotations of stakater/Reloader count too.
package configreload

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// Name is the name of the controller.
const Name = "config-reload"

// conflictAttempts limits the decisions in one reconcile. After a conflict or a 404, the next one
// is made on a live read.
const conflictAttempts = 4

// Controller rolls workloads. Build it with [New].
type Controller struct {
	cfg       Config
	keys      *keys
	in        Informers
	sources   [2]cache.SharedIndexInformer // by sourceType; nil: ignored
	kinds     map[string]*kind
	client    kubernetes.Interface
	events    record.EventRecorder
	clock     clock.WithTicker
	metrics   *domainMetrics
	loop      *controllers.Loop[workloadKey]
	memory    *memory
	selector  labels.Selector // of namespaces
	perMinute *rate.Limiter   // nil: no limit
	csi       sync.Once       // guards the line about CSI secrets
}

var _ controllers.Controller = &Controller{}

// New checks the configuration and adds indexers to the informers of workloads and sources, so it
// must be called before they are started. The dynamic client is for Argo Rollouts and may be nil
// without them.
func New(cfg Config, in Informers, client kubernetes.Interface, dyn dynamic.Interface, events record.EventRecorder,
	clock clock.WithTicker, loop *controllers.Metrics, reg metrics.KubeRegistry,
) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	selector, err := parseSelector(cfg.NamespaceSelector)
	if err != nil {
		return nil, err
	}
	if cfg.needsNamespaces() && in.Namespaces == nil {
		return nil, errors.New("--config-reload-namespace-selector needs an informer of namespaces")
	}
	c := &Controller{
		cfg: cfg, keys: newKeys(&cfg), in: in,
		sources:  [2]cache.SharedIndexInformer{in.ConfigMaps, in.Secrets},
		kinds:    newKinds(&cfg, in, client, dyn),
		client:   client,
		events:   events,
		clock:    clock,
		selector: selector,
	}
	c.memory = newMemory(c.cachedUID)
	for t := range c.sources {
		if cfg.sourceIgnored(sourceType(t)) {
			c.sources[t] = nil
		}
		c.keys.ignoredTypes[t] = c.sources[t] == nil
	}
	if cfg.MaxRolloutsPerMinute > 0 {
		c.perMinute = rate.NewLimiter(rate.Limit(float64(cfg.MaxRolloutsPerMinute)/60), 1)
	}
	if err := c.addIndexers(); err != nil {
		return nil, err
	}
	c.metrics = newDomainMetrics(reg, c.memory, c.kinds)
	c.loop = controllers.NewLoop(controllers.Options[workloadKey]{
		Name: Name, Workers: cfg.ConcurrentSyncs, Reconcile: c.reconcile, Metrics: loop, Clock: clock,
	})
	return c, nil
}

// Run reconciles until ctx ends and every worker has returned.
func (c *Controller) Run(ctx context.Context) error {
	defer c.memory.clear()
	defer c.metrics.stopped()
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.cfg.Compat {
		wg.Go(func() { c.warnOfOriginal(ctx) })
	}
	err := c.loop.Run(ctx, c.watches()...)
	c.giveUpJobs(ctx)
	return err
}

// Status returns the state of the controller's loop.
func (c *Controller) Status() controllers.Status { return c.loop.Status() }

func (c *Controller) reconcile(ctx context.Context, key workloadKey) (time.Duration, error) {
	k := c.kinds[key.kind]
	if key.kind == "Job" {
		if after, busy, err := c.recreateJob(ctx, key); busy {
			return after, err
		}
	}
	obj, exists, err := k.informer.GetIndexer().GetByKey(key.ObjectName.String())
	if err != nil {
		return 0, fmt.Errorf("look up %s: %w", key, err)
	}
	if !exists || !c.selected(key.Namespace) {
		c.memory.forget(key)
		return 0, nil
	}
	w, err := newWorkload(key.kind, obj)
	if err != nil {
		return 0, err
	}
	e := c.memory.get(key, w.uid)
	if e.behind(w.version) {
		return 0, nil // the write will arrive as the cache's next event
	}
	if e.written != "" {
		c.memory.update(key, w.uid, c.clock.Now(), func(e *entry) { e.written = "" })
	}
	for attempt := 1; ; attempt++ {
		last := attempt == conflictAttempts
		after, err := c.step(ctx, k, w, last)
		if !outdated(err) || last {
			return after, err
		}
		klog.FromContext(ctx).V(4).Info("Workload changed meanwhile, reading it live")
		live, err := k.get(ctx, key.ObjectName)
		if apierrors.IsNotFound(err) {
			c.memory.forget(key)
			return 0, nil
		}
		if err != nil {
			return after, fmt.Errorf("get %s: %w", key, err)
		}
		before := w
		if w, err = newWorkload(key.kind, live); err != nil {
			return 0, err
		}
		if w.uid == before.uid {
			c.noteRemoval(key, w.uid, before.meta, w.meta)
		}
	}
}

// cachedUID returns the UID of the cached workload; empty if the cache does not have it.
func (c *Controller) cachedUID(key workloadKey) types.UID {
	obj, exists, err := c.kinds[key.kind].informer.GetIndexer().GetByKey(key.ObjectName.String())
	if err != nil || !exists {
		return ""
	}
	return obj.(metav1.Object).GetUID()
}

// step decides on one version of a workload and does what is due. A conflict is reported as a
// failure only if last is set.
func (c *Controller) step(ctx context.Context, k *kind, w *workload, last bool) (time.Duration, error) {
	now := c.clock.Now()
	r, problems := c.keys.rules(w)
	e := c.memory.get(w.workloadKey, w.uid)

	pause, pauseLeft := c.keys.pauseState(w, &r, now)
	c.memory.setPaused(w.workloadKey, w.Paused && pauseLeft > 0)
	if pause != pauseStands && !c.cfg.DryRun {
		if err := c.endPause(ctx, k, w, pause); err != nil {
			return pauseRetry, err
		}
		return 0, nil
	}
	if c.cfg.Compat && asksForCSI(w) {
		c.csi.Do(func() {
			workloadLogger(ctx, w).Info("Annotations for secretproviderclasses are not supported and have no effect; logged once")
		})
	}

	f, problems := c.facts(w, r, &e, problems, now)
	p := c.cfg.decide(f)
	if !c.inMemory(w) && (p.state.tooLarge() || p.state == nil && f.recorded.tooLarge()) {
		problems = append(problems, stateTooLarge)
	}
	c.report(ctx, w, &e, problems)
	behind, err := c.cacheIsBehind(ctx, f, p.reloads)
	if err != nil {
		return pauseLeft, err
	}
	if behind {
		return soonest(settle, pauseLeft), nil // the event comes sooner
	}
	if len(p.reloads) > 0 && c.perMinute != nil && f.window.notBefore.IsZero() {
		// The turn is kept until the reload has succeeded, so that a failing reload does not take
		// the turn of another one.
		f.window.notBefore = now.Add(c.perMinute.ReserveN(now, 1).DelayFrom(now))
		c.memory.update(w.workloadKey, w.uid, now, func(live *entry) { live.window.notBefore = f.window.notBefore })
		p = c.cfg.decide(f)
	}
	var after time.Duration
	switch {
	case len(p.reloads) > 0:
		after, err = c.reload(ctx, k, f, &p, &e, last)
	default:
		after, err = c.record(ctx, k, f, &p, &e)
	}
	if err != nil {
		return pauseLeft, err // a failing reload does not delay the end of a pause
	}
	return soonest(after, pauseLeft), nil
}

// cacheIsBehind reports whether the cached version of a source is outdated, so that a reload would
// go back to it. The cache of sources may lag by any time, also on a replica that has just begun to
// lead, while what is recorded on the workload may be newer. A version of a source that is newer
// than the workload's is safe; for any other, the API server is asked whether it is the latest.
func (c *Controller) cacheIsBehind(ctx context.Context, f *facts, reloads []reload) (bool, error) {
	w := f.workload
	for _, r := range reloads {
		cached := f.sources[r.key]
		if order, err := resourceversion.CompareResourceVersion(cached.version, w.version); err == nil && order > 0 {
			continue
		}
		live, err := c.in.LiveVersion(ctx, r.key.typ.resource(), cache.NewObjectName(w.Namespace, r.key.name))
		if err != nil {
			return false, fmt.Errorf("check whether the cache is behind: %w", err)
		}
		if live != cached.version {
			workloadLogger(ctx, w).V(2).Info("The cache of sources is behind", "source", r.key, "cached", cached.version)
			return true, nil
		}
	}
	return false, nil
}

// soonest returns the shorter delay. Zero asks for nothing and is ignored.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// facts collects what the decision on w depends on.
func (c *Controller) facts(w *workload, r rules, e *entry, problems []problem, now time.Time) (*facts, []problem) {
	f := &facts{workload: w, rules: r, window: e.window, rolled: e.rolled, now: now}
	recorded, annotated, err := c.recorded(w)
	if err != nil {
		problems = append(problems, problem{nativeState, err.Error()})
	}
	if e.kept != nil && (c.inMemory(w) || !annotated) {
		recorded, annotated = e.kept, true
	}
	f.recorded, f.firstSight = recorded, !annotated
	f.seen = state{}
	for key, value := range e.seen {
		if _, known := f.recorded[key]; !known {
			f.recorded[key], f.seen[key] = value, value
		}
	}
	if value, ok := w.meta[nativeDelay]; ok {
		if _, valid := w.reloadDelay(); !valid {
			problems = append(problems, problem{nativeDelay, fmt.Sprintf("%q is not a positive duration", value)})
		}
	}
	f.sources = c.lookUp(w, &r, f.recorded)
	return f, problems
}

// recorded returns the state in the annotation of w; it is empty if there is none or if it does not
// count. The error says that the annotation could not be parsed.
func (c *Controller) recorded(w *workload) (s state, annotated bool, err error) {
	text, annotated := w.meta[nativeState]
	if !annotated || !c.readsState(w.kind) {
		return state{}, false, nil
	}
	if s, err = parseState(text); err != nil {
		return state{}, false, err
	}
	return s, true, nil
}

// inMemory reports whether the state of w is kept in memory and not on the workload.
func (c *Controller) inMemory(w *workload) bool { return c.cfg.DryRun || !c.readsState(w.kind) }

// readsState reports whether a state annotation on a workload of this kind counts. It does not with
// state=off, where it is left over from another configuration, nor on a Job, where it is a copy.
func (c *Controller) readsState(kind string) bool { return c.cfg.State != StateOff && kind != "Job" }

// selected reports whether the controller works in a namespace.
func (c *Controller) selected(namespace string) bool {
	if len(c.cfg.Namespaces) > 0 {
		return contains(c.cfg.Namespaces, namespace)
	}
	if contains(c.cfg.IgnoredNamespaces, namespace) {
		return false
	}
	if !c.cfg.needsNamespaces() {
		return true
	}
	obj, exists, err := c.in.Namespaces.GetIndexer().GetByKey(namespace)
	if err != nil || !exists {
		return false
	}
	return c.selects(obj)
}
