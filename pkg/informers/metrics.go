// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"math"
	"slices"

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
		newMetric(metrics.GaugeValue, "misfits", "Number of objects that do not fit their Go type: left out, or kept in their last state that fitted.",
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
		newCounter("lists_total", "Number of complete lists, streamed or paged.",
			func(s *ResourceStatus) int64 { return s.Lists }),
		newCounter("relists_total", "Number of complete lists after the first.",
			func(s *ResourceStatus) int64 { return s.Relists }),
		newCounter("watches_total", "Number of watches that the server accepted, streamed lists included.",
			func(s *ResourceStatus) int64 { return s.Watches }),
		newCounter("events_total", "Number of events received, without those of streamed lists.",
			func(s *ResourceStatus) int64 { return s.Events }),
		newCounter("failures_total", "Number of lists and watches that failed.",
			func(s *ResourceStatus) int64 { return s.Failures }),
	}
}

// add makes s the status of two informers together, or of two namespaces.
func (s *ResourceStatus) add(other *ResourceStatus) {
	s.Objects += other.Objects
	s.Misfits += other.Misfits
	s.Synced = s.Synced && other.Synced
	age, otherAge := s.LastActivityAge, other.LastActivityAge
	if age == nil || otherAge != nil && age.Duration < otherAge.Duration {
		s.LastActivityAge = otherAge
	}
	s.addCounts(other)
}

// addCounts adds what the other status has counted.
func (s *ResourceStatus) addCounts(other *ResourceStatus) {
	s.Lists += other.Lists
	s.Relists += other.Relists
	s.Watches += other.Watches
	s.Events += other.Events
	s.Failures += other.Failures
}

// seriesLabels are the labels of a series: cluster, group and resource.
type seriesLabels [3]string

func (i *informer) labels(cluster string) seriesLabels {
	return seriesLabels{cluster, i.plan.resource.Group, i.plan.resource.Resource}
}

// counted returns the status of an informer in each of its namespaces, as far as it counts in the metrics:
// see CollectWithStability.
func (i *informer) counted() []ResourceStatus {
	all := i.status()
	if i.duringRun {
		all = slices.DeleteFunc(all, func(s ResourceStatus) bool { return !s.Synced })
		for n := range all {
			all[n].Failures = 0
		}
	}
	return all
}

// sums returns the status of all informers of a series together. Counters include informers that have ended,
// since a counter that sinks would look as if the process had started anew.
func (c *Caches) sums() map[seriesLabels]*ResourceStatus {
	c.mu.Lock() // no informer ends meanwhile
	defer c.mu.Unlock()
	sums := map[seriesLabels]*ResourceStatus{}
	for _, cluster := range c.all {
		for _, i := range cluster.allInformers() {
			for _, status := range i.counted() {
				if sum := sums[i.labels(cluster.cfg.Cluster)]; sum != nil {
					sum.add(&status)
				} else {
					sums[i.labels(cluster.cfg.Cluster)] = &status
				}
			}
		}
	}
	for labels, sum := range sums {
		ended := c.ended[labels]
		sum.addCounts(&ended)
	}
	return sums
}

// keepCounts keeps what an informer of a cluster has counted. The caller holds mu.
func (c *Caches) keepCounts(cluster string, i *informer) {
	sum := c.ended[i.labels(cluster)]
	for _, status := range i.counted() {
		sum.addCounts(&status)
	}
	c.ended[i.labels(cluster)] = sum
}

// DescribeWithStability implements metrics.StableCollector.
func (c *Caches) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

// CollectWithStability implements metrics.StableCollector. All informers of a resource in clusters of one
// name count together: several controllers may have opened one cluster. Of what is followed while Run runs,
// in the process's own cluster, neither failures nor an incomplete cache count: it may be that no user wants
// these resources.
func (c *Caches) CollectWithStability(ch chan<- metrics.Metric) {
	for labels, status := range c.sums() {
		for _, m := range c.metrics {
			if value := m.value(status); !math.IsNaN(value) {
				ch <- metrics.NewLazyConstMetric(m.desc, m.kind, value, labels[:]...)
			}
		}
	}
}
