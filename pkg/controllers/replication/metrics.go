// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

const metricPrefix = "quartermaster_replication_"

// The results of a write.
const (
	resultSuccess = "success"
	resultError   = "error"
	resultDryRun  = "dry_run"
)

// controllerMetrics are the metrics of this controller; the loop's are in package controllers. No label is a
// namespace or a name.
type controllerMetrics struct {
	targets  *metrics.GaugeVec   // kind, dialect, mode, state
	writes   *metrics.CounterVec // kind, action, result
	problems *metrics.CounterVec // reason
}

func newControllerMetrics(reg controllers.MetricsRegistry, kinds []policy.Kind) *controllerMetrics {
	counter := func(name, help string, labels ...string) *metrics.CounterVec {
		opts := &metrics.CounterOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}
		return metrics.NewCounterVec(opts, labels)
	}
	m := &controllerMetrics{
		targets: metrics.NewGaugeVec(&metrics.GaugeOpts{Name: metricPrefix + "targets", StabilityLevel: metrics.ALPHA,
			Help: "Copies and pull targets by kind, dialect, mode (push, pull) and state (in_sync, due, held, frozen, refused, unclaimed)."},
			[]string{"kind", "dialect", "mode", "state"}),
		writes: counter("writes_total",
			"Writes by kind, action (create, update, recreate, mark, strip, empty, delete) and result (success, error, dry_run).",
			"kind", "action", "result"),
		problems: counter("problems_total", "Decisions with a problem, by the reason of its Event.", "reason"),
	}
	reg.MustRegister(m.targets, m.writes, m.problems)
	// A series that is zero from the first scrape makes rates and alerts work.
	for _, kind := range kinds {
		for _, dialect := range policy.Dialects {
			for _, state := range policy.States {
				for _, mode := range []policy.Mode{policy.Push, policy.Pull} {
					m.targets.WithLabelValues(string(kind), string(dialect), string(mode), string(state)).Set(0)
				}
			}
		}
		for _, action := range []policy.Action{policy.Create, policy.Update, policy.Recreate, policy.Mark, policy.Strip, policy.Empty, policy.Delete} {
			for _, result := range []string{resultSuccess, resultError, resultDryRun} {
				m.writes.WithLabelValues(string(kind), string(action), result).Add(0)
			}
		}
	}
	for _, reason := range []string{policy.InvalidAnnotation, policy.InvalidPattern, policy.AmbiguousPattern, policy.ConflictingAnnotations, policy.PatternTimeout} {
		m.problems.WithLabelValues(reason).Add(0)
	}
	return m
}

func (m *controllerMetrics) countWrite(kind policy.Kind, action policy.Action, result string) {
	m.writes.WithLabelValues(string(kind), string(action), result).Inc()
}
