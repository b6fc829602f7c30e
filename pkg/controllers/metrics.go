// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"sync"
	"time"

	"k8s.io/component-base/metrics"
)

// The results a reconcile can have, as they stand in the metric's label.
const (
	resultSuccess    = "success"
	resultRequeue    = "requeue"
	resultError      = "error"
	resultNotLeading = "not_leading"
	resultPanic      = "panic"
)

var results = []string{resultSuccess, resultRequeue, resultError, resultNotLeading, resultPanic}

// Metrics are the loop's own, shared by all loops of a process. Depth, latency
// and retries of the queues come from client-go's workqueue provider, under
// the queue's name, which is the controller's.
type Metrics struct {
	reconciles *metrics.CounterVec
	duration   *metrics.HistogramVec
	panics     *metrics.CounterVec
	longest    *longestRunning
}

// NewMetrics registers the metrics on reg; a second registration on one
// registry panics.
func NewMetrics(reg metrics.KubeRegistry) *Metrics {
	m := &Metrics{
		reconciles: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_reconciles_total",
			Help:           "Reconciles by controller and result (success, requeue, error, not_leading, panic).",
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller", "result"}),
		duration: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Name:           "quartermaster_controller_reconcile_duration_seconds",
			Help:           "Time a reconcile took, by controller.",
			Buckets:        []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60},
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller"}),
		panics: metrics.NewCounterVec(&metrics.CounterOpts{
			Name:           "quartermaster_controller_panics_total",
			Help:           "Panics recovered in reconciles and event mappings, by controller.",
			StabilityLevel: metrics.ALPHA,
		}, []string{"controller"}),
		longest: newLongestRunning(),
	}
	reg.MustRegister(m.reconciles, m.duration, m.panics)
	reg.CustomMustRegister(m.longest)
	return m
}

// add initialises a controller's series to zero, so that rates and alerts work
// from the first scrape.
func (m *Metrics) add(name string, longest func() time.Duration) {
	for _, result := range results {
		m.reconciles.WithLabelValues(name, result).Add(0)
	}
	m.duration.WithLabelValues(name)
	m.panics.WithLabelValues(name).Add(0)
	m.longest.add(name, longest)
}

func (m *Metrics) observe(name, result string, took time.Duration) {
	m.reconciles.WithLabelValues(name, result).Inc()
	m.duration.WithLabelValues(name).Observe(took.Seconds())
}

// longestRunning asks the loops at the scrape: a gauge that workers set would
// stand still exactly when a reconcile hangs.
type longestRunning struct {
	metrics.BaseStableCollector
	desc *metrics.Desc

	mu    sync.Mutex
	loops map[string]func() time.Duration
}

func newLongestRunning() *longestRunning {
	return &longestRunning{
		desc: metrics.NewDesc("quartermaster_controller_longest_running_reconcile_seconds",
			"Age of the oldest reconcile in flight, by controller; 0 if none is.",
			[]string{"controller"}, nil, metrics.ALPHA, ""),
		loops: map[string]func() time.Duration{},
	}
}

func (c *longestRunning) add(name string, longest func() time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.loops[name] = longest
}

// DescribeWithStability implements metrics.StableCollector.
func (c *longestRunning) DescribeWithStability(ch chan<- *metrics.Desc) { ch <- c.desc }

// CollectWithStability implements metrics.StableCollector.
func (c *longestRunning) CollectWithStability(ch chan<- metrics.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, longest := range c.loops {
		ch <- metrics.NewLazyConstMetric(c.desc, metrics.GaugeValue, longest().Seconds(), name)
	}
}
