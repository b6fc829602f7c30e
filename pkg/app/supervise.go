// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// hostedController is a controller that the manager runs.
type hostedController struct {
	controller controllers.Controller
	name       string
	cache      *informers.ClusterCache
	metrics    *loopmetrics.Metrics
	health     healthz.Check
	restarts   restarts
	clusters   *openClusters

	stuckAfter   time.Duration // how long a reconcile or a drain may take, for the health check
	everyReplica bool
	built        atomic.Bool  // New has returned
	handler      http.Handler // of the paths under /controllers/NAME/; nil if it serves none

	statusPanicked sync.Once // the first panic of Status is logged
	statusCalls    singleflight.Group
}

// newHosted returns a hosted controller without the controller itself. Its health check, its metric and its
// status report the same problems.
func newHosted(
	name string, cache *informers.ClusterCache, clusters *openClusters, m *loopmetrics.Metrics, stuckAfter time.Duration,
) *hostedController {
	h := &hostedController{name: name, cache: cache, clusters: clusters, metrics: m, stuckAfter: stuckAfter}
	h.health = healthz.NamedCheck("controller-"+name, func(*http.Request) error { _, err := h.check(); return err })
	m.AddController(name, func() error { return h.health.Check(nil) })
	return h
}

// check returns the controller's own status, and all reasons why the health check fails. It fails for a stuck
// reconcile, which holds its worker and its key for ever and which nothing else would show.
func (h *hostedController) check() (controllers.Status, error) {
	s, err := h.controllerStatus()
	s.Name = h.name
	if s.Problem != "" {
		err = errors.Join(errors.New(s.Problem), err)
	}
	var stuck error
	if key, age := s.LongestRunning(time.Now()); age > h.stuckAfter {
		stuck = fmt.Errorf("reconciling %s for %s, longer than --controller-stuck-after=%s",
			key, age.Round(time.Second), h.stuckAfter)
	}
	return s, errors.Join(
		stuck, lingers(s, h.stuckAfter), h.restarts.problem(), h.clusters.problem(), h.cache.Problem(h.name), err)
}

// lingers returns an error if loops stay for longer than stuckAfter in a phase in which they do nothing.
// Nothing else shows that all loops of a controller wait for the Background of one of them, or that a loop
// waits for a resource that it follows.
func lingers(s controllers.Status, stuckAfter time.Duration) error {
	does := map[controllers.Phase]string{
		controllers.PhaseSyncing: "has been waiting for its informers", controllers.PhaseDraining: "has been draining"}[s.Phase]
	if age := time.Since(s.PhaseSince); does != "" && !s.PhaseSince.IsZero() && age > stuckAfter {
		return fmt.Errorf("%s for %s, longer than --controller-stuck-after=%s", does, age.Round(time.Second), stuckAfter)
	}
	return nil
}

// Status returns the controller's status, with the restarts and the problem that only the host
// knows.
func (h *hostedController) Status() controllers.Status {
	s, err := h.check()
	h.restarts.report(&s)
	if err != nil {
		s.Problem = err.Error()
	}
	return s
}

// statusTimeout is how long Status of a controller may take. Status may wait for a lock that a reconcile
// holds, and the reconcile may hang.
const statusTimeout = time.Second

// controllerStatus returns the controller's own status, or an error if its Status does not return or panics:
// a scrape and the end of the process must neither wait for Status nor fail.
func (h *hostedController) controllerStatus() (controllers.Status, error) {
	answer := h.statusCalls.DoChan("", func() (any, error) {
		var s controllers.Status
		stack, err := panics.Recover(func() error {
			s = h.controller.Status()
			h.clusters.addStatus(&s, h.stuckAfter)
			return marshalDetails(&s)
		})
		if stack != nil {
			h.metrics.Panicked(h.name)
			h.statusPanicked.Do(func() {
				klog.Background().Error(err, "Status of a controller panicked", "controller", h.name, "stack", string(stack))
			})
			s = controllers.Status{}
		}
		return s, err
	})
	select {
	case a := <-answer:
		if a.Err != nil {
			a.Err = fmt.Errorf("Status: %w", a.Err)
		}
		return a.Val.(controllers.Status), a.Err
	case <-time.After(statusTimeout):
		return controllers.Status{}, fmt.Errorf("Status did not return within %s", statusTimeout)
	}
}

// marshalDetails makes the Details JSON, for which the controller may have a method of its own.
func marshalDetails(s *controllers.Status) error {
	if s.Details == nil {
		return nil
	}
	details, err := json.Marshal(s.Details)
	if s.Details = json.RawMessage(details); err != nil {
		s.Details = nil
		return fmt.Errorf("as JSON, Details: %w", err)
	}
	return nil
}

// withoutPanics returns a handler of a controller's paths that contains the controller's panics.
func (h *hostedController) withoutPanics(handler http.Handler) http.Handler {
	return http.StripPrefix("/controllers/"+h.name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			switch panicked := recover(); panicked {
			case nil:
			case http.ErrAbortHandler:
				panic(panicked) // net/http's own way to end a response
			default:
				h.metrics.Panicked(h.name)
				klog.FromContext(r.Context()).Error(errors.New("panic in a controller's HTTP handler"),
					"HTTP handler of a controller panicked",
					"controller", h.name, "type", fmt.Sprintf("%T", panicked), "stack", string(debug.Stack()))
				http.Error(w, "the controller's handler panicked", http.StatusInternalServerError)
			}
		}()
		handler.ServeHTTP(w, r)
	}))
}

