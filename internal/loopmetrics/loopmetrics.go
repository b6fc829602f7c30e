// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package loopmetrics has the metrics of loops and controllers. The manager makes them, and hands them to
// loops in controllers.LoopOptions.
package loopmetrics

import (
	"path"
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
	CutOff     = "cut_off" // an error after the host has ended the reconcile's context
)

// Results are all results.
var Results = []string{Success, Requeue, Conflict, Error, Terminal, NotLeading, Panic, CutOff}

// Loop has the labels of a loop's series.
type Loop struct{ Controller, Name, Cluster string }

// String returns the label name of the queue's series: CONTROLLER/LOOP@CLUSTER, without what is empty.
func (l Loop) String() string {
	name := path.Join(l.Controller, l.Name)
	if l.Cluster != "" {
		name += "@" + l.Cluster
	}
	return name
}

// Metrics holds the metrics of all controllers of a process: the loop's and the host's. The metrics of queues
// have the names and the help of component-base, since dashboards know these, and an author's controller may
// have a queue of client-go's.
type Metrics struct {
	reconciles *metrics.CounterVec
	duration   *metrics.HistogramVec
	panics     *metrics.CounterVec
	restarts   *metrics.CounterVec
	longest    *computedGauge
	failing    *computedGauge
	blocked    *computedGauge
	toReplay   *computedGauge
	problem    *computedGauge
	depth      *computedGauge
	adds       *metrics.CounterVec
	retries    *metrics.CounterVec
	waits      *metrics.HistogramVec
}

// New registers the metrics with reg. It panics if they are registered already.
func New(reg metrics.KubeRegistry) *Metrics {
	m := &Metrics{
		reconciles: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_reconciles_total",
			Help:           "Reconciles by controller, loop and result (success, requeue, conflict, error, terminal_error, not_leading, panic, cut_off).",
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
			"Age of the oldest reconcile in flight, by controller and loop; 0 if none is.", metrics.ALPHA, "controller", "loop", "cluster"),
		failing: newComputedGauge("quartermaster_controller_failing_keys",
			"Number of keys whose last reconcile has failed, by controller and loop.", metrics.ALPHA, "controller", "loop", "cluster"),
		blocked: newComputedGauge("quartermaster_controller_blocked_keys",
			"Number of keys that wait until a cache has their namespace or object, or this replica leads, by controller and loop.",
			metrics.ALPHA, "controller", "loop", "cluster"),
		toReplay: newComputedGauge("quartermaster_controller_objects_to_replay",
			"Number of cached objects that a new leader has yet to put into the queue, by controller and loop.", metrics.ALPHA, "controller", "loop", "cluster"),
		problem: newComputedGauge("quartermaster_controller_problem",
			"1 while the health check of the controller fails, else 0, by controller.", metrics.ALPHA, "controller"),
		depth: newComputedGauge("workqueue_depth", "Current depth of workqueue", metrics.BETA, "name"),
		adds: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "workqueue_adds_total",
			Help:           "Total number of adds handled by workqueue",
			StabilityLevel: metrics.BETA,
		}, []string{"name"}),
		retries: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "workqueue_retries_total",
			Help:           "Total number of retries handled by workqueue",
			StabilityLevel: metrics.BETA,
		}, []string{"name"}),
		waits: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Name:           "workqueue_queue_duration_seconds",
			Help:           "How long in seconds an item stays in workqueue before being requested.",
			Buckets:        metrics.ExponentialBuckets(10e-9, 10, 10),
			StabilityLevel: metrics.BETA,
		}, []string{"name"}),
	}
	reg.MustRegister(m.reconciles, m.duration, m.panics, m.restarts, m.adds, m.retries, m.waits)
	reg.CustomMustRegister(m.depth)
	reg.CustomMustRegister(m.longest)
	reg.CustomMustRegister(m.failing)
	reg.CustomMustRegister(m.blocked)
	reg.CustomMustRegister(m.toReplay)
	reg.CustomMustRegister(m.problem)
	return m
}

// Now is the present state of a loop.
type Now struct {
	Depth, Failing, Blocked, ToReplay int
	Longest                           time.Duration // age of the oldest reconcile in flight
}

// AddLoop initialises the series of a loop to zero, so that rates and alerts work from the first scrape. It
// returns false if another loop has these series, or a name of the same text. now is called at each scrape.
func (m *Metrics) AddLoop(l Loop, now func() Now) bool {
	if !m.depth.add(l.String(), "", "", func() float64 { return float64(now().Depth) }) {
		return false
	}
	m.longest.add(l.Controller, l.Name, l.Cluster, func() float64 { return now().Longest.Seconds() })
	m.failing.add(l.Controller, l.Name, l.Cluster, func() float64 { return float64(now().Failing) })
	m.blocked.add(l.Controller, l.Name, l.Cluster, func() float64 { return float64(now().Blocked) })
	m.toReplay.add(l.Controller, l.Name, l.Cluster, func() float64 { return float64(now().ToReplay) })
	for _, result := range Results {
		m.reconciles.WithLabelValues(l.Controller, l.Name, l.Cluster, result).Add(0)
	}
	m.duration.WithLabelValues(l.Controller, l.Name, l.Cluster)
	m.panics.WithLabelValues(l.Controller).Add(0)
	return true
}

// RemoveLoop ends the series of a loop. After it, AddLoop may add a loop of the same name.
func (m *Metrics) RemoveLoop(l Loop) {
	for _, result := range Results {
		m.reconciles.Delete(map[string]string{"controller": l.Controller, "loop": l.Name, "cluster": l.Cluster, "result": result})
	}
	m.duration.Delete(map[string]string{"controller": l.Controller, "loop": l.Name, "cluster": l.Cluster})
	for _, gauge := range []*computedGauge{m.longest, m.failing, m.blocked, m.toReplay} {
		gauge.remove(l.Controller, l.Name, l.Cluster)
	}
	for _, series := range []interface{ Delete(map[string]string) bool }{m.adds, m.retries, m.waits} {
		series.Delete(map[string]string{"name": l.String()})
	}
	m.depth.remove(l.String(), "", "") // last, since it frees the name
}

// Observe counts a reconcile.
func (m *Metrics) Observe(l Loop, result string, took time.Duration) {
	m.reconciles.WithLabelValues(l.Controller, l.Name, l.Cluster, result).Inc()
	m.duration.WithLabelValues(l.Controller, l.Name, l.Cluster).Observe(took.Seconds())
}

// Queue has the series of a loop's queue: the keys that became due, the keys that come back after a
// reconcile, and how many seconds keys were due until a worker took them.
type Queue struct {
	Adds, Retries metrics.CounterMetric
	Waits         metrics.ObserverMetric
}

// Queue returns the series of a loop's queue.
func (m *Metrics) Queue(l Loop) Queue {
	name := l.String()
	return Queue{m.adds.WithLabelValues(name), m.retries.WithLabelValues(name), m.waits.WithLabelValues(name)}
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

func newComputedGauge(name, help string, stability metrics.StabilityLevel, labels ...string) *computedGauge {
	return &computedGauge{desc: metrics.NewDesc(name, help, labels, nil, stability, ""), labels: len(labels)}
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
	for key, value := range c.values.Range { // concurrently, since the function of a value may wait for a controller
		computing.Go(func() {
			labels := key.([3]string)
			ch <- metrics.NewLazyConstMetric(c.desc, metrics.GaugeValue, value.(func() float64)(), labels[:c.labels]...)
		})
	}
	computing.Wait()
}
