// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package replicas plans how many replicas of a workload each cluster gets. It is pure. It plans as KubeFed
// does, so that a federation keeps its replicas when it changes hands.
package replicas

import (
	"cmp"
	"hash/fnv"
	"math"
	"slices"
)

// Preference is what a cluster should get.
type Preference struct {
	Min int64 `json:"minReplicas"`
	// Max is nil if there is no limit. It takes precedence over Min.
	Max    *int64 `json:"maxReplicas"`
	Weight int64  `json:"weight"`
}

// AnyCluster is the key of the preference for clusters that have none of their own.
const AnyCluster = "*"

// MaxNumber is the largest number in a preference, and the largest total: a workload cannot have more
// replicas, and no product of two numbers overflows.
const MaxNumber = math.MaxInt32

// Input is what a plan depends on.
type Input struct {
	Total int64
	// Rebalance says that running replicas may be moved.
	Rebalance bool
	// Preferences are by cluster. If there are none, all clusters have the weight 1.
	Preferences map[string]Preference
	Clusters    []string
	// Current is how many replicas are ready, Capacity how many can run. A cluster that is missing in Current
	// has none ready; the capacity of one that is missing in Capacity is not known.
	Current, Capacity map[string]int64
	// Key is NAMESPACE/NAME. Its hash decides which of several clusters with the same weight gets the replicas
	// that are left over, so that it is not the same cluster for every workload.
	Key string
}

// Share is what a cluster gets.
type Share struct {
	// Plan is how many replicas should run, Overflow how many more should wait until they can.
	Plan, Overflow int64
}

// Replicas is what the cluster's workload asks for.
func (s Share) Replicas() int64 { return s.Plan + s.Overflow }

// cluster is a cluster that has a preference.
type cluster struct {
	name          string
	hash          uint32
	min, weight   int64
	max, capacity int64 // math.MaxInt64 if there is no limit
	plan          int64
	// kept is how many of the planned replicas were planned because they run, and are still to be counted
	// against what the weight gives the cluster.
	kept, overflow int64
}

// Plan returns the share of each cluster.
func Plan(input Input) map[string]Share {
	shares := make(map[string]Share, len(input.Clusters))
	clusters := make([]*cluster, 0, len(input.Clusters))
	for _, name := range input.Clusters {
		shares[name] = Share{}
		if c := input.cluster(name); c != nil {
			clusters = append(clusters, c)
		}
	}
	slices.SortFunc(clusters, func(a, b *cluster) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.hash, b.hash), cmp.Compare(a.name, b.name))
	})
	left := input.Total
	for _, c := range clusters {
		c.plan = min(c.min, c.max, c.capacity, left)
		left -= c.plan
	}
	if !input.Rebalance {
		for _, c := range clusters {
			c.kept = max(0, min(input.Current[c.name], c.max, c.capacity)-c.plan)
			c.kept = min(c.kept, left)
			c.plan += c.kept
			left -= c.kept
		}
	}
	open := clusters
	for changed := true; changed && left > 0; {
		open, left, changed = distribute(open, left)
	}
	for _, c := range clusters {
		if !input.Rebalance {
			c.overflow = min(c.overflow, left)
		}
		shares[c.name] = Share{Plan: c.plan, Overflow: c.overflow}
	}
	return shares
}

// cluster returns a cluster before the plan, or nil if nothing is preferred for it.
func (input *Input) cluster(name string) *cluster {
	p, has := input.Preferences[name]
	if !has {
		p, has = input.Preferences[AnyCluster]
	}
	switch {
	case len(input.Preferences) == 0:
		p = Preference{Weight: 1}
	case !has:
		return nil
	}
	c := &cluster{name: name, min: p.Min, weight: p.Weight, max: math.MaxInt64, capacity: math.MaxInt64}
	if p.Max != nil {
		c.max = *p.Max
	}
	if capacity, known := input.Capacity[name]; known {
		c.capacity = max(0, capacity)
	}
	h := fnv.New32() // FNV-1, not FNV-1a
	_, _ = h.Write([]byte(name + input.Key))
	c.hash = h.Sum32()
	return c
}

// distribute gives each open cluster its part, by weight, of what is left. It returns the clusters that can
// take more, what is left then, and whether anything changed.
func distribute(open []*cluster, left int64) (remaining []*cluster, _ int64, changed bool) {
	due, weights := left, int64(0)
	for _, c := range open {
		weights += c.weight
	}
	if weights == 0 {
		return nil, left, false
	}
	for _, c := range open {
		part := min((due*c.weight+weights-1)/weights, left) // rounded up
		used := min(part, c.kept)
		c.kept -= used
		total, full := c.plan+part-used, false
		if total > c.max {
			total, full = c.max, true
		}
		if total > c.capacity {
			c.overflow, total, full = total-c.capacity, c.capacity, true
		}
		changed = changed || used > 0 || total > c.plan
		left -= total - c.plan
		c.plan = total
		if !full {
			remaining = append(remaining, c)
		}
	}
	return remaining, left, changed
}
