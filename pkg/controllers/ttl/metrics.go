// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"k8s.io/component-base/metrics"
)

const metricPrefix = "quartermaster_ttl_"

// The results of a deletion.
const (
	resultDeleted = "deleted"
	resultDryRun  = "dry_run"
	resultFailed  = "failed"
)

// domainMetrics are the metrics of this controller; those of the loop are in package controllers. No label
// is a namespace or a name.
type domainMetrics struct {
	deletions *metrics.CounterVec // group, resource, result
	invalid   *metrics.CounterVec // key
	lag       *metrics.Histogram
	trips     *metrics.Counter
	skew      *metrics.Gauge
}

func newDomainMetrics(reg metrics.KubeRegistry, c *Controller) *domainMetrics {
	counter := func(name, help string) *metrics.CounterOpts {
		return &metrics.CounterOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	d := &domainMetrics{
		deletions: metrics.NewCounterVec(counter("deletions_total",
			"Expired objects by type and result (deleted, dry_run, failed)."), []string{"group", "resource", "result"}),
		invalid: metrics.NewCounterVec(counter("invalid_annotations_total", "Objects with an annotation that cannot be understood."), []string{"key"}),
		lag: metrics.NewHistogram(&metrics.HistogramOpts{Name: metricPrefix + "deletion_lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the deadline until an object was deleted.",
			Buckets: []float64{0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 3600, 86400}}),
		trips: metrics.NewCounter(counter("breaker_trips_total", "How often too many objects were due within a minute.")),
		skew: metrics.NewGauge(&metrics.GaugeOpts{Name: metricPrefix + "clock_skew_seconds", StabilityLevel: metrics.ALPHA,
			Help: "How far the clock was ahead of the API server's at the last deletion."}),
	}
	reg.MustRegister(d.deletions, d.invalid, d.lag, d.trips, d.skew)
	reg.CustomMustRegister(newCollector(c))
	for _, key := range c.keys {
		d.invalid.WithLabelValues(key).Add(0)
	}
	return d
}

func (d *domainMetrics) deletion(r *entry, result string) {
	d.deletions.WithLabelValues(r.Group, r.Resource, result).Inc()
}

// collector computes its metrics at each scrape, from what /debug/controllers/ttl shows. There are no
// series of types without anything to count.
type collector struct {
	metrics.BaseStableCollector
	c                                       *Controller
	tracked, overdue, watched, errors, open *metrics.Desc
}

func newCollector(c *Controller) *collector {
	desc := func(name, help string, labels ...string) *metrics.Desc {
		return metrics.NewDesc(metricPrefix+name, help, labels, nil, metrics.ALPHA, "")
	}
	return &collector{
		c:       c,
		tracked: desc("tracked_objects", "Annotated objects, by type.", "group", "resource"),
		overdue: desc("overdue_objects", "Objects whose deadline has passed."),
		watched: desc("watched_types", "Types whose objects are known."),
		errors:  desc("type_errors_total", "Failed requests by type and operation (watch, get, delete).", "group", "resource", "operation"),
		open:    desc("breaker_open", "1 while nothing is deleted because too many objects were due."),
	}
}

// DescribeWithStability implements metrics.StableCollector.
func (m *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, desc := range []*metrics.Desc{m.tracked, m.overdue, m.watched, m.errors, m.open} {
		ch <- desc
	}
}

// CollectWithStability implements metrics.StableCollector.
func (m *collector) CollectWithStability(ch chan<- metrics.Metric) {
	gauge := func(desc *metrics.Desc, value int, labels ...string) {
		ch <- metrics.NewLazyConstMetric(desc, metrics.GaugeValue, float64(value), labels...)
	}
	now := m.c.clock.Now()
	overdue, watched := 0, 0
	for _, s := range m.c.book.status(now) {
		overdue += s.Overdue
		if s.Synced {
			watched++
		}
		if s.Tracked > 0 {
			gauge(m.tracked, s.Tracked, s.resource.Group, s.resource.Resource)
		}
		for operation, n := range s.failures {
			if n > 0 {
				ch <- metrics.NewLazyConstMetric(m.errors, metrics.CounterValue, float64(n), s.resource.Group, s.resource.Resource, operation)
			}
		}
	}
	gauge(m.overdue, overdue)
	gauge(m.watched, watched)
	open := 0
	if m.c.breakerOpen(now) > 0 {
		open = 1
	}
	gauge(m.open, open)
}
