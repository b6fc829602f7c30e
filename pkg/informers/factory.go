// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/pprof"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Factory owns the informers of the process.
type Factory struct {
	clock     clock.WithTicker
	resources []*resource
	metadata  metadata.Interface
	mutations *mutationDetector // nil if switched off
	name      *cache.InformerName
	minResync time.Duration // 0: no resyncs

	mu      sync.Mutex
	stop    context.CancelFunc // nil until started
	stopped bool
	wg      sync.WaitGroup
}

// resource is one watch and what hangs on it.
type resource struct {
	plan     *plan
	state    *state
	informer *sharedInformer
}

// New builds one informer for each resource that needs name, and starts none. name tells this factory's
// informers apart in client-go's informer metrics (label "name"); it must be unique in the process until
// Shutdown. It fails if the needs contradict each other or cannot be met.
func New(name string, cfg Config, clients Clients, needs []Need, reg metrics.KubeRegistry, c clock.WithTicker) (*Factory, error) {
	plans, err := newPlans(needs)
	if err != nil {
		return nil, err
	}
	f := &Factory{clock: c, metadata: clients.Metadata, minResync: cfg.MinResyncPeriod}
	if cfg.CacheMutationDetection {
		f.mutations = newMutationDetector(c)
	}
	if f.name, err = cache.NewInformerName(name); err != nil {
		return nil, err
	}
	for _, p := range plans {
		src, err := newSource(p, clients)
		if err != nil {
			f.name.Release()
			return nil, err
		}
		r, err := f.newResource(p, src)
		if err != nil {
			f.name.Release()
			return nil, err
		}
		f.resources = append(f.resources, r)
	}
	if err := reg.CustomRegister(newCollector(f)); err != nil {
		f.name.Release()
		return nil, fmt.Errorf("register informer metrics: %w", err)
	}
	return f, nil
}

func (f *Factory) newResource(p *plan, src source) (*resource, error) {
	r := &resource{plan: p, state: newState(resourceName(p.resource), f.clock)}
	lw := &reducingListWatch{source: src, plan: p, state: r.state, clock: f.clock, wg: &f.wg}
	inner := cache.NewSharedIndexInformerWithOptions(lw, src.example, cache.SharedIndexInformerOptions{
		Indexers:          cache.Indexers{}, // so that some can be added
		ObjectDescription: resourceName(p.resource),
		Identifier:        f.name.WithResource(p.resource),
		ResyncPeriod:      wait.Jitter(f.minResync, 1), // not all at once
	})
	if f.mutations != nil {
		lw.cached = f.mutations.watch(r.state.resource, inner.GetStore())
	}
	if err := inner.SetWatchErrorHandlerWithContext(r.state.watchError); err != nil {
		return nil, err
	}
	r.informer = newSharedInformer(inner)
	return r, nil
}

// Informer returns the one informer of the resource, whatever version was asked for; false if no need
// named it.
func (f *Factory) Informer(gvr schema.GroupVersionResource) (cache.SharedIndexInformer, bool) {
	if r := f.resource(gvr); r != nil {
		return r.informer, true
	}
	return nil, false
}

func (f *Factory) resource(gvr schema.GroupVersionResource) *resource {
	for _, r := range f.resources {
		if r.plan.resource.GroupResource() == gvr.GroupResource() {
			return r
		}
	}
	return nil
}

// LiveVersion asks the API server for the resourceVersion that an object has now; empty if it does not exist, or if the
// cache leaves it out. It is an error if no need names the resource. Only metadata is read, with what the cache may do:
// a list of one.
func (f *Factory) LiveVersion(ctx context.Context, gvr schema.GroupVersionResource, name cache.ObjectName) (string, error) {
	r := f.resource(gvr)
	if r == nil {
		return "", fmt.Errorf("version of %s %s: no controller needs the resource", resourceName(gvr), name)
	}
	selector := "metadata.name=" + name.Name
	if r.plan.fieldSelector != "" {
		selector += "," + r.plan.fieldSelector
	}
	list, err := f.metadata.Resource(gvr).Namespace(name.Namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return "", fmt.Errorf("version of %s %s: %w", resourceName(gvr), name, err)
	}
	for i := range list.Items {
		if list.Items[i].Name == name.Name {
			return list.Items[i].ResourceVersion, nil
		}
	}
	return "", nil
}

