// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/notices"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

const (
	// The first drift is repaired at once, the next one firstRepairDelay after the first repair at the earliest.
	// The delay doubles with each further repair, up to maxRepairDelay. After driftQuietPeriod without a drift
	// the count starts again.
	firstRepairDelay = time.Second
	maxRepairDelay   = 5 * time.Minute
	driftQuietPeriod = 30 * time.Minute
	// fightThreshold is the number of repairs after which the source's owner is told.
	fightThreshold = 5
	// marksPerSecond limits the markers that are added to copies of the replicator; a copy that has to wait
	// is tried again after markRetryDelay.
	marksPerSecond = 5
	markRetryDelay = time.Second
	// eventInterval is the least time between two Events of one object and reason.
	eventInterval = 10 * time.Minute
)

// memory is what a run remembers of each target and of each source.
type memory struct {
	metrics     *controllerMetrics
	markLimiter *rate.Limiter
	notices     *notices.Memory // the Events that were sent lately
	mu          sync.Mutex
	targets     map[policy.Key]*entry
	// sources has the number of namespaces for which each pushing source counts, and nothing else of a source,
	// since anybody may have many.
	sources map[policy.Key]int
}

// entry is what is remembered of a target.
type entry struct {
	gauge metrics.GaugeMetric // counts the targets in the same state as this one
	// sourceVersion is the version of the source that was written last. A write of the same version again
	// repairs a drift, and waits until nextRepair.
	sourceVersion string
	repairs       int
	nextRepair    time.Time
	// unwanted is why nobody wants the target, and since when; unmarkedSource is the source of a copy without a
	// marker.
	unwanted       policy.Unwanted
	unwantedSince  time.Time
	unmarkedSource policy.Key
}

// event is the key of an Event's notice.
type event struct {
	object policy.Key
	reason string
}

func newMemory(m *controllerMetrics) *memory {
	mem := &memory{metrics: m, markLimiter: rate.NewLimiter(marksPerSecond, marksPerSecond), notices: notices.New(eventInterval)}
	mem.clear()
	return mem
}

func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.targets {
		e.gauge.Dec()
	}
	m.targets, m.sources = map[policy.Key]*entry{}, map[policy.Key]int{}
	m.notices.Clear()
}

// setTarget remembers how a target stands at now; without a state, it is forgotten.
func (m *memory) setTarget(key policy.Key, plan *policy.Plan, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e != nil {
		e.gauge.Dec()
	}
	if plan.State == "" {
		delete(m.targets, key)
		return
	}
	if e == nil {
		e = &entry{}
		// The names of a cached object are substrings, which would keep a longer text in memory.
		m.targets[policy.NewKey(key.Kind, strings.Clone(key.Namespace), strings.Clone(key.Name))] = e
	}
	e.gauge = m.metrics.targets.WithLabelValues(string(key.Kind), string(plan.Dialect), string(plan.Mode), string(plan.State))
	e.gauge.Inc()
	if plan.Unwanted != e.unwanted {
		e.unwanted, e.unwantedSince = plan.Unwanted, now
	}
	e.unmarkedSource = policy.Key{}
	if plan.Adopted {
		e.unmarkedSource = plan.Source
	}
}

// target returns what is remembered of a target.
func (m *memory) target(key policy.Key) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.targets[key]; e != nil {
		return *e
	}
	return entry{}
}

// source returns for how many namespaces a pushing source counts.
func (m *memory) source(key policy.Key) (namespaces int, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	namespaces, known = m.sources[key]
	return namespaces, known
}

func (m *memory) setSource(key policy.Key, namespaces int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sources[policy.NewKey(key.Kind, strings.Clone(key.Namespace), strings.Clone(key.Name))] = namespaces
}

func (m *memory) forgetSource(key policy.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.sources, key)
}

// writeDelay returns how long a write has to wait: until the next repair of the target is due or, if the
// write only adds a marker, until the rate allows it.
func (m *memory) writeDelay(key policy.Key, action policy.Action, source string, now time.Time) (wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e == nil {
		return 0
	}
	if source == e.sourceVersion && source != "" {
		wait = max(e.nextRepair.Sub(now), 0)
	}
	if wait == 0 && action == policy.Mark && !m.markLimiter.AllowN(now, 1) {
		wait = markRetryDelay // the limiter reserves nothing, else each attempt would reserve again
	}
	return wait
}

// recordWrite remembers a write, and returns how many drifts in a row have been repaired, this one included.
func (m *memory) recordWrite(key policy.Key, source string, now time.Time) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e == nil {
		return 0
	}
	switch {
	case e.sourceVersion != source:
		e.repairs = 0
	case now.Sub(e.nextRepair) > driftQuietPeriod:
		e.repairs = 1
	default:
		e.repairs++
	}
	e.sourceVersion, e.nextRepair = source, now
	if e.repairs > 0 {
		e.nextRepair = now.Add(min(firstRepairDelay<<min(e.repairs-1, 10), maxRepairDelay))
	}
	return e.repairs
}
