// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"strconv"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
)

const metricPrefix = "quartermaster_csr_approver_"

// The results of a request.
const (
	resultApproved = "approved"
	resultDenied   = "denied"
	resultIgnored  = "ignored"
	resultDryRun   = "dry_run"
)

// controllerMetrics are the metrics of this controller; the loop's are in package controllers. No label is
// the name of an object.
type controllerMetrics struct {
	requests *metrics.CounterVec // result
	lag      *metrics.Histogram
}

func newControllerMetrics(reg controllers.MetricsRegistry, mem *memory) *controllerMetrics {
	m := &controllerMetrics{
		requests: metrics.NewCounterVec(&metrics.CounterOpts{Name: metricPrefix + "requests_total", StabilityLevel: metrics.ALPHA,
			Help: "Requests for serving certificates by result (approved, denied, ignored, dry_run)."}, []string{"result"}),
		lag: metrics.NewHistogram(&metrics.HistogramOpts{Name: metricPrefix + "lag_seconds", StabilityLevel: metrics.ALPHA,
			Help:    "Time from the creation of a request, in whole seconds, until it was approved.",
			Buckets: []float64{0.5, 1, 2, 5, 10, 30, 60, 300, 3600, 86400}}),
	}
	reg.MustRegister(m.requests, m.lag)
	for _, result := range []string{resultApproved, resultDenied, resultIgnored, resultDryRun} {
		m.requests.WithLabelValues(result).Add(0)
	}
	for check := policy.CheckEncoding; check <= policy.CheckRate; check++ {
		reg.RawMustRegister(metrics.NewGaugeFunc(&metrics.GaugeOpts{Name: metricPrefix + "waiting_requests", StabilityLevel: metrics.ALPHA,
			Help:        "Requests that are not approved, by the number of the check that they fail.",
			ConstLabels: map[string]string{"check": strconv.Itoa(int(check))},
		}, func() float64 { return float64(mem.count(func(w waitState) bool { return w.checks&(1<<check) != 0 })) }))
	}
	return m
}
