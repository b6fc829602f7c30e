// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"time"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

const metricPrefix = "quartermaster_ttl_"

// The results of a deletion.
const (
	resultSuccess = "success"
	resultDryRun  = "dry_run"
	resultError   = "error"
)

// controllerMetrics are the metrics of this controller; the loop's are in package controllers. No label is a
// namespace or a name.
type controllerMetrics struct {
	deletions  *metrics.CounterVec // group, resource, result, rule
	invalid    *metrics.CounterVec // key
	ruleErrors *metrics.CounterVec // rule
	lag        *metrics.Histogram
	trips      *metrics.CounterVec // scope
	skew       *metrics.Gauge
}

func newControllerMetrics(reg controllers.MetricsRegistry, c *controller) *controllerMetrics {
	counter := func(name, help string) *metrics.CounterOpts {
		return &metrics.CounterOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	gauge := func(name, help string) *metrics.GaugeOpts {
		return &metrics.GaugeOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	m := &controllerMetrics{
		deletions: metrics.NewCounterVec(counter("deletions_total",
			"Expired objects by type, result (success, dry_run, error) and rule, which is empty for annotations."),
			[]string{"group", "resource", "result", "rule"}),
		invalid: metrics.NewCounterVec(counter("invalid_annotations_total", "Objects with an annotation that cannot be understood."), []string{"key"}),
		ruleErrors: metrics.NewCounterVec(counter("rule_errors_total",
			"Objects for which a rule could not be evaluated."), []string{"rule"}),
		lag: metrics.NewHistogram(&metrics.HistogramOpts{Name: metricPrefix + "lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the deadline until an object was deleted.",
			Buckets: []float64{0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 3600, 86400}}),
		trips: metrics.NewCounterVec(counter("breaker_trips_total",
			"How often the limit of deletions within a minute was reached, of one namespace or in total, and more were due."), []string{"scope"}),
		skew: metrics.NewGauge(gauge("clock_skew_seconds", "How far the clock was ahead of the API server's when an object that was due was last read.")),
	}
	reg.MustRegister(m.deletions, m.invalid, m.ruleErrors, m.lag, m.trips, m.skew)
	for _, key := range c.options.Keys() {
		m.invalid.WithLabelValues(key).Add(0)
	}
	for i, r := range c.rules.Rules() {
		m.ruleErrors.WithLabelValues(r.Name).Add(0)
		opts := gauge("rule_objects", "Objects that expire by the rule, in time.")
		opts.ConstLabels = map[string]string{"rule": r.Name}
		reg.RawMustRegister(metrics.NewGaugeFunc(opts, func() float64 { return float64(c.ruleStatuses()[i].Objects) }))
	}
	// addSum registers a gauge that is a sum over the types at each scrape.
	addSum := func(name, help string, value func(*TypeStatus) int) {
		reg.RawMustRegister(metrics.NewGaugeFunc(gauge(name, help), func() float64 {
			sum, statuses := 0, c.typeStatuses()
			for i := range statuses {
				sum += value(&statuses[i])
			}
			return float64(sum)
		}))
	}
	addSum("tracked_objects", "Objects with an annotation, and objects that a rule chooses.", func(s *TypeStatus) int { return s.Tracked })
	addSum("overdue_objects", "Objects whose deadline has passed.", func(s *TypeStatus) int { return s.Overdue })
	addSum("watched_types", "Types whose objects are known.", func(s *TypeStatus) int { return boolToInt(s.Synced) })
	addSum("failing_types", "Types that cannot be listed or watched now, or are left alone for a while.", func(s *TypeStatus) int { return boolToInt(s.Problem != "") })
	for _, scope := range []policy.Scope{policy.OneNamespace, policy.AllNamespaces} {
		m.trips.WithLabelValues(string(scope)).Add(0)
	}
	reg.RawMustRegister(metrics.NewGaugeFunc(
		gauge("breaker_open", "1 while annotations or rules delete nothing at all, because the limit of deletions within a minute was reached and more are due."), func() float64 {
			_, annotationStopped := c.breaker.Stopped(time.Now())
			_, ruleStopped := c.ruleBreaker.Stopped(time.Now())
			return float64(boolToInt(annotationStopped || ruleStopped))
		}))
	reg.RawMustRegister(metrics.NewGaugeFunc(
		gauge("stopped_namespaces", "Namespaces in which annotations or rules delete nothing, because the limit of deletions within a minute was reached and more are due."), func() float64 {
			namespaces, _ := c.breaker.Stopped(time.Now())
			ruleNamespaces, _ := c.ruleBreaker.Stopped(time.Now())
			return float64(namespaces + ruleNamespaces)
		}))
	return m
}

func boolToInt(condition bool) int {
	if condition {
		return 1
	}
	return 0
}

func (m *controllerMetrics) countDeletion(key objectKey, decision *policy.Decision, result string) {
	m.deletions.WithLabelValues(key.Group, key.Resource, result, decision.Rule).Inc()
}
