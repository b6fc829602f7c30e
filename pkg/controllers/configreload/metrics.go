// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"k8s.io/component-base/metrics"

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

// domainMetrics are the metrics of this controller; those of the loop are in package controllers.
type domainMetrics struct {
	reloads       counters            // kind, result
	sourceChanges *metrics.CounterVec // type, event
	stateWrites   counters            // result
	sources       *metrics.GaugeVec   // type
	coalesced     *metrics.Counter
	invalid       *metrics.Counter
	lostJobs      *metrics.Counter
	changeToPatch *metrics.Histogram
}

// counters are the series of a vector, resolved once.
type counters struct {
	vec  *metrics.CounterVec
	each map[[2]string]metrics.CounterMetric
}

func newCounters(opts *metrics.CounterOpts, labels ...string) counters {
	return counters{metrics.NewCounterVec(opts, labels), map[[2]string]metrics.CounterMetric{}}
}

// add initialises a series to zero.
func (c *counters) add(labels ...string) {
	var key [2]string
	copy(key[:], labels)
	c.each[key] = c.vec.WithLabelValues(labels...)
	c.each[key].Add(0)
}

// of returns a series that was added.
func (c *counters) of(labels ...string) metrics.CounterMetric {
	var key [2]string
	copy(key[:], labels)
	return c.each[key]
}

func newDomainMetrics(reg metrics.KubeRegistry, m *memory, kinds map[string]*kind) *domainMetrics {
	counter := func(name, help string) *metrics.CounterOpts {
		return &metrics.CounterOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	gauge := func(name, help string) *metrics.GaugeOpts {
		return &metrics.GaugeOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
	}
	d := &domainMetrics{
		reloads: newCounters(counter("reloads_total",
			"Reloads by kind of workload and result (success, error, skipped, dry_run)."), "kind", "result"),
		sourceChanges: metrics.NewCounterVec(counter("source_changes_total",
			"Changes seen of ConfigMaps and Secrets by type and event (create, update, delete)."), []string{"type", "event"}),
		stateWrites: newCounters(counter("state_writes_total",
			"Patches of the state annotation alone, by result."), "result"),
		sources: metrics.NewGaugeVec(gauge("sources", "ConfigMaps and Secrets that count, by type."), []string{"type"}),
		coalesced: metrics.NewCounter(counter("coalesced_changes_total",
			"Changes that joined a reload that was already waiting.")),
		invalid: metrics.NewCounter(counter("invalid_annotations_total", "Annotations that could not be understood.")),
		lostJobs: metrics.NewCounter(counter("lost_jobs_total",
			"Jobs that were deleted for a reload and could not be created again.")),
		changeToPatch: metrics.NewHistogram(&metrics.HistogramOpts{
			Name: metricPrefix + "change_to_patch_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the first change of a reload until the workload was written, the quiet period included.",
			Buckets: []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300},
		}),
	}
	pending := metrics.NewGaugeFunc(gauge("pending_workloads", "Workloads with changes that wait to be acted on."),
		func() float64 { n, _ := m.counts(); return float64(n) })
	paused := metrics.NewGaugeFunc(gauge("paused_deployments", "Deployments that are paused after a reload."),
		func() float64 { _, n := m.counts(); return float64(n) })
	reg.MustRegister(d.reloads.vec, d.sourceChanges, d.stateWrites.vec, d.sources, d.coalesced, d.invalid, d.lostJobs, d.changeToPatch)
	reg.RawMustRegister(pending, paused)
	d.zero(kinds)
	return d
}

func (d *domainMetrics) zero(kinds map[string]*kind) {
	for name := range kinds {
		for _, result := range []string{resultSuccess, resultError, resultSkipped, resultDryRun} {
			d.reloads.add(name, result)
		}
	}
	for _, result := range []string{resultSuccess, resultError} {
		d.stateWrites.add(result)
	}
	for _, t := range policy.SourceTypes {
		for _, event := range []string{eventCreate, eventUpdate, eventDelete} {
			d.sourceChanges.WithLabelValues(t.String(), event).Add(0)
		}
	}
	d.stopped()
}

// sourceSeen counts a source. It counts a change too, unless the source is part of the first list.
func (d *domainMetrics) sourceSeen(t policy.SourceType, before, after policy.Source, initial bool) {
	event := ""
	switch {
	case !before.Exists() && after.Exists():
		event = eventCreate
		d.sources.WithLabelValues(t.String()).Inc()
	case before.Exists() && !after.Exists():
		event = eventDelete
		d.sources.WithLabelValues(t.String()).Dec()
	case before.Hash != after.Hash:
		event = eventUpdate
	}
	if event != "" && !initial {
		d.sourceChanges.WithLabelValues(t.String(), event).Inc()
	}
}

// stopped resets the gauges: sources are counted only while the controller runs.
func (d *domainMetrics) stopped() {
	for _, t := range policy.SourceTypes {
		d.sources.WithLabelValues(t.String()).Set(0)
	}
}
