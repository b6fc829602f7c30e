// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"math"

	"k8s.io/component-base/metrics"
)

// collector computes the metrics at each scrape, from the counts that /debug/informers shows too.
type collector struct {
	metrics.BaseStableCollector
	factory     *Factory
	perResource []resourceMetric
	mutations   *metrics.Desc
}

type resourceMetric struct {
	desc *metrics.Desc
	kind metrics.ValueType
	// value returns NaN if there is none yet.
	value func(*ResourceStatus) float64
}

func newCollector(f *Factory) *collector {
	c := &collector{factory: f}
	gauge := func(name, help string, value func(*ResourceStatus) float64) {
		c.perResource = append(c.perResource, resourceMetric{newDesc(name, help, "group", "resource"), metrics.GaugeValue, value})
	}
	counter := func(name, help string, value func(*ResourceStatus) int64) {
		c.perResource = append(c.perResource, resourceMetric{newDesc(name, help, "group", "resource"), metrics.CounterValue,
			func(s *ResourceStatus) float64 { return float64(value(s)) }})
	}
	gauge("objects", "Number of objects in the cache.",
		func(s *ResourceStatus) float64 { return float64(s.Objects) })
	gauge("synced", "1 if the cache has been filled once.", func(s *ResourceStatus) float64 {
		if s.Synced {
			return 1
		}
		return 0
	})
	gauge("last_activity_age_seconds",
		"Seconds since the last event, bookmark or list. A healthy watch gets a bookmark about once a minute.",
		func(s *ResourceStatus) float64 {
			if s.LastActivityAge == nil {
				return math.NaN()
			}
			return s.LastActivityAge.Seconds()
		})
	counter("lists_total", "Number of complete lists, streamed or paged.", func(s *ResourceStatus) int64 { return s.Lists })
	counter("relists_total", "Number of complete lists after the first.", func(s *ResourceStatus) int64 { return s.Relists })
	counter("watches_total", "Number of watches that the server accepted, streamed lists included.",
		func(s *ResourceStatus) int64 { return s.Watches })
	counter("events_total", "Number of events received, those of streamed lists included.",
		func(s *ResourceStatus) int64 { return s.Events })
	counter("failures_total", "Number of lists and watches that failed.", func(s *ResourceStatus) int64 { return s.Failures })
	c.mutations = newDesc("cache_mutations_total",
		"Number of cached objects that were found changed. Without --cache-mutation-detection nobody looks.")
	return c
}

func newDesc(name, help string, labels ...string) *metrics.Desc {
	return metrics.NewDesc(metrics.BuildFQName("quartermaster", "informer", name), help, labels, nil, metrics.ALPHA, "")
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, m := range c.perResource {
		ch <- m.desc
	}
	ch <- c.mutations
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	status := c.factory.Status(false)
	for i := range status.Resources {
		s := &status.Resources[i]
		for _, m := range c.perResource {
			if v := m.value(s); !math.IsNaN(v) {
				ch <- metrics.NewLazyConstMetric(m.desc, m.kind, v, s.Group, s.Resource)
			}
		}
	}
	ch <- metrics.NewLazyConstMetric(c.mutations, metrics.CounterValue, float64(status.CacheMutations))
}
