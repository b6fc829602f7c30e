// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"maps"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/lru"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

const (
	// A drift is repaired at once, then not before firstRepair after the last time, twice that, and
	// so on up to maxRepair. The count starts again if none is due for quietRepair.
	firstRepair = time.Second
	maxRepair   = 5 * time.Minute
	quietRepair = 30 * time.Minute
	// fightAfter is the repair from which on the source's owner is told.
	fightAfter = 5
	// marksPerSecond limits the markers that are added to copies of the replicator.
	marksPerSecond = 5
	// eventInterval is how long no second Event of an object and reason is sent.
	eventInterval = 10 * time.Minute
	// maxAged is how many entries that go only by age are kept before old ones go.
	maxAged = 1000
)

// memory is what a run remembers.
type memory struct {
	metrics *domainMetrics
	marks   *rate.Limiter
	mu      sync.Mutex
	targets map[policy.Key]*entry
	gone    map[policy.Key]time.Time
	told    *lru.Cache // of an event: when it was sent
}

// entry is what is remembered of a target.
type entry struct {
	state metrics.GaugeMetric // that counts it
	// source is the version of the source that was written last, which is drift if it has to be
	// written again; next is when that may be.
	source  string
	repairs int
	next    time.Time
	markAt  time.Time // when its turn for a marker comes
}

type event struct {
	about  policy.Key
	reason string
}

func newMemory(m *domainMetrics) *memory {
	all := &memory{metrics: m, marks: rate.NewLimiter(marksPerSecond, 1), told: lru.New(maxAged)}
	all.clear()
	return all
}

func (m *memory) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.targets {
		e.state.Dec()
	}
	m.targets, m.gone = map[policy.Key]*entry{}, map[policy.Key]time.Time{}
	m.told.Clear()
}

// note remembers how a target stands; without a state, it is forgotten.
func (m *memory) note(key policy.Key, p *policy.Plan) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e != nil {
		e.state.Dec()
	}
	if p.State == "" {
		delete(m.targets, key)
		return
	}
	if e == nil {
		e = &entry{}
		// The name of a cached object is part of a longer text.
		m.targets[policy.NewKey(key.Kind, strings.Clone(key.Namespace), strings.Clone(key.Name))] = e
	}
	e.state = m.metrics.targets.WithLabelValues(string(key.Kind), string(p.Dialect), string(p.Mode), string(p.State))
	e.state.Inc()
}

// pace returns how long a write has to wait: for the next repair of the target, or for its turn if it
// only adds a marker.
func (m *memory) pace(key policy.Key, a policy.Action, source string, now time.Time) (wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e == nil {
		return 0
	}
	if a == policy.Mark {
		if e.markAt.IsZero() {
			e.markAt = now.Add(m.marks.ReserveN(now, 1).DelayFrom(now))
		}
		wait = e.markAt.Sub(now)
	}
	if source == e.source && source != "" {
		wait = max(wait, e.next.Sub(now))
	}
	return max(wait, 0)
}

// wrote remembers a write, and returns how many drifts in a row have been repaired with it.
func (m *memory) wrote(key policy.Key, source string, now time.Time) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.targets[key]
	if e == nil {
		return 0
	}
	switch {
	case e.source != source:
		e.repairs = 0
	case now.Sub(e.next) > quietRepair:
		e.repairs = 1
	default:
		e.repairs++
	}
	e.source, e.next, e.markAt = source, now, time.Time{}
	if e.repairs > 0 {
		e.next = now.Add(min(firstRepair<<min(e.repairs-1, 10), maxRepair))
	}
	return e.repairs
}

// exists notes that a source is there, perhaps again.
func (m *memory) exists(key policy.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.gone, key)
}

// goneSince returns since when a source has been known to be gone; it becomes known now.
func (m *memory) goneSince(key policy.Key, now time.Time) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if since, known := m.gone[key]; known {
		return since
	}
	if len(m.gone) >= maxAged {
		maps.DeleteFunc(m.gone, func(_ policy.Key, since time.Time) bool { return now.Sub(since) > eventInterval })
	}
	m.gone[key] = now
	return now
}

// tell reports whether an Event is to be sent: whether there was none a short while ago.
func (m *memory) tell(e event, now time.Time) bool {
	if sent, was := m.told.Get(e); was && now.Sub(sent.(time.Time)) < eventInterval {
		return false
	}
	m.told.Add(e, now)
	return true
}
