// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const metricPrefix = "quartermaster_scale_schedule_"

// The results of a write.
const (
	resultSuccess  = "success"
	resultDryRun   = "dry_run"
	resultConflict = "conflict"
	resultError    = "error"
)

// controllerMetrics are the metrics of this controller; the loop's are in package controllers. No label is a
// namespace or a name.
type controllerMetrics struct {
	writes  *metrics.CounterVec // kind, direction, result
	invalid *metrics.CounterVec // key
	lag     *metrics.Histogram
	skew    *metrics.Gauge
}

func newControllerMetrics(reg controllers.MetricsRegistry, c *controller) *controllerMetrics {
	gauge := func(name, help string) *metrics.GaugeOpts {
		return &metrics.GaugeOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	m := &controllerMetrics{
		writes: metrics.NewCounterVec(&metrics.CounterOpts{Name: metricPrefix + "writes_total", StabilityLevel: metrics.ALPHA,
			Help: "Writes by kind, direction (down, up) and result (success, dry_run, conflict, error)."}, []string{"kind", "direction", "result"}),
		invalid: metrics.NewCounterVec(&metrics.CounterOpts{Name: metricPrefix + "invalid_annotations_total", StabilityLevel: metrics.ALPHA,
			Help: "Objects with an annotation that cannot be understood, by key."}, []string{"key"}),
		lag: metrics.NewHistogram(&metrics.HistogramOpts{Name: metricPrefix + "lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from a boundary of a schedule until the write, of writes within an hour of it.",
			Buckets: []float64{0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800}}),
		skew: metrics.NewGauge(gauge("clock_skew_seconds", "How far the clock was ahead of the API server's when they were last compared.")),
	}
	reg.MustRegister(m.writes, m.invalid, m.lag, m.skew)
	for _, k := range policy.Keys() {
		m.invalid.WithLabelValues(k).Add(0)
	}
	for _, k := range c.kinds {
		if !c.cfg.scales(k) {
			continue
		}
		for _, action := range []policy.Action{policy.ScaleDown, policy.ScaleUp} {
			for _, result := range []string{resultSuccess, resultDryRun, resultConflict, resultError} {
				m.writes.WithLabelValues(string(k.Kind), direction(action), result).Add(0)
			}
		}
		opts := gauge("down_objects", "Workloads that have a record of the replicas to return to, by kind.")
		opts.ConstLabels = map[string]string{"kind": string(k.Kind)}
		reg.RawMustRegister(metrics.NewGaugeFunc(opts, func() float64 { return float64(countScaledDown(k.informer)) }))
	}
	reg.RawMustRegister(metrics.NewGaugeFunc(
		gauge("contested_objects", "Workloads that are left alone until the next boundary, because somebody has raised them again and again."),
		func() float64 { return float64(c.memory.countContested()) }))
	return m
}

func countScaledDown(informer *informers.Informer[*informers.Object]) (n int) {
	for _, obj := range informer.List("", nil) {
		if o := policy.Decode(obj.Digest(Name)); o.HasRecord() {
			n++
		}
	}
	return n
}

func direction(action policy.Action) string {
	if action == policy.ScaleDown || action == policy.RestoreRecord {
		return "down"
	}
	return "up"
}

func (m *controllerMetrics) countWrite(kind policy.Kind, action policy.Action, result string) {
	m.writes.WithLabelValues(string(kind), direction(action), result).Inc()
}
