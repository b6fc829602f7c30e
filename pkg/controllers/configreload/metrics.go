// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"bytes"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// Results, as used in labels.
const (
	resultSuccess = "success"
	resultError   = "error"
	resultSkipped = "skipped"
	resultDryRun  = "dry_run"
)

// Events of a source, as used in labels.
const (
	eventCreate = "create"
	eventUpdate = "update"
	eventDelete = "delete"
)

const metricPrefix = "quartermaster_config_reload_"

// sourceEvent has the labels of a counter of source_changes_total. The counters are looked up once, since
// every update of a source counts.
type sourceEvent struct {
	sourceType policy.SourceType
	event      string
}

// controllerMetrics are the metrics of this controller; the loop's are in package controllers.
type controllerMetrics struct {
	reloads            *metrics.CounterVec // kind, result
	sourceChanges      map[sourceEvent]metrics.CounterMetric
	stateWrites        *metrics.CounterVec // result
	coalescedChanges   *metrics.Counter
	invalidAnnotations *metrics.Counter
	lostJobs           *metrics.Counter
	lag                *metrics.Histogram
}

func newControllerMetrics(reg controllers.MetricsRegistry, mem *memory, kinds map[string]*kind) *controllerMetrics {
	counter := func(name, help string) *metrics.CounterOpts {
		return &metrics.CounterOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	gauge := func(name, help string) *metrics.GaugeOpts {
		return &metrics.GaugeOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	m := &controllerMetrics{
		reloads: metrics.NewCounterVec(counter("reloads_total",
			"Reloads by kind of workload and result (success, error, skipped, dry_run)."), []string{"kind", "result"}),
		sourceChanges: map[sourceEvent]metrics.CounterMetric{},
		stateWrites: metrics.NewCounterVec(counter("state_writes_total",
			"Patches of the state annotation alone, by result."), []string{"result"}),
		coalescedChanges: metrics.NewCounter(counter("coalesced_changes_total",
			"Changes that joined a reload that was already waiting.")),
		invalidAnnotations: metrics.NewCounter(counter("invalid_annotations_total", "Annotations that could not be understood.")),
		lostJobs: metrics.NewCounter(counter("lost_jobs_total",
			"Jobs that were deleted for a reload and could not be created again.")),
		lag: metrics.NewHistogram(&metrics.HistogramOpts{
			Name: metricPrefix + "lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the first change of a reload until the workload was written, the quiet period included.",
			Buckets: []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300},
		}),
	}
	sourceChanges := metrics.NewCounterVec(counter("source_changes_total",
		"Changes seen of sources by type and event (create, update, delete)."), []string{"type", "event"})
	pending := metrics.NewGaugeFunc(gauge("pending_workloads", "Workloads with changes that wait to be acted on."),
		func() float64 { n, _ := mem.counts(); return float64(n) })
	paused := metrics.NewGaugeFunc(gauge("paused_deployments", "Deployments that are paused after a reload."),
		func() float64 { _, n := mem.counts(); return float64(n) })
	reg.MustRegister(m.reloads, sourceChanges, m.stateWrites, m.coalescedChanges, m.invalidAnnotations, m.lostJobs, m.lag)
	reg.RawMustRegister(pending, paused)
	// A series that is zero from the first scrape makes rates and alerts work.
	for name := range kinds {
		for _, result := range []string{resultSuccess, resultError, resultSkipped, resultDryRun} {
			m.reloads.WithLabelValues(name, result).Add(0)
		}
	}
	for _, result := range []string{resultSuccess, resultError} {
		m.stateWrites.WithLabelValues(result).Add(0)
	}
	for _, typ := range policy.SourceTypes {
		for _, event := range []string{eventCreate, eventUpdate, eventDelete} {
			m.sourceChanges[sourceEvent{typ, event}] = sourceChanges.WithLabelValues(typ.String(), event)
		}
	}
	return m
}

// sourceChanged counts a change of a source from one digest to another; nil stands for no source.
func (m *controllerMetrics) sourceChanged(typ policy.SourceType, before, after []byte) {
	var event string
	switch {
	case before == nil && after != nil:
		event = eventCreate
	case before != nil && after == nil:
		event = eventDelete
	case !bytes.Equal(before, after):
		event = eventUpdate
	default:
		return
	}
	m.sourceChanges[sourceEvent{typ, event}].Inc()
}
