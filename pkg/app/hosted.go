// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// hosted is a controller as the registry knows it.
type hosted struct {
	controllers.Controller
	name  string
	cache *informers.Factory
}

// Problem implements healthz.Worker.
func (h hosted) Problem() error { return h.cache.Problem(h.name) }

// LongestRunning implements healthz.Worker.
func (h hosted) LongestRunning(now time.Time) (string, time.Duration) {
	return h.Status().LongestRunning(now)
}

// hostedControllers are the enabled controllers in the order of the registry.
type hostedControllers []hosted

// newControllers builds the enabled controllers.
func newControllers(o *Options, c *clients, scheme *runtime.Scheme, e *events, cache *informers.Factory, registry metrics.KubeRegistry, loops *controllers.Metrics, enabled []Entry) (hostedControllers, error) {
	var all hostedControllers
	for _, entry := range enabled {
		config := c.controller(entry.Name)
		client, err := c.typed(config)
		if err != nil {
			return nil, fmt.Errorf("client of controller %s: %w", entry.Name, err)
		}
		controller, err := entry.New(Host{
			Informer: func(resource schema.GroupVersionResource) toolscache.SharedIndexInformer {
				return mustHave(cache, entry.Name, resource)
			},
			LiveVersion: cache.LiveVersion,
			Client:      client,
			RESTConfig:  config,
			Scheme:      scheme,
			Events:      e.recorder("quartermaster-" + entry.Name),
			Clock:       clock.RealClock{},
			Loops:       loops,
			Metrics:     registry,
		})
		if err != nil {
			return nil, fmt.Errorf("controller %s: %w", entry.Name, err)
		}
		all = append(all, hosted{controller, entry.Name, cache})
	}
	return all, nil
}

// mustHave panics when an entry asks for an informer that it has not declared: a mistake of the program, and New of
// every controller runs at every start.
func mustHave(cache *informers.Factory, controller string, resource schema.GroupVersionResource) toolscache.SharedIndexInformer {
	informer, ok := cache.Informer(controller, resource)
	if !ok {
		panic(fmt.Sprintf("controller %s asks for %s, which its entry does not declare in Needs", controller, resource))
	}
	return informer
}

// run runs all controllers until ctx ends and each of them has drained. They start interval apart. An error, which
// wraps election.ErrUnfinished, is about controllers whose work may go on.
func (cs hostedControllers) run(ctx context.Context, interval time.Duration) error {
	errs := make([]error, len(cs))
	var wg sync.WaitGroup
	for i, c := range cs {
		if i > 0 && !sleep(ctx, interval) {
			break
		}
		wg.Go(func() {
			if err := c.supervise(ctx); err != nil {
				errs[i] = fmt.Errorf("controller %s: %w: %w", c.name, election.ErrUnfinished, err)
			}
		})
	}
	<-ctx.Done() // with no controller enabled, too: to end would be to be restarted again and again
	wg.Wait()
	return errors.Join(errs...)
}

// Restarting a controller that returned on its own waits this long, twice as long each time.
const (
	restartDelay    = time.Second
	restartDelayMax = time.Minute
)

// logInFlight names the reconciles that have not ended, after a drain that took too long.
func (cs hostedControllers) logInFlight(logger klog.Logger) {
	for _, c := range cs {
		for _, in := range c.Status().InFlight {
			logger.Info("Cutting off a reconcile that has not ended", "controller", c.name, "key", in.Key, "since", in.Since)
		}
	}
}

// supervise runs one controller until ctx ends. One that returns before, or panics outside of a reconcile, is started
// again: it must not take the others down.
func (h hosted) supervise(ctx context.Context) error {
	logger := klog.LoggerWithName(klog.FromContext(ctx), h.name)
	ctx = klog.NewContext(ctx, logger)
	for delay := restartDelay; ; delay = min(2*delay, restartDelayMax) {
		err := h.runRecovered(ctx)
		if ctx.Err() != nil {
			return err
		}
		logger.Error(err, "Controller stopped unexpectedly, restarting", "delay", delay)
		if !sleep(ctx, delay) {
			return nil
		}
	}
}

func (h hosted) runRecovered(ctx context.Context) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return h.Run(ctx)
}

// sleep waits for d and answers true, or false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// ServeHTTP serves /debug/controllers/: all of them, or the one whose name follows.
func (cs hostedControllers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/debug/controllers/")
	all := map[string]controllers.Status{}
	for _, c := range cs {
		all[c.name] = c.Status()
	}
	if name == "" {
		writeJSON(w, all)
	} else if status, ok := all[name]; ok {
		writeJSON(w, status)
	} else {
		http.Error(w, fmt.Sprintf("controller %q is not enabled; see /debug/controllers/", name), http.StatusNotFound)
	}
}
