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
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

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

	everyReplica bool
	handler      http.Handler // of the paths under /controllers/NAME/; nil if it serves none

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
	_, err := h.own()
	return errors.Join(h.runs.problem(), h.cache.Problem(h.name), err)
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

// contained returns a handler of a controller's paths that contains panics, as everything that the
// host calls of a controller.
func (h *hosted) contained(handler http.Handler) http.Handler {
	return http.StripPrefix("/controllers/"+h.name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			switch panicked := recover(); panicked {
			case nil:
			case http.ErrAbortHandler:
				panic(panicked) // net/http's own way to end a response
			default:
				h.loops.Panicked(h.name)
				klog.FromContext(r.Context()).Error(errors.New("panic in a controller's HTTP handler"), "Request failed",
					"controller", h.name, "type", fmt.Sprintf("%T", panicked), "stack", string(debug.Stack()))
				http.Error(w, "the controller's handler panicked", http.StatusInternalServerError)
			}
		}()
		handler.ServeHTTP(w, r)
	}))
}

// hostedControllers are the enabled controllers in the order of the registry.
type hostedControllers []*hosted

// newControllers builds the enabled controllers. The error names every controller that cannot be
// built.
func newControllers(
	o *Options, c *clients, scheme *runtime.Scheme, e *events, cache *informers.Factory,
	registry metrics.KubeRegistry, loops *controllers.Metrics, enabled []controllers.Entry,
) (hostedControllers, error) {
	var all hostedControllers
	var errs []error
	for _, entry := range enabled {
		var handler http.Handler
		host, err := newHost(o, c, scheme, e, cache, registry, loops, entry, func(h http.Handler) {
			if h == nil || handler != nil {
				panic(controllers.Mistake("calls Host.Handle with nil or twice"))
			}
			handler = h
		})
		if err != nil {
			return nil, err
		}
		controller, err := newController(entry, host)
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", entry.Name, err))
			continue
		}
		h := newHosted(entry.Name, controller, cache, loops, o.Generic.ControllerStuckAfter)
		h.everyReplica = entry.EveryReplica
		if handler != nil {
			h.handler = h.contained(handler)
		}
		all = append(all, h)
	}
	return all, errors.Join(errs...)
}

// on returns those that run on every replica, or those that run only on the one that leads.
func (cs hostedControllers) on(everyReplica bool) (some hostedControllers) {
	for _, c := range cs {
		if c.everyReplica == everyReplica {
			some = append(some, c)
		}
	}
	return some
}

// runOnEveryReplica starts those that run on every replica. They stop when ctx ends or the returned
// function is called, which returns when they have drained. If they have not in the given time from
// then on, the error wraps election.ErrUnfinished.
func (cs hostedControllers) runOnEveryReplica(ctx context.Context, interval, drain time.Duration) (stop func() error) {
	some := cs.on(true)
	if len(some) == 0 {
		return func() error { return nil }
	}
	ctx, cancel := context.WithCancel(ctx)
	drained := make(chan error, 1)
	go func() { drained <- some.run(ctx, interval) }()
	late := make(chan struct{})
	context.AfterFunc(ctx, func() { time.AfterFunc(drain, func() { close(late) }) })
	return func() error {
		cancel()
		select {
		case err := <-drained:
			return err
		case <-late:
			return errors.Join(fmt.Errorf("%w: the controllers of every replica did not drain within %s", election.ErrUnfinished, drain),
				some.unfinished(time.Now()))
		}
	}
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

// unfinished returns an error that names what is being reconciled at now, or nil.
func (cs hostedControllers) unfinished(now time.Time) error {
	var errs []error
	for _, c := range cs {
		s, _ := c.own()
		for _, in := range s.InFlight {
			errs = append(errs, fmt.Errorf("controller %s did not end reconciling %s, for %s now", c.name, in.Key, now.Sub(in.Since).Round(time.Second)))
		}
	}
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
