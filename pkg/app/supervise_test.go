// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/pkg/internal/panics"
)

// scripted is a controller whose nth run calls the nth function. Further runs call the last one.
type scripted struct {
	runs  []func(context.Context) error
	begun time.Time

	mu     sync.Mutex
	starts []time.Duration // since begun
	status controllers.Status
	panics bool          // in Status
	locked chan struct{} // Status waits until it is closed, if it is set
}

func (s *scripted) Run(ctx context.Context) error {
	s.mu.Lock()
	run := s.runs[min(len(s.starts), len(s.runs)-1)]
	s.starts = append(s.starts, time.Since(s.begun))
	s.mu.Unlock()
	return run(ctx)
}

func (s *scripted) Status() controllers.Status {
	if s.panics {
		panic("hunter2")
	}
	if s.locked != nil {
		<-s.locked
	}
	return s.status
}

// inBubble runs a row of a table in a bubble of fake time.
func inBubble(t *testing.T, name string, row func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, row) })
}

func untilTheEnd(ctx context.Context) error { <-ctx.Done(); return nil }

func failsAfter(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
		return errors.New("out of luck")
	}
}

// host returns a hosted controller with an empty cache.
func host(t *testing.T, runs ...func(context.Context) error) (*hosted, *scripted, metrics.KubeRegistry) {
	t.Helper()
	registry := metrics.NewKubeRegistry()
	c := &scripted{runs: runs, begun: time.Now(), status: controllers.Status{Name: "x"}}
	return newHosted("x", c, &informers.ClusterCache{}, controllers.NewMetrics(registry), time.Minute), c, registry
}

// series compares a metric of the controller with want.
func series(t *testing.T, registry metrics.KubeRegistry, name string, want float64) {
	t.Helper()
	families, err := registry.Gather()
	must(t, err)
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if got := m.GetCounter().GetValue() + m.GetGauge().GetValue(); testutil.LabelsMatch(m, map[string]string{"controller": "x"}) && got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		return
	}
	t.Errorf("there is no metric %s", name)
}

func TestRestartsShowUntilARunHasLasted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		returns := func(context.Context) error { return nil }
		panicsWith := func(context.Context) error { panic(panics.Mistake("asks for secrets")) }
		h, c, registry := host(t, failsAfter(0), returns, panicsWith, untilTheEnd)
		var named atomic.Int32 // lines that name the controller as the lines of a Loop do
		logger := funcr.New(func(_, line string) { named.Add(int32(strings.Count(line, `"controller"="x"`))) }, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		done := make(chan error)
		go func() { done <- h.supervise(ctx) }()
		pass := func(d time.Duration) { <-time.After(d); synctest.Wait() }
		is := func(when string, healthy bool) {
			t.Helper()
			err := h.health.Check(nil)
			if (err == nil) != healthy {
				t.Errorf("%s: %v", when, err)
			}
			if err != nil && !strings.Contains(err.Error(), "stopped unexpectedly") {
				t.Errorf("%s: the reason is %v", when, err)
			}
			if shown := h.Status().Problem; (shown == "") != healthy {
				t.Errorf("%s: the status shows %q", when, shown)
			}
			value := 1.0
			if healthy {
				value = 0
			}
			series(t, registry, "quartermaster_controller_problem", value)
		}
		pass(500 * time.Millisecond)
		is("while it waits for the first restart", false)
		pass(time.Minute)
		is("a minute after the last restart", false)
		if e := h.Status().LastError; e == nil || e.Key != "Run" || e.Text != "panic: asks for secrets" {
			t.Errorf("last error %+v", e)
		}
		pass(healthyRun)
		is("when it has run for a while", true)
		same(t, "starts", []time.Duration{0, restartDelay, 2 * restartDelay, 3 * restartDelay}, c.starts)
		same(t, "restarts in the status", 3, h.Status().Restarts)
		series(t, registry, "quartermaster_controller_restarts_total", 3)
		series(t, registry, "quartermaster_controller_panics_total", 1)
		cancel()
		must(t, <-done)
		if n := named.Load(); n != 3 {
			t.Errorf("%d lines of the log name the controller, want one of each restart", n)
		}
	})
}

