// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"fmt"
	"net/http"

	"k8s.io/component-base/metrics"
)

const (
	metricsNamespace = "quartermaster"
	metricsSubsystem = "leader_election"
)

// Metrics are the metrics of all locks of a process. The label name is the name of the Lease.
// Identities and UIDs are not labels, since their number is unbounded.
type Metrics struct {
	leading     *metrics.GaugeVec
	transitions *metrics.GaugeVec
	renewed     *metrics.GaugeVec
	renewals    *metrics.HistogramVec
	refusals    *metrics.CounterVec
	ended       *metrics.CounterVec
	watching    *metrics.GaugeVec
	serverFence *metrics.GaugeVec
}

// writeVerbs maps HTTP methods to values of the label verb.
var writeVerbs = map[string]string{
	http.MethodPost:   "create",
	http.MethodPut:    "update",
	http.MethodPatch:  "patch",
	http.MethodDelete: "delete",
}

const otherVerb = "other"

// endReasons are the values of the label reason.
var endReasons = []Reason{ReasonReleased, ReasonRenewDeadline, ReasonHolderChanged, ReasonLeaseReplaced,
	ReasonLeaseDeleted, ReasonDrainTimeout, ReasonReleaseFailed}

// Results of a renewal, the values of the label result.
const (
	resultSuccess  = "success"
	resultConflict = "conflict"
	resultError    = "error"
)

// NewMetrics returns the metrics, registered on registry.
func NewMetrics(registry metrics.KubeRegistry) (*Metrics, error) {
	gauge := func(metric, help string, labels ...string) *metrics.GaugeVec {
		return metrics.NewGaugeVec(&metrics.GaugeOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: metric, Help: help,
			StabilityLevel: metrics.ALPHA}, append([]string{"name"}, labels...))
	}
	counter := func(metric, help, label string) *metrics.CounterVec {
		return metrics.NewCounterVec(&metrics.CounterOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: metric, Help: help,
			StabilityLevel: metrics.ALPHA}, []string{"name", label})
	}
	m := &Metrics{
		leading:     gauge("is_leader", "Whether this replica holds the Lease and its lead function runs."),
		transitions: gauge("transitions", "Changes of holder recorded in the Lease, as last seen."),
		renewed:     gauge("last_renewal_timestamp_seconds", "When the last acknowledged write of this replica to the Lease was sent, 0 if none."),
		watching:    gauge("watch_up", "Whether the watch of the Lease is established; without it the Lease is polled."),
		serverFence: gauge("server_fence", "Whether the API server refuses writes of replicas that do not hold the Lease: "+
			"1 for the state that was found, 0 for the others.", "state"),
		renewals: metrics.NewHistogramVec(&metrics.HistogramOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "renewal_duration_seconds",
			Help:           "Time from sending a renewal to its outcome.",
			Buckets:        []float64{.002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
			StabilityLevel: metrics.ALPHA}, []string{"name", "result"}),
		refusals: counter("fence_refusals_total", "Writes that the fence of this replica refused since it did not lead.", "verb"),
		ended:    counter("terms_ended_total", "Terms of this replica that ended, by reason.", "reason"),
	}
	for _, metric := range []metrics.Registerable{m.leading, m.transitions, m.renewed, m.watching,
		m.serverFence, m.renewals, m.refusals, m.ended} {
		if err := registry.Register(metric); err != nil {
			return nil, fmt.Errorf("register the metrics of leader election: %w", err)
		}
	}
	return m, nil
}

// lockMetrics are the metrics of one lock.
type lockMetrics struct {
	*Metrics
	name string
}

// of returns the metrics of the lock on the named Lease. Every series exists from the start, at
// zero.
func (all *Metrics) of(name string) *lockMetrics {
	m := &lockMetrics{Metrics: all, name: name}
	for _, g := range []*metrics.GaugeVec{m.leading, m.transitions, m.renewed, m.watching} {
		g.WithLabelValues(m.name).Set(0)
	}
	for _, verb := range writeVerbs {
		m.refusals.WithLabelValues(m.name, verb).Add(0)
	}
	m.refusals.WithLabelValues(m.name, otherVerb).Add(0)
	for _, reason := range endReasons {
		m.ended.WithLabelValues(m.name, string(reason)).Add(0)
	}
	for _, state := range serverFences {
		setBool(m.serverFence.WithLabelValues(m.name, string(state)), state == ServerFenceUnknown)
	}
	for _, result := range []string{resultSuccess, resultConflict, resultError} {
		m.renewals.WithLabelValues(m.name, result)
	}
	return m
}

func (m *lockMetrics) refused(method string) {
	verb, known := writeVerbs[method]
	if !known {
		verb = otherVerb
	}
	m.refusals.WithLabelValues(m.name, verb).Inc()
}

// wrote counts the outcome of a renewal.
func (m *lockMetrics) wrote(msg writeDone, conflict bool) {
	if msg.kind != actRenew {
		return
	}
	result := resultSuccess
	switch {
	case conflict:
		result = resultConflict
	case msg.err != nil:
		result = resultError
	}
	m.renewals.WithLabelValues(m.name, result).Observe(msg.took.Seconds())
}

func setBool(g metrics.GaugeMetric, value bool) {
	if value {
		g.Set(1)
	} else {
		g.Set(0)
	}
}
