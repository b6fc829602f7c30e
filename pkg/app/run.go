// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/pkg/serving"
)

// watchdogTolerance is how long a leader may outlast its Lease before /livez fails. It is
// kube-controller-manager's value.
const watchdogTolerance = 20 * time.Second

// Run is the life of the manager: it builds everything, listens, starts the informers, waits to be
// elected and leads. The deferred calls stop everything in reverse order. Run returns nil if ctx ended
// and the controllers drained in time. If they did not, the error wraps election.ErrUnfinished.
func Run(ctx context.Context, o *Options) error {
	klog.FromContext(ctx).Info("Starting", "version", version.Get().GitVersion)
	// While reconciles drain, servers answer probes, Events are sent and informers deliver events.
	processCtx := context.WithoutCancel(ctx)
	p, err := build(processCtx, o)
	if err != nil {
		return err
	}
	defer p.events.stop(eventsFlushTimeout)
	defer p.cache.Shutdown() // if listen fails: Entry.New may have followed resources
	servers, err := p.listen(processCtx)
	if err != nil {
		return err
	}
	defer servers.Stop()
	defer p.cache.Shutdown() // a second call does nothing
	if err := waitForAPIServer(ctx, p.clientConfigs.named("startup")); ctx.Err() != nil {
		return nil // stopped before the API server was ready
	} else if err != nil {
		return err
	}
	if o.Informers.Standby == standbyWarm {
		p.cache.Start(processCtx)
	}
	defer p.controllers.releaseClusters()
	return p.lead(ctx, processCtx)
}

// process is what a replica consists of.
type process struct {
	options       *Options
	clientConfigs clientConfigs
	scheme        *runtime.Scheme
	events        *eventSender
	witness       *witness.Witness // nil if standbys cannot see this process
	lock          *election.Lock
	clients       *clientFactory
	caches        *informers.Caches
	cache         *informers.ClusterCache // of the process's own cluster
	controllers   hostedControllers
	reviewer      *serving.Reviewer // nil without a secure port
	metrics       controllerMetrics
	loopMetrics   *loopmetrics.Metrics
}

// build builds everything. A mistake in the configuration fails here, on every replica. Events are
// sent until ctx ends.
func build(ctx context.Context, o *Options) (_ *process, err error) {
	required, err := o.collectRequirements()
	if err != nil {
		return nil, err
	}
	registry := metrics.NewKubeRegistry()
	p := &process{
		options: o, scheme: required.cache.Scheme,
		metrics: controllerMetrics{metrics.NewKubeRegistry(), registry}, loopMetrics: loopmetrics.New(registry),
	}
	if p.clientConfigs, err = newClientConfigs(o.Client); err != nil {
		return nil, err
	}
	if p.events, err = startEvents(ctx, p.clientConfigs, p.scheme); err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			return
		}
		if p.cache != nil {
			p.cache.Shutdown()
		}
		p.events.stop(eventsFlushTimeout)
	}()
	identity, err := newIdentity(o.Settings().Pod.Name)
	if err != nil {
		return nil, err
	}
	p.witness = newWitness(o, identity)
	if p.lock, err = newLock(o, p.clientConfigs, p.events, registry, identity, p.witness); err != nil {
		return nil, err
	}
	if p.clients, err = newClientFactory(o, p.clientConfigs, p.lock.Fence); err != nil {
		return nil, err
	}
	readConfig := p.clientConfigs.named("informers")
	readConfig.Wrap(withoutLongWaits) // a cache has its own back-off, and shows each failure
	if p.caches, err = informers.NewCaches(registry); err != nil {
		return nil, err
	}
	p.cache, err = p.caches.AddCluster(required.cache, p.clientConfigs.builtIn(readConfig), p.loopMetrics.Panicked)
	if err != nil {
		return nil, err
	}
	if p.controllers, err = p.newControllers(required.entries); err != nil {
		return nil, err
	}
	if o.Secure.BindPort != 0 {
		p.reviewer, err = serving.NewReviewer(o.Authentication, func(name string) *rest.Config {
			return p.clientConfigs.builtIn(p.clientConfigs.named(name))
		})
	}
	return p, err
}

// listen starts the servers, which answer probes from here on.
func (p *process) listen(ctx context.Context) (*serving.Servers, error) {
	watchdog := healthz.LeaderWatchdog(watchdogTolerance, p.lock)
	checks := serving.Health{
		Healthz: healthz.NewHandler("/healthz", watchdog),
		Livez:   healthz.NewHandler("/livez", watchdog),
		Readyz: healthz.NewHandler("/readyz", healthz.NamedCheck("informers-sync", p.checkSync),
			healthz.NamedCheck("lease-access", func(*http.Request) error { return p.lock.Problem() })),
	}
	informersStatus := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, p.caches.Status()) })
	protected := map[string]http.Handler{
		"/debug/leader": p.lock, "/debug/informers": informersStatus, "/debug/controllers/": p.controllers,
	}
	for _, c := range p.controllers {
		if err := checks.Healthz.Add(c.health); err != nil {
			return nil, err
		}
		if c.handler != nil {
			protected["/controllers/"+c.name+"/"] = c.handler
		}
	}
	metricsPage := metricsHandler(p.metrics)
	pages := serving.Pages{
		Health: checks, Metrics: metricsPage, Protected: introspectionHandler(p.options, metricsPage, protected),
		Open: map[string]http.Handler{},
	}
	if p.witness != nil {
		pages.Open[witness.Path] = p.witness
	}
	return serving.Start(ctx, p.options.Insecure, p.options.Secure, p.reviewer, pages)
}

// checkSync returns an error while the caches fill. A cold standby has no caches to wait for.
func (p *process) checkSync(r *http.Request) error {
	if p.options.Informers.Standby == standbyCold && !p.lock.IsLeading() {
		return nil
	}
	return p.cache.CheckSync(r)
}

// lead stands for election until ctx ends, and runs the controllers when this replica is elected; controllers
// of every replica run from the start. Work that has not ended when the election ends is cut off.
func (p *process) lead(ctx, processCtx context.Context) error {
	work, cutOff := context.WithCancelCause(processCtx)
	everywhereWork, cutOffEverywhere := context.WithCancelCause(processCtx)
	leading := make(chan struct{})
	// The controllers of every replica run from here on.
	everywhere, onLeader := p.controllers.withEveryReplica(true), p.controllers.withEveryReplica(false)
	stopEverywhere := everywhere.start(lifetime.NewContext(ctx, everywhereWork, leading), p.options.Generic.ShutdownTimeout)
	if fence := serverFence(p.options); fence != apifence.Unknown {
		p.lock.SetServerFence(ctx, fence)
	}
	// The controllers of the leader run while this replica leads.
	err := p.lock.Run(ctx, func(ctx context.Context) error {
		close(leading)
		p.cache.Start(processCtx) // a no-op on a warm standby
		return onLeader.run(lifetime.NewContext(ctx, work, leading))
	})
	if err != nil {
		err = errors.Join(err, onLeader.unfinished(time.Now()))
		cutOff(err)
	}
	// When ctx ends, the controllers of every replica drain beside the leader's. If the election was lost, they
	// stop last.
	err = errors.Join(err, stopEverywhere())
	cutOff(err)
	cutOffEverywhere(err)
	return err
}
