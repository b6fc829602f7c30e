// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sync/singleflight"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/serving"
)

// metricsTimeout is how long the functions of metrics may take. Prometheus waits for 10 s by default.
const metricsTimeout = 5 * time.Second

// metricsHandler serves the metrics of the libraries, of the host and of the controllers together. A metric
// of one controller that cannot be served, such as one of the libraries' names with another type, or one
// whose function panics, does not hide the others. If one of them does not answer within metricsTimeout, all
// metrics of controllers are left out.
func metricsHandler(m controllerMetrics) http.Handler {
	var scrapes singleflight.Group // a function that hangs holds up one goroutine, however often it is asked
	inTime := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		answer := scrapes.DoChan("", func() (families any, err error) {
			err = collected(func() (err error) { families, err = m.KubeRegistry.Gather(); return err })
			return families, err
		})
		select {
		case a := <-answer:
			families, _ := a.Val.([]*dto.MetricFamily) // nil after a panic
			return families, a.Err
		case <-time.After(metricsTimeout):
			return nil, fmt.Errorf("a metric of a controller did not answer within %s", metricsTimeout)
		}
	})
	return promhttp.HandlerFor(prometheus.Gatherers{legacyregistry.DefaultGatherer, m.host, inTime}, promhttp.HandlerOpts{
		ProcessStartTime: legacyregistry.GetProcessStart(),
		ErrorHandling:    promhttp.ContinueOnError,
		ErrorLog:         serving.ErrorLog(klog.Background()),
	})
}

// controllerMetrics is the registry of the controllers.
type controllerMetrics struct {
	metrics.KubeRegistry
	host metrics.KubeRegistry
}

// RawMustRegister registers collectors, each contained.
func (m controllerMetrics) RawMustRegister(collectors ...prometheus.Collector) {
	for _, c := range collectors {
		m.KubeRegistry.RawMustRegister(contained{c})
	}
}

// Gather returns the metrics of the host and of the controllers, for the test kit.
func (m controllerMetrics) Gather() ([]*dto.MetricFamily, error) {
	return prometheus.Gatherers{m.host, m.KubeRegistry}.Gather()
}

// contained is a collector of a controller. If it panics, or one of its metrics does, the scrape goes on
// without the metric.
type contained struct{ prometheus.Collector }

// Collect implements prometheus.Collector.
func (c contained) Collect(ch chan<- prometheus.Metric) {
	each := make(chan prometheus.Metric)
	go func() {
		defer close(each)
		if err := collected(func() error { c.Collector.Collect(each); return nil }); err != nil {
			each <- prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
		}
	}()
	for m := range each {
		if err := collected(func() error { _ = m.Desc().String(); return nil }); err != nil { // Desc may return nil
			m = prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
		}
		ch <- containedMetric{m}
	}
}

// containedMetric is a metric of a contained collector.
type containedMetric struct{ prometheus.Metric }

// Write implements prometheus.Metric.
func (m containedMetric) Write(to *dto.Metric) error {
	return collected(func() error { return m.Metric.Write(to) })
}

// collected returns a panic of f as an error, and logs it.
func collected(f func() error) error {
	stack, err := panics.Recover(f)
	if stack != nil {
		klog.Background().Error(err, "The function of a metric panicked", "stack", string(stack))
	}
	return err
}
