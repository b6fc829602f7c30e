// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const leaseName = "test"

// buildPrefix begins the names of builds, which are unique in a process. No - follows in them.
const buildPrefix = "test-"

// replica is a running manager.
type replica struct {
	host        *Host
	registry    metrics.Gatherer
	controllers map[string]controllers.Controller
	handlers    map[string]http.Handler
	deposed     bool   // its error is expected
	end         func() // once
}

// start starts a manager.
func (h *Host) start() *replica {
	h.t.Helper()
	r := &replica{host: h, controllers: map[string]controllers.Controller{}, handlers: map[string]http.Handler{}}
	var entries []controllers.Entry
	for _, e := range h.entries {
		entries = append(entries, r.recorded(e))
	}
	o, err := app.NewOptions(app.With(entries...), app.Named(buildPrefix+rand.String(10)))
	if err != nil {
		h.t.Fatal(err)
	}
	o.Client.RESTConfig = h.network.config()
	o.Client.ContentType = runtime.ContentTypeJSON
	o.Election.LeaderElect = h.setup.Standby
	o.Election.ResourceName = leaseName
	o.ElectionClock = bubbleClock(time.Now())
	// With these long durations, an hour of the bubble's clock costs few requests.
	o.Election.LeaseDuration.Duration, o.Election.RenewDeadline.Duration, o.Election.RetryPeriod.Duration = time.Minute, 40*time.Second, 10*time.Second
	o.Secure.BindPort, o.Insecure.Port = 0, 0
	if err := errors.Join(o.Parse(h.setup.Flags), o.Check()); err != nil {
		h.t.Fatal(err)
	}
	if h.leader == nil {
		h.readEntries(o.Settings())
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), h.logger))
	ended := make(chan error, 1)
	go func() { ended <- app.Run(ctx, o) }()
	h.Settle()
	select {
	case err := <-ended:
		cancel()
		h.t.Fatalf("the manager did not start: %v", err)
	default:
	}
	r.end = sync.OnceFunc(func() {
		cancel()
		err := <-ended
		if lost := (*election.LostError)(nil); r.deposed && errors.As(err, &lost) && err.Error() == lost.Error() {
			err = nil // the fence has ended the term, and controllers that do not end would add errors
		}
		if err != nil {
			h.t.Errorf("the manager ended with an error: %v", err)
		}
		for _, e := range entries {
			if n, err := r.metric("quartermaster_controller_panics_total", "controller", e.Name); err != nil || n > 0 {
				h.t.Errorf("controller %s panicked %v times; the log has the stacks", e.Name, n)
			}
		}
	})
	return r
}

// bubbleClock is the clock of the test's bubble.
type bubbleClock time.Time

// Now implements protocol.Clock.
func (c bubbleClock) Now() time.Duration { return time.Since(time.Time(c)) }

// stop stops a manager that has started, and returns when it has ended.
func (r *replica) stop() {
	if r != nil {
		r.end()
	}
}

// recorded returns the entry, on by default, with a New that also records its metrics, handler and controller
// in r.
func (r *replica) recorded(e controllers.Entry) controllers.Entry {
	e.OffByDefault = false
	if build := e.New; build != nil {
		e.New = func(h controllers.Host) (controllers.Controller, error) {
			open := h.Cluster
			h.Cluster = func(name string, config *rest.Config) (*controllers.Cluster, error) {
				return r.host.openCluster(open, name, config)
			}
			handle := h.Handle
			h.Handle = func(handler http.Handler) {
				handle(handler)
				r.handlers[e.Name] = handler
			}
			c, err := build(h)
			r.registry, r.controllers[e.Name] = h.Metrics.(metrics.Gatherer), c
			return c, err
		}
	}
	return e
}

// readEntries notes what the entries are granted. It fails the test if ClusterScoped of a Need is wrong. The
// manager reports other mistakes.
func (h *Host) readEntries(settings controllers.Settings) {
	h.t.Helper()
	for _, e := range h.entries {
		var needs []informers.Need
		if e.Needs != nil {
			needs, _ = e.Needs(settings)
		}
		h.granted[e.Name], _ = app.GrantsOf(e, settings, needs)
		for _, n := range needs {
			if namespaced, known := h.server.Namespaced(n.Resource); known && namespaced == n.ClusterScoped {
				h.t.Fatalf("controller %s: the objects of %s have no namespace, so ClusterScoped must be set where it needs them, and only there", e.Name, n.Resource.GroupResource())
			}
		}
	}
}

// Metric returns the sum of the leader's series of a metric that have these labels, given as names and
// values; for a histogram, the number of observations.
func (h *Host) Metric(name string, labels ...string) float64 {
	h.t.Helper()
	sum, err := h.leader.metric(name, labels...)
	if err != nil {
		h.t.Error(err)
	}
	return sum
}

func (r *replica) metric(name string, labels ...string) (sum float64, err error) {
	want := map[string]string{}
	for i := 0; i < len(labels); i += 2 {
		want[labels[i]] = labels[i+1]
	}
	families, err := r.registry.Gather()
	found := false
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == name && testutil.LabelsMatch(m, want) {
				found = true
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	if !found && err == nil {
		err = fmt.Errorf("there is no series of %s with %v", name, want)
	}
	return sum, err
}

// Controller returns the controller that New of that entry has returned, in the replica that leads.
func (h *Host) Controller(name string) controllers.Controller { return h.leader.controllers[name] }

// Handler returns the handler that New of that entry has passed to Host.Handle, in the replica that leads, or
// nil if there is none. The paths of its requests begin with the slash after /controllers/NAME.
func (h *Host) Handler(name string) http.Handler { return h.leader.handlers[name] }
