// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The defaults of LoopOptions of a loop for another cluster, which may not answer.
const (
	otherClusterTimeout = 30 * time.Second
	otherClusterDrain   = 2 * time.Second
)

// openClusters are the other clusters that a controller has open.
type openClusters struct {
	process    *process
	controller string

	mu  sync.Mutex
	all []*otherCluster
}

// otherCluster is another cluster that a controller has open.
type otherCluster struct {
	openClusters *openClusters
	name         string
	cache        *informers.ClusterCache
	events       *eventSender
	transport    http.RoundTripper
	life         context.Context // ends when the cluster is closed
	end          context.CancelFunc
	running      sync.WaitGroup
	loops        []*runningLoop // guarded by openClusters.mu
	release      func()         // calls free; a second call does nothing
}

// runningLoop is a loop of another cluster that Go runs.
type runningLoop struct {
	controllers.ClusterLoop
	restarts restarts
}

// list returns the clusters that are open.
func (o *openClusters) list() []*otherCluster {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.all)
}

// runningLoops returns the loops of the cluster.
func (c *otherCluster) runningLoops() []*runningLoop {
	c.openClusters.mu.Lock()
	defer c.openClusters.mu.Unlock()
	return slices.Clone(c.loops)
}

// addStatus adds what the loops in other clusters do to the status of the controller, and the problem of a
// loop that drains for longer than stuckAfter. It leaves alone the arrays of both, which their authors may
// retain.
func (o *openClusters) addStatus(s *controllers.Status, stuckAfter time.Duration) {
	s.InFlight = slices.Clip(s.InFlight)
	for _, c := range o.list() {
		for _, l := range c.runningLoops() {
			one := l.Status()
			if err := lingers(one, stuckAfter); err != nil && one.Phase != controllers.PhaseSyncing { // the cluster may be away
				s.Problem = strings.TrimPrefix(fmt.Sprintf("%s\nthe loop of cluster %s %v", s.Problem, c.name, err), "\n")
			}
			s.Add(one.In(" in cluster " + c.name))
		}
	}
}

// problem returns an error that names the clusters in which loops have ended unexpectedly, or functions of
// the controller panic or hang. That a cluster does not answer is no problem of the controller.
func (o *openClusters) problem() error {
	var errs []error
	for _, c := range o.list() {
		for _, l := range c.runningLoops() {
			if err := l.restarts.problem(); err != nil {
				errs = append(errs, fmt.Errorf("the loop of cluster %s %w", c.name, err))
			}
		}
		if err := c.cache.Problem(o.controller); err != nil {
			errs = append(errs, fmt.Errorf("cluster %s: %w", c.name, err))
		}
	}
	return errors.Join(errs...)
}

