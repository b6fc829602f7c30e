// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"math"

	"k8s.io/component-base/metrics"
)

type resourceMetric struct {
	desc  *metrics.Desc
	kind  metrics.ValueType
	value func(*ResourceStatus) float64
}

func newMetric(kind metrics.ValueType, name, help string, value func(*ResourceStatus) float64) resourceMetric {
	return resourceMetric{metrics.NewDesc(metrics.BuildFQName("quartermaster", "informer", name), help,
		[]string{"cluster", "group", "resource"}, nil, metrics.ALPHA, ""), kind, value}
}

func newCounter(name, help string, value func(*ResourceStatus) int64) resourceMetric {
	return newMetric(metrics.CounterValue, name, help, func(s *ResourceStatus) float64 { return float64(value(s)) })
}

// resourceMetrics are computed at each scrape, from the counts that /debug/informers shows too.
func resourceMetrics() []resourceMetric {
	return []resourceMetric{
		newMetric(metrics.GaugeValue, "objects", "Number of objects in the cache.",
			func(s *ResourceStatus) float64 { return float64(s.Objects) }),
		newMetric(metrics.GaugeValue, "misfits", "Number of objects that do not fit their Go type and are left out.",
			func(s *ResourceStatus) float64 { return float64(s.Misfits) }),
		newMetric(metrics.GaugeValue, "synced", "1 if the cache has been filled once.", func(s *ResourceStatus) float64 {
			if s.Synced {
				return 1
			}
			return 0
		}),
		newMetric(metrics.GaugeValue, "last_activity_age_seconds",
			"Seconds since the last event, bookmark or list. A healthy watch gets a bookmark about once a minute.",
			func(s *ResourceStatus) float64 {
				if s.LastActivityAge == nil {
					return math.NaN()
				}
				return s.LastActivityAge.Seconds()
			}),
		newCounter("lists_total", "Number of complete lists, streamed or paged.", func(s *ResourceStatus) int64 { return s.Lists }),
		newCounter("relists_total", "Number of complete lists after the first.", func(s *ResourceStatus) int64 { return s.Relists }),
		newCounter("watches_total", "Number of watches that the server accepted, streamed lists included.",
			func(s *ResourceStatus) int64 { return s.Watches }),
		newCounter("events_total", "Number of events received, without those of streamed lists.", func(s *ResourceStatus) int64 { return s.Events }),
		newCounter("failures_total", "Number of lists and watches that failed.", func(s *ResourceStatus) int64 { return s.Failures }),
	}
}

// add makes s the status of two informers together, or of two namespaces.
func (s *ResourceStatus) add(other *ResourceStatus) {
	s.Objects += other.Objects
	s.Misfits += other.Misfits
	s.Synced = s.Synced && other.Synced
	if s.LastActivityAge == nil || other.LastActivityAge != nil && s.LastActivityAge.Duration < other.LastActivityAge.Duration {
		s.LastActivityAge = other.LastActivityAge
	}
	s.Lists += other.Lists
	s.Relists += other.Relists
	s.Watches += other.Watches
	s.Events += other.Events
	s.Failures += other.Failures
}

// DescribeWithStability implements metrics.StableCollector.
func (c *Caches) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

// CollectWithStability implements metrics.StableCollector. All informers of a resource in clusters of one
// name count together: several controllers may have opened one cluster. In the process's own cluster,
// followed resources do not count: it may be that nobody wants them.
func (c *Caches) CollectWithStability(ch chan<- metrics.Metric) {
	sums := map[[3]string]*ResourceStatus{} // by cluster, group and resource
	for _, cluster := range c.clusters() {
		informers := cluster.informers
		if cluster.cfg.Cluster != "" {
			informers = cluster.allInformers()
		}
		for _, i := range informers {
			status, labels := i.status(), [3]string{cluster.cfg.Cluster, i.plan.resource.Group, i.plan.resource.Resource}
			for at := range status {
				if sum := sums[labels]; sum != nil {
					sum.add(&status[at])
				} else {
					sums[labels] = &status[at]
				}
			}
		}
	}
	for labels, status := range sums {
		for _, m := range c.metrics {
			if value := m.value(status); !math.IsNaN(value) {
				ch <- metrics.NewLazyConstMetric(m.desc, m.kind, value, labels[:]...)
			}
		}
	}
}
