// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/debug"
	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// watchdogTolerance is how long a leader may outlast its lease before /livez fails. It is
// kube-controller-manager's value.
const watchdogTolerance = 20 * time.Second

// Run is the life of the manager, from top to bottom: it builds everything, listens, starts the
// informers, waits to be elected and leads. The deferred calls stop everything in reverse order.
// Run returns nil if ctx ended and the controllers drained in time. If they did not, the error
// wraps election.ErrUnfinished.
func Run(ctx context.Context, o *Options) error {
	logger := klog.FromContext(ctx)
	logger.Info("Starting", "version", version.Get().GitVersion)
	// rest goes on when ctx ends: while reconciles drain, servers answer probes and informers
	// deliver events.
	rest := context.WithoutCancel(ctx)

	// Build. A mistake in the configuration fails here, on every replica.
	enabled, err := o.enabled()
	if err != nil {
		return err
	}
	registry := metrics.NewKubeRegistry()
	connection, err := newConnection(o.Client)
	if err != nil {
		return err
	}
	scheme, err := newScheme(enabled)
	if err != nil {
		return err
	}
	events, err := startEvents(rest, connection, scheme)
	if err != nil {
		return err
	}
	defer events.stop()
	identity, err := newIdentity()
	if err != nil {
		return err
	}
	seen := newWitness(o, identity)
	lock, err := newLock(o, connection, events, registry, identity, seen)
	if err != nil {
		return err
	}
	clients, err := newClients(o, connection, lock.Fence)
	if err != nil {
		return err
	}
	loops := controllers.NewMetrics(registry)
	cache, err := newCache(o, connection, scheme, registry, loops, enabled)
	if err != nil {
		return err
	}
	running, err := newControllers(o, clients, scheme, events, cache, registry, loops, enabled)
	if err != nil {
		return err
	}
	auth, err := newAuth(o, connection)
	if err != nil {
		return err
	}

	// Listen. From here on, probes are answered.
	watchdog := healthz.LeaderWatchdog(watchdogTolerance, lock)
	synced := cache.CheckSync
	if o.Informers.Standby == informers.StandbyCold {
		synced = func(r *http.Request) error {
			if !lock.IsLeading() {
				return nil // a cold standby has no cache to wait for
			}
			return cache.CheckSync(r)
		}
	}
	filling := func() bool { return synced(nil) != nil }
	o.filling.Store(&filling)
	health := health{
		healthz: healthz.NewHandler("/healthz", watchdog, healthz.NamedCheck("cache-mutation", cache.CheckMutation)),
		livez:   healthz.NewHandler("/livez", watchdog),
		readyz: healthz.NewHandler("/readyz", healthz.NamedCheck("informers-sync", synced),
			healthz.NamedCheck("lease-access", func(*http.Request) error { return lock.Problem() })),
	}
	for _, c := range running {
		if err := health.healthz.Add(c.health); err != nil {
			return err
		}
	}
	debug := map[string]http.Handler{"/debug/leader": lock, "/debug/informers": cache, "/debug/controllers/": running}
	for _, c := range running {
		if c.handler != nil {
			debug["/controllers/"+c.name+"/"] = c.handler
		}
	}
	metricsHandler := metricsHandler(registry)
	servers, err := startServers(rest, o, health, auth, introspection(o, metricsHandler, debug), metricsHandler, seen)
	if err != nil {
		return err
	}
	defer servers.stop()

	// Start the informers, unless standbys are cold.
	if err := waitForAPIServer(ctx, connection.named("startup")); ctx.Err() != nil {
		return nil // stopped before the API server was ready
	} else if err != nil {
		return err
	}
	if o.Informers.Standby == informers.StandbyWarm {
		cache.Start(rest)
	}
	defer cache.Shutdown()

	// Lead, when elected. Work that has not ended when the election ends is cut off.
	work, cutOff := context.WithCancelCause(rest)
	leading := make(chan struct{})
	lead := func(ctx context.Context) error {
		close(leading)
		cache.Start(rest)
		return running.on(false).run(controllers.WithProcess(ctx, work, leading), o.Generic.ControllerStartInterval)
	}
	stopOthers := running.runOnEveryReplica(controllers.WithProcess(ctx, work, leading), o.Generic.ControllerStartInterval, o.Generic.ShutdownTimeout)
	if known := serverFence(o); known != apifence.Unknown {
		lock.SetServerFence(ctx, known)
	}
	err = lock.Run(ctx, lead)
	if err != nil {
		err = errors.Join(err, running.on(false).unfinished(time.Now()))
		cutOff(err)
	}
	err = errors.Join(err, stopOthers())
	cutOff(err)
	return err
}