// open implements Host.Cluster.
func (o *openClusters) open(name string, config *rest.Config) (*controllers.Cluster, error) {
	p, controller := o.process, o.controller
	fail := func(err error) (*controllers.Cluster, error) {
		return nil, fmt.Errorf("cluster %q of controller %s: %w", name, controller, err)
	}
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fail(errors.New(problems[0]))
	}
	if err := checkOtherCluster(config, p.clientConfigs.base); err != nil {
		return fail(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if slices.ContainsFunc(o.all, func(c *otherCluster) bool { return c.name == name }) {
		return fail(errors.New("a cluster of this name is already open"))
	}
	readConfig, err := otherClusterConfig(config, controller, p.lock.FenceElsewhere, p.loopMetrics)
	if err != nil {
		return fail(err)
	}
	writeConfig := rest.CopyConfig(readConfig)
	writeConfig.Timeout = config.Timeout // the cache has no timeout, which would end its watches
	if p.clients.dryRun != nil {
		dryRun, err := newDryRun(clientConfigs{base: readConfig})
		if err != nil {
			return fail(err)
		}
		writeConfig.Wrap(dryRun.wrap)
	}
	c := clientConfigs{readConfig, p.clientConfigs.contentType}
	mapper, mapperErr := newKindMapper(readConfig)
	clients, clientsErr := p.clientsOf(controller, writeConfig, mapper)
	eventsConfig := rest.AddUserAgent(rest.CopyConfig(writeConfig), "events")
	eventsConfig.Timeout = eventTimeout
	eventsClient, eventsErr := c.typed(eventsConfig)
	if err := errors.Join(mapperErr, clientsErr, eventsErr); err != nil {
		return fail(err)
	}
	cache, err := p.caches.AddCluster(
		informers.CacheConfig{Cluster: name, Scheme: p.scheme}, c.builtIn(c.named("informers")), p.loopMetrics.Panicked)
	if err != nil {
		return fail(err)
	}
	life, end := context.WithCancel(context.Background())
	events := newEventSender(context.Background(), eventsClient.CoreV1(), p.scheme) // free stops it, after the loops
	other := &otherCluster{
		openClusters: o, name: name, cache: cache, events: events, transport: readConfig.Transport, life: life, end: end}
	other.release = sync.OnceFunc(other.free)
	o.all = append(o.all, other)
	loopOptions := p.loopOptions(controller, name)
	loopOptions.Timeout = min(loopOptions.Timeout, otherClusterTimeout)
	loopOptions.DrainTimeout = min(loopOptions.DrainTimeout, otherClusterDrain)
	return &controllers.Cluster{
		Cache: cache.ForController(controller), Clients: clients,
		Events:      events.recorder(p.options.name + "-" + controller),
		LoopOptions: loopOptions,
		Go:          other.Go, Close: other.close,
	}, nil
}

// Go implements Cluster.Go.
func (c *otherCluster) Go(ctx context.Context, loop controllers.ClusterLoop) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	unlink := context.AfterFunc(c.life, cancel)
	ended := make(chan struct{})
	c.openClusters.mu.Lock() // close waits only for loops that Go has added before
	open := c.life.Err() == nil
	if open {
		l := &runningLoop{ClusterLoop: loop}
		c.loops = append(c.loops, l)
		c.running.Go(func() {
			defer close(ended)
			defer unlink()
			c.run(ctx, l)
		})
	}
	c.openClusters.mu.Unlock()
	if !open {
		loop.Close() // without the lock, since it may close another cluster
		return func() {}
	}
	return func() { cancel(); <-ended }
}

// close implements Cluster.Close.
func (c *otherCluster) close() {
	c.openClusters.mu.Lock()
	c.end()
	c.openClusters.mu.Unlock()
	c.running.Wait()
	c.release()
}

// free closes what the cluster holds. It does not wait for the loops.
func (c *otherCluster) free() {
	c.end()
	c.events.stop(0)
	c.cache.Stop()
	go func() { // the Lease is not released before free returns, and must not wait for another cluster
		c.cache.Shutdown()
		utilnet.CloseIdleConnectionsFor(c.transport)
	}()
	c.openClusters.mu.Lock()
	defer c.openClusters.mu.Unlock()
	c.openClusters.all = slices.DeleteFunc(c.openClusters.all, func(other *otherCluster) bool { return other == c })
}

// run runs a loop until ctx ends, and closes it.
func (c *otherCluster) run(ctx context.Context, l *runningLoop) {
	m, controller := c.openClusters.process.loopMetrics, c.openClusters.controller
	defer func() {
		if stack, err := panics.Recover(func() error { l.Close(); return nil }); stack != nil {
			m.Panicked(controller)
			klog.Background().Error(err, "Close of a loop panicked",
				"controller", controller, "cluster", c.name, "stack", string(stack))
		}
	}()
	// An error while the loop stops is not reported: the cluster may not answer.
	_ = l.restarts.keepRunning(ctx, m, controller, l.Run, func(err error, stack []byte) {
		// Not the logger of ctx, which may have the key of a reconcile.
		klog.Background().Error(err, "Loop of another cluster stopped unexpectedly, restarting",
			"controller", controller, "cluster", c.name, "delay", restartDelay, "stack", string(stack))
	})
	c.openClusters.mu.Lock()
	defer c.openClusters.mu.Unlock()
	c.loops = slices.DeleteFunc(c.loops, func(other *runningLoop) bool { return other == l })
}