// Start starts all informers and returns at once. They run until Shutdown, or until ctx ends, which
// also carries the logger. Calling it again does nothing.
func (f *Factory) Start(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stop != nil || f.stopped {
		return
	}
	ctx, f.stop = context.WithCancel(ctx)
	for _, r := range f.resources {
		f.wg.Go(func() {
			pprof.Do(ctx, pprof.Labels("informer", r.state.resource), r.informer.RunWithContext)
		})
	}
	if f.mutations != nil {
		f.wg.Go(func() { f.mutations.run(ctx) })
	}
	klog.FromContext(ctx).Info("Informers started", "resources", len(f.resources))
}

// Shutdown stops the informers and returns when all their goroutines have ended. The caches stay
// readable. It may be called without Start.
func (f *Factory) Shutdown() {
	f.mu.Lock()
	if f.stop != nil {
		f.stop()
	}
	f.stopped = true
	f.mu.Unlock()
	f.wg.Wait()
	f.name.Release()
}

// WaitForSync waits until the informers of the named controllers, without names all, have synced. It
// returns the problems that are left when ctx ends first.
func (f *Factory) WaitForSync(ctx context.Context, controllers ...string) error {
	for _, r := range f.of(controllers) {
		select {
		case <-r.informer.HasSyncedChecker().Done():
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), f.unsynced(controllers))
		}
	}
	return nil
}

// HasSynced reports whether the informers of the named controllers, without names all, have synced.
func (f *Factory) HasSynced(controllers ...string) bool {
	for _, r := range f.of(controllers) {
		if !r.informer.HasSynced() {
			return false
		}
	}
	return true
}

// Problem tells what keeps the cache of a controller from being complete and current: an informer that
// has not synced, a verb that RBAC does not allow, requests that have failed for more than a minute.
// It returns nil if there is nothing of the kind, and before Start, as on a cold standby.
func (f *Factory) Problem(controller string) error {
	if !f.started() {
		return nil
	}
	var errs []error
	for _, r := range f.of([]string{controller}) {
		errs = append(errs, r.problem())
	}
	return errors.Join(errs...)
}

// CheckSync is the health check informers-sync: it fails until every informer has synced once that can. One
// whose list the server refuses does not count: to wait mends nothing, and a new version must be able to roll
// out beside a controller whose CRD or permission is missing. Problem tells of it.
func (f *Factory) CheckSync(*http.Request) error {
	if !f.started() {
		return errNotStarted
	}
	var errs []error
	for _, r := range f.resources {
		if !r.informer.HasSynced() && !r.state.refused() {
			errs = append(errs, r.problem())
		}
	}
	return errors.Join(errs...)
}

// CheckMutation is the health check cache-mutation: it fails for good when an object in a cache has been
// changed, since nothing that the process decides can be trusted then. Without
// --cache-mutation-detection it never fails.
func (f *Factory) CheckMutation(*http.Request) error {
	if f.mutations == nil {
		return nil
	}
	return f.mutations.err()
}

var errNotStarted = errors.New("informers are not started")

func (f *Factory) started() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stop != nil
}

// of returns the resources that the controllers need, all of them without names.
func (f *Factory) of(controllers []string) []*resource {
	if len(controllers) == 0 {
		return f.resources
	}
	var rs []*resource
	for _, r := range f.resources {
		if slices.ContainsFunc(r.plan.needs, func(n Need) bool { return slices.Contains(controllers, n.For) }) {
			rs = append(rs, r)
		}
	}
	return rs
}

func (f *Factory) unsynced(controllers []string) error {
	var errs []error
	for _, r := range f.of(controllers) {
		if !r.informer.HasSynced() {
			errs = append(errs, r.problem())
		}
	}
	return errors.Join(errs...)
}

func (r *resource) problem() error {
	return r.state.problem(r.informer.HasSynced())
}
