// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"slices"
	"strings"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
)

// Status says what a controller is doing. It is served as JSON for people. The fields may change between
// releases.
type Status struct {
	// Set by the loop:

	Name string `json:"name"`
	// Phase is one of Stopped, Syncing, Running, Draining.
	Phase Phase `json:"phase"`
	// PhaseSince is when Phase began; zero before the first Run.
	PhaseSince time.Time `json:"phaseSince,omitzero"`
	Workers    int       `json:"workers"`
	// QueueDepth counts the keys that wait for a worker now, Delayed those whose delay or back-off has yet to
	// pass, Failing those whose last reconcile has failed (the first three conflicts in a row and refusals of
	// --dry-run do not count), and Blocked those that wait until a cache has their namespace or their object, or
	// this replica leads.
	QueueDepth int `json:"queueDepth"`
	Delayed    int `json:"delayed"`
	Failing    int `json:"failing"`
	Blocked    int `json:"blocked"`
	// FailingKeys and BlockedKeys name ten of them at most.
	FailingKeys []string `json:"failingKeys,omitempty"`
	BlockedKeys []string `json:"blockedKeys,omitempty"`
	// ToReplay counts the cached objects whose keys are not in the queue yet, after Run has begun or a watch
	// was added.
	ToReplay int        `json:"toReplay"`
	InFlight []InFlight `json:"inFlight"`

	Reconciles uint64 `json:"reconciles"`
	Errors     uint64 `json:"errors"`
	// Panics counts the panics of reconciles. The metric also counts those of other functions.
	Panics    uint64     `json:"panics"`
	LastError *LastError `json:"lastError,omitempty"`

	// Set by the controller:

	// Details is the controller's own part of the status, as JSON: a copy, which nobody changes.
	Details any `json:"details,omitempty"`
	// Problem is why the controller's health check fails, or "" if it passes. The host adds the problems that it
	// knows of.
	Problem string `json:"problem,omitempty"`

	// Set by the host:

	// Restarts counts how often Run has ended unexpectedly.
	Restarts uint64 `json:"restarts"`
}

// Phase is a stage in the life of a loop.
type Phase string

const (
	// PhaseStopped is the phase before and after Run.
	PhaseStopped Phase = "Stopped"
	// PhaseSyncing is the phase in which Run waits for the informers, and lists the objects in them.
	PhaseSyncing Phase = "Syncing"
	// PhaseRunning is the phase in which the workers reconcile. At first, the objects in the informers are
	// mapped beside it.
	PhaseRunning Phase = "Running"
	// PhaseDraining is the phase in which Run finishes what is in flight and takes no more keys.
	PhaseDraining Phase = "Draining"
)

// InFlight is a key that a worker is reconciling.
type InFlight struct {
	Key   string    `json:"key"`
	Since time.Time `json:"since"`
}

// LastError is the most recent failure; later successes do not clear it.
type LastError struct {
	Key  string    `json:"key"`
	Text string    `json:"text"`
	Time time.Time `json:"time"`
}

// Status returns a snapshot, with the keys in flight sorted by name.
func (l *Loop[K]) Status() Status {
	due, delayed := l.queue.counts() // before mu: reconciles must not wait for both locks
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Status{
		Name:        l.opts.String(),
		Phase:       l.phase,
		PhaseSince:  l.phaseSince,
		Workers:     l.opts.Workers,
		QueueDepth:  due,
		Delayed:     delayed,
		Failing:     len(l.failing),
		FailingKeys: someOf(l.failing),
		Blocked:     len(l.blocked),
		BlockedKeys: someOf(l.blocked),
		ToReplay:    int(l.toReplay.Load()),
		InFlight:    make([]InFlight, 0, len(l.inFlight)),
		Reconciles:  l.counts.reconciles,
		Errors:      l.counts.errors,
		Panics:      l.counts.panics,
		LastError:   l.lastErr,
	}
	for _, reconcile := range l.inFlight {
		s.InFlight = append(s.InFlight, reconcile)
	}
	slices.SortFunc(s.InFlight, func(a, b InFlight) int { return strings.Compare(a.Key, b.Key) })
	return s
}

