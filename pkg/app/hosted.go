// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
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
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// hosted is a controller that the manager runs.
type hosted struct {
	controllers.Controller
	name   string
	cache  *informers.Factory
	loops  *controllers.Metrics
	health healthz.Check
	runs   runs

	statusPanicked sync.Once // the first panic of Status is logged
}

// newHosted returns c as a hosted controller. Its health check, its metric and its status report
// the same problems.
func newHosted(
	name string, c controllers.Controller, cache *informers.Factory, loops *controllers.Metrics, stuckAfter time.Duration,
) *hosted {
	h := &hosted{Controller: c, name: name, cache: cache, loops: loops}
	h.health = healthz.Controller(name, h, stuckAfter)
	loops.Hosted(name, func() error { return h.health.Check(nil) })
	return h
}

// Problem implements healthz.Worker.
func (h *hosted) Problem() error {
	s, err := h.own()
	errs := []error{h.runs.problem(), h.cache.Problem(h.name), err}
	if n := s.Unmapped; n > 0 {
		errs = append(errs, fmt.Errorf("the events of %d object(s) cannot be mapped to keys; they are tried again, and the log names them", n))
	}
	return errors.Join(errs...)
}

// LongestRunning implements healthz.Worker.
func (h *hosted) LongestRunning(now time.Time) (string, time.Duration) {
	s, _ := h.own() // Problem has the error
	return s.LongestRunning(now)
}

// Status returns the controller's status, with the restarts and the problem that only the host
// knows.
func (h *hosted) Status() controllers.Status {
	s, _ := h.own() // Problem has the error
	h.runs.report(&s)
	if err := h.health.Check(nil); err != nil {
		s.Problem = err.Error()
	}
	return s
}

// own returns the controller's own status. If that panics, it returns an error: a scrape, which asks
// for it in a goroutine of the metrics library, must not end the process.
func (h *hosted) own() (s controllers.Status, err error) {
	stack, err := controllers.Contain(func() error { s = h.Controller.Status(); return nil })
	if stack == nil {
		return s, nil
	}
	h.loops.Panicked(h.name)
	h.statusPanicked.Do(func() {
		klog.Background().Error(err, "Status of a controller panicked", "controller", h.name, "stack", string(stack))
	})
	return controllers.Status{Name: h.name}, fmt.Errorf("its status: %w", err)
}

// hostedControllers are the enabled controllers in the order of the registry.
type hostedControllers []*hosted

// newControllers builds the enabled controllers. The error names every controller that cannot be
// built.
func newControllers(
	o *Options, c *clients, scheme *runtime.Scheme, e *events, cache *informers.Factory,
	registry metrics.KubeRegistry, loops *controllers.Metrics, enabled []Entry,
) (hostedControllers, error) {
	var all hostedControllers
	var errs []error
	for _, entry := range enabled {
		config := c.controller(entry.Name)
		client, err := c.typed(config)
		if err != nil {
			return nil, fmt.Errorf("client of controller %s: %w", entry.Name, err)
		}
		controller, err := entry.build(Host{
			Informer: func(resource schema.GroupVersionResource) toolscache.SharedIndexInformer {
				return entry.informer(cache, resource)
			},
			LiveVersion: cache.LiveVersion,
			Follow: func(ctx context.Context, need informers.Need, lists chan struct{}, handler toolscache.ResourceEventHandler) (*informers.Following, error) {
				need.For = entry.Name
				return cache.Follow(ctx, need, lists, handler)
			},
			Client:     client,
			RESTConfig: config,
			Scheme:     scheme,
			Events:     e.recorder("quartermaster-" + entry.Name),
			Clock:      clock.RealClock{},
			Loops:      loops,
			Metrics:    registry,
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", entry.Name, err))
			continue
		}
		all = append(all, newHosted(entry.Name, controller, cache, loops, o.Generic.ControllerStuckAfter))
	}
	return all, errors.Join(errs...)
}

// run starts all controllers, interval apart, and returns when ctx has ended and each of them has
// drained. The error wraps election.ErrUnfinished and names the controllers whose work may go on.
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
	<-ctx.Done() // also without any controller: a process that exits is restarted for ever
	wg.Wait()
	return errors.Join(errs...)
}

// ServeHTTP serves the status of all controllers at /debug/controllers/, and that of one at
// /debug/controllers/NAME.
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
