// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"math"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics"
)

// collector computes the metrics at each scrape, from the counts that /debug/informers shows too. All
// informers of a resource count together.
type collector struct {
	metrics.BaseStableCollector
	factory *Factory
	all     []resourceMetric
}

type resourceMetric struct {
	desc *metrics.Desc
	kind metrics.ValueType
	// value of one informer in one namespace, united of two
	value func(*ResourceStatus) float64
	unite func(a, b float64) float64
}

func newCollector(f *Factory) *collector {
	c := &collector{factory: f}
	sum := func(a, b float64) float64 { return a + b }
	add := func(kind metrics.ValueType, name, help string, value func(*ResourceStatus) float64, unite func(a, b float64) float64) {
		desc := metrics.NewDesc(metrics.BuildFQName("quartermaster", "informer", name), help, []string{"group", "resource"},
			map[string]string{"cluster": f.cfg.Cluster}, metrics.ALPHA, "")
		c.all = append(c.all, resourceMetric{desc, kind, value, unite})
	}
	counter := func(name, help string, value func(*ResourceStatus) int64) {
		add(metrics.CounterValue, name, help, func(s *ResourceStatus) float64 { return float64(value(s)) }, sum)
	}
	add(metrics.GaugeValue, "objects", "Number of objects in the cache.",
		func(s *ResourceStatus) float64 { return float64(s.Objects) }, sum)
	add(metrics.GaugeValue, "misfits", "Number of objects that do not fit their Go type and are left out.",
		func(s *ResourceStatus) float64 { return float64(s.Misfits) }, sum)
	add(metrics.GaugeValue, "synced", "1 if the cache has been filled once.", func(s *ResourceStatus) float64 {
		if s.Synced {
			return 1
		}
		return 0
	}, func(a, b float64) float64 { return min(a, b) })
	add(metrics.GaugeValue, "last_activity_age_seconds",
		"Seconds since the last event, bookmark or list. A healthy watch gets a bookmark about once a minute.",
		func(s *ResourceStatus) float64 {
			if s.LastActivityAge == nil {
				return math.NaN()
			}
			return s.LastActivityAge.Seconds()
		}, func(a, b float64) float64 { return max(a, b) })
	counter("lists_total", "Number of complete lists, streamed or paged.", func(s *ResourceStatus) int64 { return s.Lists })
	counter("relists_total", "Number of complete lists after the first.", func(s *ResourceStatus) int64 { return s.Relists })
	counter("watches_total", "Number of watches that the server accepted, streamed lists included.",
		func(s *ResourceStatus) int64 { return s.Watches })
	counter("events_total", "Number of events received, without those of streamed lists.", func(s *ResourceStatus) int64 { return s.Events })
	counter("failures_total", "Number of lists and watches that failed.", func(s *ResourceStatus) int64 { return s.Failures })
	return c
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, m := range c.all {
		ch <- m.desc
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	united := map[schema.GroupResource][]float64{}
	status := c.factory.Status()
	for i := range status.Resources {
		s := &status.Resources[i]
		name := schema.GroupResource{Group: s.Group, Resource: s.Resource}
		values, known := united[name]
		if !known {
			values = make([]float64, len(c.all))
		}
		for n, m := range c.all {
			if v := m.value(s); known {
				values[n] = m.unite(values[n], v)
			} else {
				values[n] = v
			}
		}
		united[name] = values
	}
	for name, values := range united {
		for n, m := range c.all {
			if !math.IsNaN(values[n]) {
				ch <- metrics.NewLazyConstMetric(m.desc, m.kind, values[n], name.Group, name.Resource)
			}
		}
	}
}