// checkOtherCluster refuses a configuration that runs a program or reads a file, since the author of the
// configuration would do so as this process. It also refuses a configuration with the token of this process,
// which another cluster must not get.
func checkOtherCluster(config, own *rest.Config) error {
	tokenFile, _ := os.ReadFile(own.BearerTokenFile) // the kubelet replaces the token; without a file it is empty
	switch {
	case config == nil || config.Host == "":
		return errors.New("the configuration names no API server")
	case config.ExecProvider != nil || config.AuthProvider != nil:
		return errors.New("the configuration runs a program for its credentials")
	case cmp.Or(config.BearerTokenFile, config.CAFile, config.CertFile, config.KeyFile) != "":
		return errors.New("the configuration names a file: pass the contents")
	case config.WrapTransport != nil: // it may add the token of this process, and hides what it adds
		return errors.New("the configuration has a WrapTransport: pass credentials, not a function that adds them")
	case config.BearerToken != "" &&
		slices.Contains([]string{own.BearerToken, strings.TrimSpace(string(tokenFile))}, config.BearerToken):
		return errors.New("the configuration has the token of this process, which is for its own API server")
	}
	return nil
}

// otherClusterConfig returns the configuration of a controller's clients in another cluster. They share
// connections, and a limit if config has one. The fence is checked last, after all transports that may wait.
func otherClusterConfig(
	config *rest.Config, controller string, fence func(http.RoundTripper) http.RoundTripper, m *loopmetrics.Metrics,
) (*rest.Config, error) {
	config = rest.AddUserAgent(rest.CopyConfig(config), controller)
	if !strings.Contains(config.Host, "://") {
		config.Host = "https://" + config.Host
	}
	if config.Proxy == nil { // no proxy, whatever the environment says
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	}
	if config.Transport != nil {
		config.Transport = containedTransport(config.Transport, controller, m)
	}
	config.Wrap(fence)
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	shared := &rest.Config{
		Host: config.Host, APIPath: config.APIPath, UserAgent: config.UserAgent, WarningHandler: rest.NoWarnings{},
		Transport: withoutLongWaits(withoutRedirects(transport)), QPS: -1, RateLimiter: config.RateLimiter,
	}
	if config.QPS > 0 && config.RateLimiter == nil {
		shared.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(config.QPS, cmp.Or(config.Burst, rest.DefaultBurst))
	}
	return shared, nil
}

// containedTransport makes a panic of a controller's own transport an error: requests are sent by
// goroutines in which a panic would end the process, and then the next leader.
func containedTransport(next http.RoundTripper, controller string, m *loopmetrics.Metrics) http.RoundTripper {
	return transport{next, func(r *http.Request) (resp *http.Response, err error) {
		stack, panicked := panics.Recover(func() error {
			resp, err = next.RoundTrip(r) //nolint:bodyclose // the caller closes it
			return nil                    // Recover would return the text of err only, and client-go asks for its type
		})
		if stack == nil {
			return resp, err
		}
		m.Panicked(controller)
		klog.FromContext(r.Context()).Error(panicked, "Transport of a controller panicked",
			"controller", controller, "stack", string(stack))
		return nil, panicked
	}}
}

// withoutRedirects makes a redirect an error: client-go would send the credentials to wherever it leads.
func withoutRedirects(next http.RoundTripper) http.RoundTripper {
	return transport{next, func(r *http.Request) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && resp.StatusCode >= 300 && resp.StatusCode < 400 && resp.Header.Get("Location") != "" {
			_ = resp.Body.Close() // nobody reads it
			return nil, fmt.Errorf("%s %s: the API server redirects, which is not followed", r.Method, r.URL.Path)
		}
		return resp, err
	}}
}