// newIdentity returns the identity of this process in the election.
func newIdentity() (string, error) {
	pod := os.Getenv("POD_NAME")
	if pod == "" { // in a Pod, the host name is its name, unless hostNetwork or hostname is set
		var err error
		if pod, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("POD_NAME is not set: %w", err)
		}
	}
	return election.NewIdentity(pod), nil
}

// newLock returns the lock of this replica on the Lease, with the fence in the API server if this
// installation uses it.
func newLock(
	o *Options, c connection, e *events, registry metrics.KubeRegistry, identity string, seen *witness.Witness,
) (*election.Lock, error) {
	config := election.ClientConfig(c.base)
	client, err := c.typed(config)
	if err != nil {
		return nil, err
	}
	electionMetrics, err := debug.NewMetrics(registry, o.name)
	if err != nil {
		return nil, err
	}
	candidate := election.Candidate{
		Identity: identity,
		Client:   client.CoordinationV1().Leases(o.Election.ResourceNamespace),
		Events:   e.recorder(o.name),
		Metrics:  electionMetrics,
		PodUID:   os.Getenv("POD_UID"),
		Clock:    o.ElectionClock,
	}
	if seen != nil {
		candidate.Address, candidate.Witness = seen.Address(), seen
	}
	if serverFence(o) == apifence.Unknown {
		candidate.Namespaces, candidate.Servers = client.CoreV1().Namespaces(), apifence.NewDirectory(config, client)
	}
	return election.NewLock(o.election(), candidate)
}

// newWitness returns what standbys see of this process, and what this process sees as a standby. It is
// nil if standbys cannot reach the secure port, or may not take over before the Lease has expired.
func newWitness(o *Options, identity string) *witness.Witness {
	if !o.Election.LeaderElect || o.Secure.BindPort == 0 || serverFence(o) != apifence.Unknown {
		return nil
	}
	address, ok := netip.AddrFromSlice(o.Secure.BindAddress)
	if !ok || address.Unmap().IsUnspecified() {
		var err error
		if address, err = netip.ParseAddr(os.Getenv("POD_IP")); err != nil {
			return nil // it is not known how others reach this process
		}
	}
	return witness.New(netip.AddrPortFrom(address.Unmap(), uint16(o.Secure.BindPort)), identity)
}

// serverFence returns what is known of the fence in the API server without asking.
func serverFence(o *Options) apifence.State {
	switch {
	case o.Generic.UseServiceAccountTokens:
		// These tokens are not bound to our Pod, and the API server refuses to bind them.
		return apifence.CannotJudge
	case len(o.Informers.Namespaces) > 0:
		// Such an installation needs no permission in the cluster, and a Namespace is of the cluster.
		return apifence.Absent
	}
	return apifence.Unknown
}

// newCache returns the informers that the enabled controllers need, not started yet.
func newCache(
	o *Options, c connection, scheme *runtime.Scheme,
	registry metrics.KubeRegistry, loops *controllers.Metrics, enabled []controllers.Entry,
) (*informers.Factory, error) {
	needs, err := needsOf(enabled, o.Settings())
	if err != nil {
		return nil, err
	}
	readers, err := informers.NewClients(c.builtIn(c.named("informers")), scheme)
	if err != nil {
		return nil, err
	}
	return informers.New(o.name, o.Informers, readers, needs, registry, clock.RealClock{}, loops.Panicked)
}