// now returns what the metrics show of the loop. Scrapes ask for it several times.
func (l *Loop[K]) now() loopmetrics.Now {
	due, _ := l.queue.counts()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := loopmetrics.Now{Depth: due, Failing: len(l.failing), Blocked: len(l.blocked), ToReplay: int(l.toReplay.Load())}
	for _, reconcile := range l.inFlight {
		n.Longest = max(n.Longest, time.Since(reconcile.Since))
	}
	return n
}

// maxShown is how many failing and blocked keys a status names.
const maxShown = 10

// someOf returns the texts of the first maxShown keys, in order.
func someOf[K comparable](names map[K]string) (first []string) {
	for _, name := range names {
		if i, _ := slices.BinarySearch(first, name); i < maxShown {
			first = slices.Insert(first, i, name)
			first = first[:min(len(first), maxShown)]
		}
	}
	return first
}

// record records a reconcile for the status.
func (l *Loop[K]) record(key, result string, err error) {
	if result == loopmetrics.Panic {
		l.opts.Metrics.Panicked(l.opts.Name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.reconciles++
	if err == nil || result == loopmetrics.Conflict || result == loopmetrics.NotLeading {
		return
	}
	switch result {
	case loopmetrics.Panic:
		l.counts.panics++
	case loopmetrics.Error, loopmetrics.Terminal:
		l.counts.errors++
	}
	l.lastErr = &LastError{Key: key, Text: err.Error(), Time: time.Now()}
}

// LongestRunning returns the key that has been in flight for longest, and for how long. It returns "" and 0
// if no key is in flight.
func (s Status) LongestRunning(now time.Time) (key string, running time.Duration) {
	for _, reconcile := range s.InFlight {
		if d := now.Sub(reconcile.Since); d >= running {
			key, running = reconcile.Key, d
		}
	}
	return key, running
}

// In returns the status with where, such as " in cluster east", behind the keys. It leaves alone the arrays,
// which their author may retain.
func (s Status) In(where string) Status {
	s.InFlight, s.FailingKeys, s.BlockedKeys = slices.Clone(s.InFlight), slices.Clone(s.FailingKeys), slices.Clone(s.BlockedKeys)
	for i := range s.InFlight {
		s.InFlight[i].Key += where
	}
	for _, keys := range [][]string{s.FailingKeys, s.BlockedKeys} {
		for i := range keys {
			keys[i] += where
		}
	}
	if s.LastError != nil {
		s.LastError = &LastError{s.LastError.Key + where, s.LastError.Text, s.LastError.Time}
	}
	return s
}

// Add adds what another loop of the controller does, apart from its phase.
func (s *Status) Add(other Status) {
	s.Workers += other.Workers
	s.QueueDepth += other.QueueDepth
	s.Delayed += other.Delayed
	s.Failing += other.Failing
	s.Blocked += other.Blocked
	s.FailingKeys = joined(s.FailingKeys, other.FailingKeys)
	s.BlockedKeys = joined(s.BlockedKeys, other.BlockedKeys)
	s.ToReplay += other.ToReplay
	s.InFlight = append(s.InFlight, other.InFlight...)
	s.Reconciles += other.Reconciles
	s.Errors += other.Errors
	s.Panics += other.Panics
	if s.LastError == nil || other.LastError != nil && other.LastError.Time.After(s.LastError.Time) {
		s.LastError = other.LastError
	}
}

// joined returns up to maxShown keys of two loops, by turns: one loop must not hide the other.
func joined(a, b []string) (all []string) {
	for i := range maxShown {
		all = slices.Concat(all, a[min(i, len(a)):min(i+1, len(a))], b[min(i, len(b)):min(i+1, len(b))])
	}
	return all[:min(len(all), maxShown)]
}
