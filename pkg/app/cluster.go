// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
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

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// otherClusterDrain is how long reconciles of a loop for another cluster have to drain by default.
const otherClusterDrain = 2 * time.Second

// eventTimeout is how long another API server may take for an Event: client-go's recorder waits without
// limit.
const eventTimeout = 30 * time.Second

// openClusters has the other clusters that are open.
type openClusters struct {
	mu    sync.Mutex
	all   map[string]*otherCluster // by CONTROLLER/NAME
	loops []*runningLoop
}

// otherCluster is another cluster that a controller has open.
type otherCluster struct {
	process          *process
	controller, name string
	cache            *informers.ClusterCache
	events           *eventSender
	transport        http.RoundTripper
	life             context.Context // ends when the cluster is closed
	end              context.CancelFunc
	loops            sync.WaitGroup
	release          func() // calls freeResources; a second call does nothing
}

func (c *otherCluster) key() string { return c.controller + "/" + c.name }

// runningLoop is a loop of another cluster that Go runs.
type runningLoop struct {
	controllers.ClusterLoop
	controller, cluster string
	runs                runs
}

// loopsOf returns the loops of a controller, in the order of their clusters' names.
func (o *openClusters) loopsOf(controller string) (all []*runningLoop) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range o.loops {
		if l.controller == controller {
			all = append(all, l)
		}
	}
	slices.SortFunc(all, func(a, b *runningLoop) int { return strings.Compare(a.cluster, b.cluster) })
	return all
}

func (o *openClusters) add(l *runningLoop) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.loops = append(o.loops, l)
}

func (o *openClusters) remove(l *runningLoop) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.loops = slices.DeleteFunc(o.loops, func(other *runningLoop) bool { return other == l })
}

// addStatus adds what the loops of a controller in other clusters do to its status.
func (o *openClusters) addStatus(controller string, s *controllers.Status) {
	for _, l := range o.loopsOf(controller) {
		one := l.Status()
		for i := range one.InFlight {
			one.InFlight[i].Key += " in cluster " + l.cluster
		}
		s.Add(one)
	}
}

// problem returns an error that names the clusters in which loops of the controller have ended unexpectedly,
// objects do not fit their Go types, or functions of the controller panic or hang. That a cluster does not
// answer is no problem of the controller.
func (o *openClusters) problem(controller string) error {
	var errs []error
	for _, l := range o.loopsOf(controller) {
		if err := l.runs.problem(); err != nil {
			errs = append(errs, fmt.Errorf("the loop of cluster %s %w", l.cluster, err))
		}
	}
	for _, c := range o.clustersOf(controller) {
		if err := c.cache.Problem(controller); err != nil {
			errs = append(errs, fmt.Errorf("cluster %s: %w", c.name, err))
		}
	}
	return errors.Join(errs...)
}

// clustersOf returns the clusters that the named controller has open, or all controllers if the name is
// empty, in the order of their names.
func (o *openClusters) clustersOf(controller string) (clusters []*otherCluster) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(o.all)) {
		if c := o.all[key]; controller == "" || c.controller == controller {
			clusters = append(clusters, c)
		}
	}
	return clusters
}

// release releases all clusters, without waiting for their loops.
func (o *openClusters) release() {
	o.each("", func(c *otherCluster) { c.release() })
}

// each calls do for the clusters of clustersOf at once, since each may take seconds.
func (o *openClusters) each(controller string, do func(*otherCluster)) {
	var doing sync.WaitGroup
	for _, c := range o.clustersOf(controller) {
		doing.Go(func() { do(c) })
	}
	doing.Wait()
}

