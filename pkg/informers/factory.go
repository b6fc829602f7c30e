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
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Factory owns the informers of the process.
type Factory struct {
	clock     clock.WithTickerAndDelayedExecution
	resources []*resource
	clients   Clients
	panicked  func(controller string)
	mutations *mutationDetector // nil if switched off
	name      *cache.InformerName
	minResync time.Duration // 0: no resyncs
	// namespaces are those of --namespaces.
	namespaces []string

	mu      sync.Mutex
	stop    context.CancelFunc // nil until started
	stopped bool
	own     []*ownWatch // see Follow
	wg      sync.WaitGroup
}

// resource is one informer and what belongs to it.
type resource struct {
	plan     *plan
	state    *state
	panics   *panics
	history  *history
	informer cache.SharedIndexInformer
	indexing sync.Mutex // held while indexers are added
	relist   func()
}

// New builds one informer for each resource in needs, and starts none. name is the label "name" of
// client-go's informer metrics; until Shutdown, another factory of that name in the process gets a
// number behind it. panicked is called
// for each panic in a function of the named controller. New returns an error if the needs
// contradict each other or cannot be met.
func New(name string, cfg Config, clients Clients, needs []Need, reg metrics.KubeRegistry, c clock.WithTickerAndDelayedExecution,
	panicked func(controller string)) (_ *Factory, err error) {
	plans, err := newPlans(needs)
	if err != nil {
		return nil, err
	}
	f := &Factory{clock: c, clients: clients, minResync: cfg.MinResyncPeriod, panicked: panicked, namespaces: cfg.Namespaces}
	if cfg.CacheMutationDetection {
		f.mutations = newMutationDetector(c)
	}
	f.name, err = cache.NewInformerName(name)
	for n := 2; err != nil && name != ""; n++ {
		f.name, err = cache.NewInformerName(fmt.Sprintf("%s-%d", name, n))
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.name.Release()
		}
	}()
	for _, p := range plans {
		scopes, err := newScopes(p, clients, cfg.Namespaces)
		if err != nil {
			return nil, err
		}
		if err := f.add(p, scopes); err != nil {
			return nil, err
		}
	}
	if err := reg.CustomRegister(newCollector(f)); err != nil {
		return nil, fmt.Errorf("register informer metrics: %w", err)
	}
	return f, nil
}

func newScopes(p *plan, clients Clients, namespaces []string) ([]*scope, error) {
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	} else if p.clusterScoped {
		return nil, fmt.Errorf("%s needs %s, which have no namespace: not possible with --namespaces",
			strings.Join(p.controllers(), ", "), resourceName(p.resource))
	}
	var scopes []*scope
	for _, namespace := range namespaces {
		src, err := newSource(p, clients, namespace)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(p.controllers(), ", "), err)
		}
		scopes = append(scopes, &scope{source: src, namespace: namespace})
	}
	return scopes, nil
}

func (f *Factory) add(p *plan, scopes []*scope) error {
	name := resourceName(p.resource)
	r := &resource{plan: p, state: newState(name, f.clock), panics: newPanics(name, f.clock, f.panicked)}
	r.history = &history{cached: r.cached, stored: r.stored, filled: r.filled}
	lw := &reducingListWatch{
		reducer: reducer{plan: p, panics: r.panics, history: r.history},
		scopes:  scopes, state: r.state, clock: f.clock, wg: &f.wg, inCache: r.inCache,
	}
	// Without an example object, the reflector takes objects of any type.
	r.informer = cache.NewSharedIndexInformerWithOptions(lw, nil, cache.SharedIndexInformerOptions{
		Indexers:          cache.Indexers{}, // not nil, so that more can be added
		ObjectDescription: name,
		Identifier:        f.name.WithResource(p.resource),
		ResyncPeriod:      wait.Jitter(f.minResync, 1), // so that they do not resync all at once
	})
	if f.mutations != nil {
		lw.reduced = f.mutations.watch(name, r.informer.GetStore())
	}
	r.relist = lw.relist
	f.resources = append(f.resources, r)
	return r.informer.SetWatchErrorHandlerWithContext(r.state.watchError)
}

// cached returns the cached object with that name, or nil if there is none in reduced form.
func (r *resource) cached(n objectName) *Object {
	key := cache.NewObjectName(n.namespace.Value(), n.name).String()
	stored, _, _ := r.informer.GetStore().GetByKey(key) // never fails
	o, _ := stored.(*Object)
	return o
}

// stored returns the version of the last event that the store has. It is 0 if client-go does not tell it.
func (r *resource) stored() uint64 {
	version, _ := strconv.ParseUint(r.informer.GetStore().LastStoreSyncResourceVersion(), 10, 64)
	return version
}

func (r *resource) filled() <-chan struct{} { return r.informer.HasSyncedChecker().Done() }

func (r *resource) inCache(key string) bool {
	_, ok, _ := r.informer.GetStore().GetByKey(key) // never fails
	return ok
}