func TestHealthCheckSaysTheProblem(t *testing.T) {
	reconcilingFor := func(age time.Duration) func(*scripted) {
		return func(c *scripted) {
			c.status.InFlight = []controllers.InFlight{{Key: "shop/web", Since: time.Now().Add(-age)}}
		}
	}
	for name, tc := range map[string]struct {
		of   func(*scripted)
		want string // "" for none
	}{
		"no reconcile":                        {func(*scripted) {}, ""},
		"a reconcile within the limit":        {reconcilingFor(30 * time.Second), ""},
		"a reconcile that is over the limit":  {reconcilingFor(2 * time.Minute), "reconciling shop/web for 2m0s, longer than --controller-stuck-after=1m0s"},
		"a problem that the controller knows": {func(c *scripted) { c.status.Problem = "the API server refuses" }, "the API server refuses"},
		"a status that panics":                {func(c *scripted) { c.panics = true }, "Status returned an error: panic: a value of type string"},
	} {
		inBubble(t, name, func(t *testing.T) {
			h, c, registry := host(t, untilTheEnd)
			tc.of(c)
			value := 0.0
			if tc.want != "" {
				value = 1
			}
			series(t, registry, "quartermaster_controller_problem", value) // a scrape
			if err := h.health.Check(nil); (err == nil) != (tc.want == "") || err != nil && err.Error() != tc.want {
				t.Errorf("check: %v", err)
			}
			if got := h.Status(); got.Problem != tc.want || got.Name != "x" {
				t.Errorf("status %+v", got)
			}
			c.panics, c.status = false, controllers.Status{}
			series(t, registry, "quartermaster_controller_problem", 0)
		})
	}
}

func TestStatusThatHangsHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, c, registry := host(t, untilTheEnd)
		c.locked = make(chan struct{})
		began, scraped := time.Now(), make(chan struct{})
		go func() { defer close(scraped); series(t, registry, "quartermaster_controller_problem", 1) }()
		synctest.Wait()
		h.metrics.AddController("another", func() error { return nil })
		if took := time.Since(began); took > 0 {
			t.Errorf("another controller waited for %v", took)
		}
		<-scraped
		for range 3 {
			if err := h.health.Check(nil); err == nil || !strings.Contains(err.Error(), "Status did not return within") {
				t.Errorf("problem %v", err)
			}
			_ = hostedControllers{h}.unfinished(time.Now())
			_ = h.Status()
			hostedControllers{h}.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/debug/controllers/other", nil))
		}
		same(t, "time taken", (1+3*3)*statusTimeout, time.Since(began))
		close(c.locked)
		synctest.Wait()
		series(t, registry, "quartermaster_controller_problem", 0)
	})
}

func TestDrainThatFailsSaysSo(t *testing.T) {
	for name, tc := range map[string]struct {
		run  func(context.Context) error
		want bool
	}{
		"a controller that drains":                           {untilTheEnd, false},
		"a controller that waits for its restart":            {failsAfter(0), false},
		"a controller that returns the error of its context": {func(ctx context.Context) error { <-ctx.Done(); return fmt.Errorf("run: %w", ctx.Err()) }, false},
		"a controller that returns the cause of its end":     {func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }, false},
		"a controller that returns an error":                 {func(ctx context.Context) error { <-ctx.Done(); return errors.New("gave up") }, true},
		"a controller that panics as it drains":              {func(ctx context.Context) error { <-ctx.Done(); panic("x") }, true},
	} {
		inBubble(t, name, func(t *testing.T) {
			h, _, _ := host(t, tc.run)
			fine, _, _ := host(t, untilTheEnd)
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errors.New("told to end")) })
			err := hostedControllers{fine, h}.run(ctx)
			if got := errors.Is(err, election.ErrUnfinished); got != tc.want {
				t.Errorf("run returned %v", err)
			}
		})
	}
}

// slowSink takes two seconds for each Event, or fails at once.
type slowSink struct {
	err error

	mu       sync.Mutex
	received []string
}

func (s *slowSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if s.err != nil {
		return nil, s.err
	}
	<-time.After(2 * time.Second)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received = append(s.received, event.Reason)
	return event, nil
}

func (s *slowSink) Update(event *corev1.Event) (*corev1.Event, error)          { return event, nil }
func (s *slowSink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) { return event, nil }

func TestEventsAreSentBeforeTheEnd(t *testing.T) {
	for name, tc := range map[string]struct {
		sink  *slowSink
		count int
		want  []string
		takes time.Duration
	}{
		"without any Event nothing is waited for":      {&slowSink{}, 0, nil, 0},
		"what was recorded is sent":                    {&slowSink{}, 1, []string{"R0"}, 2 * time.Second},
		"what takes too long is given up":              {&slowSink{}, 9, []string{"R0"}, eventsFlushTimeout},
		"an API server that is away is not waited for": {&slowSink{err: errors.New("away")}, 2, nil, eventsFlushTimeout},
	} {
		inBubble(t, name, func(t *testing.T) {
			scheme, err := NewScheme(nil)
			must(t, err)
			e := recordTo(t.Context(), tc.sink, scheme)
			recorder := e.recorder("test")
			for i := range tc.count {
				recorder.Event(&corev1.ConfigMap{}, corev1.EventTypeNormal, fmt.Sprintf("R%d", i), "")
			}
			begin := time.Now()
			e.stop()
			same(t, "time that the end took", tc.takes, time.Since(begin))
			tc.sink.mu.Lock()
			same(t, "sent", tc.want, tc.sink.received)
			tc.sink.mu.Unlock()
			<-time.After(time.Minute) // until what was on its way has ended
		})
	}
}