// hostedControllers are the enabled controllers in the order in which they were added.
type hostedControllers []*hostedController

// withEveryReplica returns the controllers that run on every replica, or those that run only on the leader.
func (h hostedControllers) withEveryReplica(everyReplica bool) hostedControllers {
	return slices.DeleteFunc(slices.Clone(h), func(c *hostedController) bool { return c.everyReplica != everyReplica })
}

// start starts the controllers. They stop when ctx ends or the returned function is called, which returns
// when they have drained. If the drain takes longer than timeout, the error wraps election.ErrUnfinished.
func (h hostedControllers) start(ctx context.Context, timeout time.Duration) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	term := lifetime.FromContext(ctx)
	term.Run = ctx               // by which loops in other clusters learn of the drain
	ended := make(chan error, 2) // the first error counts, even if stop is called late
	var drained atomic.Bool
	go func() {
		err := h.run(term.AddTo(ctx))
		drained.Store(true)
		ended <- err
	}()
	giveUp := func() {
		if drained.Load() {
			return
		}
		err := fmt.Errorf("%w: the controllers with EveryReplica did not drain within %s", election.ErrUnfinished, timeout)
		ended <- errors.Join(err, h.unfinished(time.Now()))
	}
	context.AfterFunc(ctx, func() { time.AfterFunc(timeout, giveUp) })
	return func() error { cancel(); return <-ended }
}

// run starts all controllers, and returns when ctx has ended and each of them has drained. The error wraps
// election.ErrUnfinished and names the controllers whose work may go on.
func (h hostedControllers) run(ctx context.Context) error {
	errs := make([]error, len(h))
	atOnce(h, func(i int, c *hostedController) {
		if err := c.supervise(ctx); err != nil {
			errs[i] = fmt.Errorf("controller %s: %w: %w", c.name, election.ErrUnfinished, err)
		}
	})
	<-ctx.Done() // a process without controllers must not exit: it would be restarted for ever
	return errors.Join(errs...)
}

// statuses returns the status of each controller.
func (h hostedControllers) statuses() []controllers.Status {
	all := make([]controllers.Status, len(h))
	atOnce(h, func(i int, c *hostedController) { all[i] = c.Status() })
	return all
}

// releaseClusters releases what the controllers have left open, without waiting for the clusters' loops.
func (h hostedControllers) releaseClusters() {
	atOnce(h, func(_ int, c *hostedController) {
		atOnce(c.clusters.list(), func(_ int, other *otherCluster) { other.release() })
	})
}

// atOnce calls do for all elements at the same time, since a call may take long.
func atOnce[T any](all []T, do func(at int, one T)) {
	var doing sync.WaitGroup
	for i, one := range all {
		doing.Go(func() { do(i, one) })
	}
	doing.Wait()
}

// unfinished returns an error that names the reconciles in flight, and the controllers whose Run goes on
// without one.
func (h hostedControllers) unfinished(now time.Time) error {
	var errs []error
	for i, s := range h.statuses() {
		for _, reconcile := range s.InFlight {
			errs = append(errs, fmt.Errorf("controller %s has been reconciling %s for %s and did not stop",
				s.Name, reconcile.Key, now.Sub(reconcile.Since).Round(time.Second)))
		}
		if len(s.InFlight) == 0 && h[i].restarts.isRunning() {
			errs = append(errs, fmt.Errorf("controller %s did not stop, although it reconciles nothing: "+
				"its Background, the mapping of a watch, or something else in its Run goes on", s.Name))
		}
	}
	return errors.Join(errs...)
}

// ServeHTTP serves the status of all controllers at /debug/controllers/, and one controller's status at
// /debug/controllers/NAME.
func (h hostedControllers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/debug/controllers/")
	asked := slices.DeleteFunc(slices.Clone(h), func(c *hostedController) bool { return name != "" && name != c.name })
	all := map[string]controllers.Status{}
	for _, s := range asked.statuses() {
		all[s.Name] = s
	}
	if name == "" {
		writeJSON(w, all)
	} else if status, ok := all[name]; ok {
		writeJSON(w, status)
	} else {
		http.Error(w, fmt.Sprintf("controller %q is not enabled; see /debug/controllers/", name), http.StatusNotFound)
	}
}

// supervise runs one controller until ctx ends, and starts it again if its Run ends earlier. It returns the
// error of the Run during which ctx ended, and only when the loops in clusters that the controller left open
// have ended too.
func (h *hostedController) supervise(ctx context.Context) error {
	endRun := func() {
		for open := h.clusters.list(); len(open) > 0; open = h.clusters.list() { // a loop may open one while they close
			atOnce(open, func(_ int, c *otherCluster) { c.close() })
		}
		h.cache.EndRun(h.name)
	}
	defer endRun()
	logger := klog.FromContext(ctx).WithValues("controller", h.name) // as in the log of a Loop
	return h.restarts.keepRunning(klog.NewContext(ctx, logger), h.metrics, h.name, h.controller.Run, func(err error, stack []byte) {
		logger.Error(err, "Controller stopped unexpectedly, restarting", "delay", restartDelay, "stack", string(stack))
		endRun()
	})
}
