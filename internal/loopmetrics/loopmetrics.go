// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package loopmetrics has the metrics of loops and controllers. The manager makes them, and hands them to
// loops in controllers.LoopOptions.
package loopmetrics

import (
	"sync"
	"time"

	"k8s.io/component-base/metrics"
)

// The results of a reconcile, as they are in the metric's label.
const (
	Success    = "success"
	Requeue    = "requeue"
	Conflict   = "conflict"
	Error      = "error"
	Terminal   = "terminal_error"
	NotLeading = "not_leading"
	Panic      = "panic"
)

// Results are all results.
var Results = []string{Success, Requeue, Conflict, Error, Terminal, NotLeading, Panic}

// Loop has the labels of a loop's series.
type Loop struct{ Controller, Name, Cluster string }

// Metrics holds the metrics of all controllers of a process: the loop's and the host's. Depth, latency and
// retries of the queues come from client-go's workqueue provider.
type Metrics struct {
	reconciles *metrics.CounterVec
	duration   *metrics.HistogramVec
	panics     *metrics.CounterVec
	restarts   *metrics.CounterVec
	longest    *computedGauge
	problem    *computedGauge
}

// New registers the metrics with reg. It panics if they are registered already.
func New(reg metrics.KubeRegistry) *Metrics {
	m := &Metrics{
		reconciles: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_reconciles_total",
			Help:           "Reconciles by controller, loop and result (success, requeue, conflict, error, terminal_error, not_leading, panic).",
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller", "loop", "cluster", "result"}),
		duration: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Name:           "quartermaster_controller_reconcile_duration_seconds",
			Help:           "Time a reconcile took, by controller and loop.",
			Buckets:        []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60},
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller", "loop", "cluster"}),
		panics: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_panics_total",
			Help:           "Panics recovered in a controller's functions, by controller.",
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller"}),
		restarts: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_restarts_total",
			Help:           "Restarts of a controller that stopped unexpectedly, by controller.",
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller"}),
		longest: newComputedGauge("quartermaster_controller_longest_running_reconcile_seconds",
			"Age of the oldest reconcile in flight, by controller and loop; 0 if none is.", "controller", "loop", "cluster"),
		problem: newComputedGauge("quartermaster_controller_problem",
			"1 while the health check of the controller fails, else 0, by controller.", "controller"),
	}
	reg.MustRegister(m.reconciles, m.duration, m.panics, m.restarts)
	reg.CustomMustRegister(m.longest)
	reg.CustomMustRegister(m.problem)
	return m
}

// AddLoop initialises the series of a loop to zero, so that rates and alerts work from the first scrape. It
// returns false if another loop has these series.
func (m *Metrics) AddLoop(l Loop, longest func() time.Duration) bool {
	if !m.longest.add(l.Controller, l.Name, l.Cluster, func() float64 { return longest().Seconds() }) {
		return false
	}
	for _, result := range Results {
		m.reconciles.WithLabelValues(l.Controller, l.Name, l.Cluster, result).Add(0)
	}
	m.duration.WithLabelValues(l.Controller, l.Name, l.Cluster)
	m.panics.WithLabelValues(l.Controller).Add(0)
	return true
}

// RemoveLoop ends the series of a loop.
func (m *Metrics) RemoveLoop(l Loop) {
	for _, result := range Results {
		m.reconciles.Delete(map[string]string{"controller": l.Controller, "loop": l.Name, "cluster": l.Cluster, "result": result})
	}
	m.duration.Delete(map[string]string{"controller": l.Controller, "loop": l.Name, "cluster": l.Cluster})
	m.longest.remove(l.Controller, l.Name, l.Cluster)
}

// Observe counts a reconcile.
func (m *Metrics) Observe(l Loop, result string, took time.Duration) {
	m.reconciles.WithLabelValues(l.Controller, l.Name, l.Cluster, result).Inc()
	m.duration.WithLabelValues(l.Controller, l.Name, l.Cluster).Observe(took.Seconds())
}

// AddController creates the series of a controller: its restarts and panics, and whether its health check
// fails. It calls problem at each scrape; an error means that the check fails.
func (m *Metrics) AddController(controller string, problem func() error) {
	m.restarts.WithLabelValues(controller).Add(0)
	m.panics.WithLabelValues(controller).Add(0)
	m.problem.add(controller, "", "", func() float64 {
		if problem() != nil {
			return 1
		}
		return 0
	})
}

// Restarted counts a Run that ended unexpectedly.
func (m *Metrics) Restarted(controller string) { m.restarts.WithLabelValues(controller).Inc() }

// Panicked counts a panic that was recovered in any function of a controller.
func (m *Metrics) Panicked(controller string) { m.panics.WithLabelValues(controller).Inc() }

// computedGauge computes its values at the scrape. A gauge that workers set would stand still when a
// reconcile hangs.
type computedGauge struct {
	metrics.BaseStableCollector
	desc   *metrics.Desc
	labels int
	values sync.Map // of func() float64, by [3]string: controller, loop and cluster
}

func newComputedGauge(name, help string, labels ...string) *computedGauge {
	return &computedGauge{desc: metrics.NewDesc(name, help, labels, nil, metrics.ALPHA, ""), labels: len(labels)}
}

// add returns false if there is a value with these labels.
func (c *computedGauge) add(controller, loop, cluster string, value func() float64) bool {
	_, exists := c.values.LoadOrStore([3]string{controller, loop, cluster}, value)
	return !exists
}

func (c *computedGauge) remove(controller, loop, cluster string) {
	c.values.Delete([3]string{controller, loop, cluster})
}

// DescribeWithStability implements metrics.StableCollector.
func (c *computedGauge) DescribeWithStability(ch chan<- *metrics.Desc) { ch <- c.desc }

// CollectWithStability implements metrics.StableCollector.
func (c *computedGauge) CollectWithStability(ch chan<- metrics.Metric) {
	var computing sync.WaitGroup
	for key, value := range c.values.Range { // at once, since a value may wait for a controller
		computing.Go(func() {
			labels := key.([3]string)
			ch <- metrics.NewLazyConstMetric(c.desc, metrics.GaugeValue, value.(func() float64)(), labels[:c.labels]...)
		})
	}
	computing.Wait()
}