// Informer returns the informer of the resource for the named controller. The version of gvr does
// not matter. It returns false if the controller does not need the resource.
func (f *Factory) Informer(controller string, gvr schema.GroupVersionResource) (cache.SharedIndexInformer, bool) {
	r := f.resource(gvr)
	if r == nil || !slices.Contains(r.plan.controllers(), controller) {
		return nil, false
	}
	return &controllerInformer{SharedIndexInformer: r.informer, resource: r, controller: controller, scheme: f.clients.scheme}, true
}

func (f *Factory) resource(gvr schema.GroupVersionResource) *resource {
	for _, r := range f.resources {
		if r.plan.resource.GroupResource() == gvr.GroupResource() {
			return r
		}
	}
	return nil
}

// LiveVersion returns the resourceVersion that an object has in the API server now, or "" if it
// does not exist or the cache leaves it out. It lists the metadata of this one object, with the
// cache's permissions. It is an error if the request fails or no need names the resource.
func (f *Factory) LiveVersion(ctx context.Context, gvr schema.GroupVersionResource, name cache.ObjectName) (string, error) {
	r := f.resource(gvr)
	if r == nil {
		return "", fmt.Errorf("version of %s %s: no controller needs the resource", resourceName(gvr), name)
	}
	ctx, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	selector := "metadata.name=" + name.Name
	if r.plan.fieldSelector != "" {
		selector += "," + r.plan.fieldSelector
	}
	list, err := metadataOf(r.plan.resource, f.clients, name.Namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
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

// Start starts all informers and returns at once. They run until Shutdown, or until ctx ends, and
// log to ctx's logger. A second call does nothing, nor does one after Shutdown.
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
	f.wg.Go(func() {
		if f.WaitForSync(ctx) == nil {
			debug.FreeOSMemory() // what it took to fill the caches is garbage now
		}
	})
	klog.FromContext(ctx).Info("Informers started", "resources", len(f.resources))
}

// Relist makes all informers list anew, since the API server's store was restored to an earlier state:
// a watch from a later version is accepted and shows nothing. It returns at once.
func (f *Factory) Relist() {
	for _, r := range f.resources {
		r.relist()
	}
	for _, w := range f.followed() {
		w.lw.relist()
	}
}

// followed returns the watches that controllers asked for at run time.
func (f *Factory) followed() []*ownWatch {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.own)
}

// Shutdown stops the informers and returns when all their goroutines have ended. The caches stay
// readable. It may be called without Start.
func (f *Factory) Shutdown() {
	f.mu.Lock()
	if f.stop != nil {
		f.stop()
	}
	f.stopped = true
	own := slices.Clone(f.own)
	f.mu.Unlock()
	for _, w := range own { // whoever asked for them has not given them back
		w.cancel()
		w.wg.Wait()
	}
	f.wg.Wait()
	f.name.Release()
}

// WaitForSync waits until the informers of the named controllers have synced; without names, until
// all have. If ctx ends first, it returns ctx's cause and the problems that are left.
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

// HasSynced reports whether the informers of the named controllers have synced; without names,
// whether all have.
func (f *Factory) HasSynced(controllers ...string) bool {
	for _, r := range f.of(controllers) {
		if !r.informer.HasSynced() {
			return false
		}
	}
	return true
}

// Problem returns what keeps the cache of a controller from being complete and current: an informer
// that has not synced, a verb that RBAC does not allow, requests that have failed for more than a
// minute, a function of the controller that panics. It returns nil if nothing does, and before
// Start, as on a cold standby.
func (f *Factory) Problem(controller string) error {
	if !f.started() {
		return nil
	}
	var errs []error
	for _, r := range f.of([]string{controller}) {
		errs = append(errs, r.problem(), r.panics.problem(controller, r.inCache))
	}
	return errors.Join(errs...)
}

// CheckSync is the health check informers-sync. It fails until every informer has synced once,
// except those whose list the server refuses, and those that have failed for a minute while others
// have synced, as with a broken conversion webhook or an object that its Go type does not fit.
// Waiting does not help these, and a new version must be able to roll out although one controller
// has such a trouble. Problem reports them.
func (f *Factory) CheckSync(*http.Request) error {
	if !f.started() {
		return errNotStarted
	}
	var errs []error
	answers := slices.ContainsFunc(f.resources, func(r *resource) bool { return r.informer.HasSynced() })
	for _, r := range f.resources {
		if !r.informer.HasSynced() && !r.state.refused() && (!answers || !r.state.failsLong()) {
			errs = append(errs, r.problem())
		}
	}
	return errors.Join(errs...)
}

// CheckMutation is the health check cache-mutation. It fails for good once a cached object has been
// changed, since no decision of the process can be trusted then. Without --cache-mutation-detection
// it never fails.
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

// of returns the resources that the named controllers need; without names, all.
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