// openCluster implements Host.Cluster.
func (p *process) openCluster(controller, name string, config *rest.Config) (*controllers.Cluster, error) {
	fail := func(err error) (*controllers.Cluster, error) {
		return nil, fmt.Errorf("cluster %q of controller %s: %w", name, controller, err)
	}
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fail(errors.New(problems[0]))
	}
	if err := checkOtherCluster(config, p.connection.base); err != nil {
		return fail(err)
	}
	other := &otherCluster{process: p, controller: controller, name: name}
	p.openClusters.mu.Lock()
	defer p.openClusters.mu.Unlock()
	if p.openClusters.all[other.key()] != nil {
		return fail(errors.New("a cluster of this name is already open"))
	}
	readConfig, err := otherClusterConfig(config, controller, p.lock.FenceElsewhere)
	if err != nil {
		return fail(err)
	}
	other.transport = readConfig.Transport
	writeConfig := rest.CopyConfig(readConfig)
	writeConfig.Timeout = config.Timeout // the cache has no timeout, which would end its watches
	if p.clients.dryRun != nil {
		dryRun, err := newDryRun(connection{base: readConfig})
		if err != nil {
			return fail(err)
		}
		writeConfig.Wrap(dryRun.wrap)
	}
	c := connection{readConfig, p.connection.contentType}
	kinds, kindsErr := newKinds(readConfig)
	clients, clientsErr := p.clientsOf(controller, writeConfig, kinds)
	eventsConfig := rest.AddUserAgent(rest.CopyConfig(writeConfig), "events")
	eventsConfig.Timeout = eventTimeout
	eventsClient, eventsErr := c.typed(eventsConfig)
	if err := errors.Join(kindsErr, clientsErr, eventsErr); err != nil {
		return fail(err)
	}
	other.cache, err = p.caches.AddCluster(
		informers.CacheConfig{Cluster: name, Scheme: p.scheme}, c.builtIn(c.named("informers")), p.loopMetrics.Panicked)
	if err != nil {
		return fail(err)
	}
	other.life, other.end = context.WithCancel(context.Background())
	other.events = sendTo(other.life, eventsClient.CoreV1(), p.scheme)
	other.release = sync.OnceFunc(other.freeResources)
	p.openClusters.all[other.key()] = other
	return &controllers.Cluster{
		Cache: other.cache.ForController(controller), Clients: clients,
		Events: other.events.recorder(p.options.name + "-" + controller),
		LoopOptions: controllers.LoopOptions{
			Name: controller, Cluster: name, Metrics: p.loopMetrics, DrainTimeout: otherClusterDrain},
		Go: other.run, Close: other.close,
	}, nil
}

// run implements Cluster.Go.
func (c *otherCluster) run(ctx context.Context, loop controllers.ClusterLoop) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	unlink := context.AfterFunc(c.life, cancel)
	ended := make(chan struct{})
	c.process.openClusters.mu.Lock() // close waits only for what run has added before
	open := c.life.Err() == nil
	if open {
		c.loops.Go(func() {
			defer close(ended)
			defer unlink()
			c.process.runLoop(ctx, c.controller, c.name, loop)
		})
	}
	c.process.openClusters.mu.Unlock()
	if !open {
		loop.Close() // without the lock, since it may close another cluster
		return func() {}
	}
	return func() { cancel(); <-ended }
}

// close implements Cluster.Close.
func (c *otherCluster) close() {
	c.process.openClusters.mu.Lock()
	c.end()
	c.process.openClusters.mu.Unlock()
	c.loops.Wait()
	c.release()
}

// freeResources closes what the cluster holds. It does not wait for the loops.
func (c *otherCluster) freeResources() {
	c.end()
	c.events.stop(0)
	c.cache.Shutdown()
	utilnet.CloseIdleConnectionsFor(c.transport)
	c.process.openClusters.mu.Lock()
	defer c.process.openClusters.mu.Unlock()
	delete(c.process.openClusters.all, c.key())
}

// runLoop runs a loop of another cluster until ctx ends, and closes it.
func (p *process) runLoop(ctx context.Context, controller, cluster string, loop controllers.ClusterLoop) {
	defer func() {
		if stack, err := panics.Recover(func() error { loop.Close(); return nil }); stack != nil {
			p.loopMetrics.Panicked(controller)
			klog.Background().Error(err, "Close of a loop panicked",
				"controller", controller, "cluster", cluster, "stack", string(stack))
		}
	}()
	l := &runningLoop{ClusterLoop: loop, controller: controller, cluster: cluster}
	p.openClusters.add(l)
	defer p.openClusters.remove(l)
	// What fails while the loop stops is no news: the cluster may not answer.
	_ = l.runs.keepRunning(ctx, p.loopMetrics, controller, loop.Run, func(err error, stack []byte) {
		// Not the logger of ctx, which may have the key of a reconcile.
		klog.Background().Error(err, "Loop of another cluster stopped unexpectedly, restarting",
			"controller", controller, "cluster", cluster, "delay", restartDelay, "stack", string(stack))
	})
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
	config *rest.Config, controller string, fence func(http.RoundTripper) http.RoundTripper,
) (*rest.Config, error) {
	config = rest.AddUserAgent(rest.CopyConfig(config), controller)
	if !strings.Contains(config.Host, "://") {
		config.Host = "https://" + config.Host
	}
	if config.Proxy == nil { // no proxy, whatever the environment says
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
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
		shared.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(config.QPS, max(config.Burst, 1))
	}
	return shared, nil
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
