// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

const metricPrefix = "quartermaster_federation_"

// controllerMetrics are the metrics of this controller; package controllers has the metrics of the loops.
type controllerMetrics struct {
	ready, pending, held, writtenOff *metrics.GaugeVec
	lag                              *metrics.HistogramVec
	replicaWrites                    *metrics.Counter

	clusters map[string]bool // the clusters that have series; only setGauges uses it
}

func newControllerMetrics(reg controllers.MetricsRegistry) *controllerMetrics {
	gauge := func(name, help string) *metrics.GaugeVec {
		return metrics.NewGaugeVec(&metrics.GaugeOpts{Name: metricPrefix + name, Help: help, StabilityLevel: metrics.ALPHA}, []string{"cluster"})
	}
	m := &controllerMetrics{
		ready:      gauge("cluster_ready", "1 if the cluster is ready, else 0."),
		pending:    gauge("pending_removals", "Removals in the cluster that wait, for whatever reason."),
		held:       gauge("held_removals", "Removals in the cluster that wait until somebody allows them."),
		writtenOff: gauge("written_off_removals", "Removals that the cluster owes, because it was away when its federated objects were deleted."),
		lag: metrics.NewHistogramVec(&metrics.HistogramOpts{Name: metricPrefix + "lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from when a change was seen until it was written in the cluster.",
			Buckets: []float64{0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300}}, []string{"cluster"}),
		replicaWrites: metrics.NewCounter(&metrics.CounterOpts{Name: metricPrefix + "replica_writes_total", StabilityLevel: metrics.ALPHA,
			Help: "Federated objects written because the replicas of their clusters were planned anew."}),
		clusters: map[string]bool{},
	}
	reg.MustRegister(m.ready, m.pending, m.held, m.writtenOff, m.lag, m.replicaWrites)
	return m
}

// setGauges sets the gauges, and ends the series of clusters that have gone.
func (m *controllerMetrics) setGauges(statuses []clusterStatus) {
	gone := m.clusters
	m.clusters = map[string]bool{}
	for _, status := range statuses {
		ready := 0.0
		if status.Ready {
			ready = 1
		}
		for gauge, value := range map[*metrics.GaugeVec]float64{m.ready: ready, m.pending: float64(status.Pending), m.held: float64(status.Held), m.writtenOff: float64(status.WrittenOff)} {
			gauge.WithLabelValues(status.Name).Set(value)
		}
		m.clusters[status.Name] = true
		delete(gone, status.Name)
	}
	for name := range gone {
		labels := map[string]string{"cluster": name}
		for _, gauge := range []*metrics.GaugeVec{m.ready, m.pending, m.held, m.writtenOff} {
			gauge.Delete(labels)
		}
		m.lag.Delete(labels)
	}
}
