// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package display

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

const (
	metricsNamespace = "quartermaster"
	metricsSubsystem = "leader_election"
)

// Metrics are the metrics of all locks of a process. The labels lease_namespace and name name the Lease.
// Identities and UIDs are not labels, since their number is unbounded.
type Metrics struct {
	leading       *metrics.GaugeVec
	transitions   *metrics.GaugeVec
	renewals      *metrics.HistogramVec
	refusals      *metrics.CounterVec
	ended         *metrics.CounterVec
	serverFence   *metrics.GaugeVec
	leaderProcess *metrics.GaugeVec
	starts        *metrics.CounterVec
}

// Results of a write to the Lease, the values of the label result.
const (
	resultSuccess  = "success"
	resultConflict = "conflict"
	resultRefused  = "refused"
	resultError    = "error"
)

// StartKind says when lead may start, the values of the label start.
type StartKind string

// The kinds of starts.
const (
	StartFree   StartKind = "Free"   // the Lease was released or had expired
	StartProved StartKind = "Proved" // the Lease was taken early, and every API server refuses the predecessors
	StartWaited StartKind = "Waited" // the Lease was taken early, and the predecessors' claims have ended since
)

// NewMetrics returns the metrics, registered on registry. They have the same names in every build, since
// alerts and the dashboard have these names.
func NewMetrics(registry metrics.KubeRegistry) (*Metrics, error) {
	m := newMetrics()
	for _, metric := range []metrics.Registerable{m.leading, m.transitions,
		m.serverFence, m.leaderProcess, m.starts, m.renewals, m.refusals, m.ended} {
		if err := registry.Register(metric); err != nil {
			return nil, fmt.Errorf("register the metrics of leader election: %w", err)
		}
	}
	return m, nil
}

// newMetrics returns metrics that do nothing until they are registered.
func newMetrics() *Metrics {
	lease := []string{"lease_namespace", "name"}
	gauge := func(metric, help string, labels ...string) *metrics.GaugeVec {
		return metrics.NewGaugeVec(&metrics.GaugeOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: metric, Help: help,
			StabilityLevel: metrics.ALPHA}, append(lease[:2:2], labels...))
	}
	counter := func(metric, help string, labels ...string) *metrics.CounterVec {
		return metrics.NewCounterVec(&metrics.CounterOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: metric, Help: help,
			StabilityLevel: metrics.ALPHA}, append(lease[:2:2], labels...))
	}
	return &Metrics{
		leading:     gauge("is_leader", "Whether this replica leads: its controllers run and may write."),
		transitions: gauge("transitions", "Changes of holder recorded in the Lease, as last seen."),
		serverFence: gauge("server_fence", "Whether the API server refuses writes of replicas that do not hold the Lease: "+
			"1 for the state that was found, 0 for the others.", "state"),
		leaderProcess: gauge("leader_process", "What this standby sees of the leader's process, on a connection to its secure port: "+
			"1 for that state, 0 for the others.", "state"),
		starts: counter("starts_total", "Terms that this replica began to lead: Free, the Lease was released or had expired; Proved, it was taken early and "+
			"every API server refuses the predecessors; Waited, it was taken early and the predecessors' claims have ended since.", "start"),
		renewals: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "renewal_duration_seconds",
			Help:           "Time from sending a renewal to its outcome.",
			Buckets:        []float64{.002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
			StabilityLevel: metrics.ALPHA}, append(lease[:2:2], "result")),
		refusals: counter("fence_refusals_total", "Writes that the fence of this replica refused because it did not lead."),
		ended:    counter("terms_ended_total", "Terms of this replica that ended, by reason.", "reason"),
	}
}

// lockMetrics are the metrics of one lock.
type lockMetrics struct {
	*Metrics
	lease types.NamespacedName
}

// forLease returns the metrics of the lock on the Lease. Every series exists from the start, at zero.
func (m *Metrics) forLease(lease types.NamespacedName) *lockMetrics {
	if m == nil {
		m = newMetrics()
	}
	l := &lockMetrics{Metrics: m, lease: lease}
	for _, g := range []*metrics.GaugeVec{l.leading, l.transitions} {
		l.gauge(g).Set(0)
	}
	l.counter(l.refusals).Add(0)
	for _, reason := range protocol.EndReasons {
		l.counter(l.ended, string(reason)).Add(0)
	}
	for _, start := range []StartKind{StartFree, StartProved, StartWaited} {
		l.counter(l.starts, string(start)).Add(0)
	}
	show(l, l.serverFence, apifence.States, apifence.Unknown)
	show(l, l.leaderProcess, protocol.LeaderStates, protocol.LeaderUnknown)
	for _, result := range []string{resultSuccess, resultConflict, resultRefused, resultError} {
		l.renewals.WithLabelValues(lease.Namespace, lease.Name, result)
	}
	return l
}

func (m *lockMetrics) gauge(g *metrics.GaugeVec, labels ...string) metrics.GaugeMetric {
	return g.WithLabelValues(append([]string{m.lease.Namespace, m.lease.Name}, labels...)...)
}

func (m *lockMetrics) counter(c *metrics.CounterVec, labels ...string) metrics.CounterMetric {
	return c.WithLabelValues(append([]string{m.lease.Namespace, m.lease.Name}, labels...)...)
}

func (m *lockMetrics) set(g *metrics.GaugeVec, value bool, labels ...string) {
	m.gauge(g, labels...).Set(map[bool]float64{true: 1}[value])
}

// show sets the series of the present state to 1 and the series of the other states to 0.
func show[T ~string](m *lockMetrics, g *metrics.GaugeVec, states []T, present T) {
	for _, state := range states {
		m.set(g, state == present, string(state))
	}
}

// wrote records how a write of the Lease has ended.
func (m *lockMetrics) wrote(kind protocol.ActionKind, f protocol.Failure, took time.Duration) {
	if kind == protocol.ActRenew {
		result := map[protocol.FailureKind]string{protocol.FailNone: resultSuccess, protocol.FailConflict: resultConflict,
			protocol.FailRefused: resultRefused, protocol.FailUnauthorized: resultRefused, protocol.FailUnanswered: resultError}[f.Kind]
		m.renewals.WithLabelValues(m.lease.Namespace, m.lease.Name, result).Observe(took.Seconds())
	}
}
