// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// settle is how long the controller waits with a difference that no event announced. Such a
// difference is found after a start, when the caches of sources and workloads may be moments apart,
// or just before the event arrives. Waiting saves requests, see cacheIsBehind.
const settle = time.Second

// window collects the changes for one reload.
type window struct {
	first, last time.Time
	changed     map[sourceKey]change // the last one of each source
	notBefore   time.Time            // turn in the rollout limit; zero: none taken
	waits       bool                 // the Event about waiting for a Job was sent
	ran         state                // hashes that a Job was created for, until recorded
}

// change is when a source was seen to change.
type change struct {
	at      time.Time
	oldMark bool // see hasOldMark
}

func (w *window) open() bool { return !w.first.IsZero() }

// facts are everything that a decision depends on.
type facts struct {
	workload *workload
	rules    rules
	// sources are the cached sources that the workload references, names or has recorded.
	sources map[sourceKey]source
	// recorded is the state in the annotation or in memory.
	recorded state
	// seen is the part of recorded that only the memory of this process holds.
	seen state
	// firstSight is set if nothing was ever recorded of the workload, except for changes seen
	// since.
	firstSight bool
	window     window
	// rolled is the workload's resourceVersion when somebody else last changed its template, as far
	// as seen.
	rolled string
	now    time.Time
}

// reload is one source that makes the workload roll.
type reload struct {
	key       sourceKey
	match     match
	hash      string // empty: deleted
	container int    // index
	changed   time.Time
}

// plan is what is to be done with a workload.
type plan struct {
	// state is what is to be recorded, with or without reloads; nil means nothing for now.
	state state
	// reloads are due now, in the order of the changes.
	reloads []reload
	// pending is set if there are reloads, or the window may still bring some; decide again after
	// this time.
	pending bool
	after   time.Duration
	// found is set if there is a difference without a window; open one.
	found bool
}

// decide returns what is to be done with a workload. It is pure.
func (c *Config) decide(f *facts) plan {
	next := state{}
	var reloads []reload
	for _, key := range f.watchSet() {
		value, r := c.decideSource(f, key)
		if r != nil {
			reloads = append(reloads, *r)
		}
		next[key] = value
	}
	for _, key := range f.onlyPatterns() {
		// If the disappearance of a source rolls the workload, the source is forgotten with it.
		if _, r := c.decideSource(f, key); r != nil {
			reloads = append(reloads, *r)
		}
	}

	due, wait := c.due(f, reloads)
	if !due {
		return plan{state: f.meanwhile(next, reloads), pending: true, after: wait, found: !f.window.open()}
	}
	// This is the order in which the reloads are written. Among changes of one instant, the first
	// by type and name is written last.
	slices.SortFunc(reloads, func(a, b reload) int {
		return cmp.Or(a.changed.Compare(b.changed), -compareKeys(a.key, b.key))
	})
	return plan{state: next, reloads: reloads}
}

// meanwhile returns what is to be recorded while reloads wait. Usually it is nil, so that one write
// later does both. If the old value of a reload is only in memory, it is recorded now, since it
// would be lost with the process.
func (f *facts) meanwhile(next state, reloads []reload) state {
	var must bool
	for _, r := range reloads {
		was, known := f.recorded[r.key]
		if !known {
			// After any record, the next sight would no longer be the first one.
			return nil
		}
		next[r.key] = was
		if _, only := f.seen[r.key]; only {
			must = true
		}
	}
	if !must {
		return nil
	}
	return next
}

// due reports whether the window is over, and if not, how long it still lasts. Without a window and
// without reloads it is always over.
func (c *Config) due(f *facts, reloads []reload) (bool, time.Duration) {
	first, last := f.window.first, f.window.last
	if !f.window.open() {
		if len(reloads) == 0 {
			return true, 0
		}
		first, last = f.now, f.now
	}
	quiet := c.QuietPeriod
	if d, ok := f.workload.reloadDelay(); ok {
		quiet = d
	}
	at := last.Add(quiet)
	if limit := first.Add(max(c.MaxDelay, quiet)); limit.Before(at) {
		at = limit
	}
	unannounced := func(r reload) bool { return r.changed.IsZero() }
	if settled := first.Add(settle); at.Before(settled) && slices.ContainsFunc(reloads, unannounced) {
		at = settled
	}
	if len(reloads) > 0 && at.Before(f.window.notBefore) {
		at = f.window.notBefore
	}
	wait := at.Sub(f.now)
	return wait <= 0, wait
}

// reloadDelay returns the workload's own quiet period.
func (w *workload) reloadDelay() (time.Duration, bool) {
	d, err := time.ParseDuration(w.meta[nativeDelay])
	return d, err == nil && d > 0
}

// match returns how the workload selects a source. An absent source has no match annotation, so a
// recorded one counts as matched.
func (f *facts) match(key sourceKey) match {
	s := f.sources[key]
	if _, known := f.recorded[key]; known && !s.exists() {
		s.matched = true
	}
	return f.rules.match(key, s)
}

// watchSet returns the sources whose state is recorded: those that are referenced or named, and
// neither excluded nor ignored.
func (f *facts) watchSet() []sourceKey {
	set := map[sourceKey]bool{}
	for _, key := range f.workload.references() {
		set[key] = f.match(key) != no
	}
	for _, key := range f.unreferenced() {
		if !set[key] && f.match(key) == named {
			set[key] = f.sources[key].exists() || f.rules.waitsFor(key)
		}
	}
	return collect(set)
}

// onlyPatterns returns the recorded sources that are gone and that only a pattern names.
func (f *facts) onlyPatterns() []sourceKey {
	set := map[sourceKey]bool{}
	for key, value := range f.recorded {
		set[key] = value != "" && !f.sources[key].exists() && f.match(key) == named && !f.rules.waitsFor(key)
	}
	for _, key := range f.workload.references() {
		delete(set, key)
	}
	return collect(set)
}

// unreferenced returns the sources that may be named without a reference.
func (f *facts) unreferenced() []sourceKey {
	list := slices.Collect(maps.Keys(f.sources))
	for _, t := range sourceTypes {
		for _, p := range f.rules.types[t].named {
			if p.literal {
				list = append(list, sourceKey{t, p.text})
			}
		}
	}
	return list
}

func collect(set map[sourceKey]bool) []sourceKey {
	var list []sourceKey
	for key, in := range set {
		if in {
			list = append(list, key)
		}
	}
	slices.SortFunc(list, compareKeys)
	return list
}

// decideSource compares one source with what is recorded of it. It returns the value to record once
// everything is done, and the reload if there is one.
func (c *Config) decideSource(f *facts, key sourceKey) (string, *reload) {
	current := f.sources[key]
	was, known := f.recorded[key]
	now := current.short()
	r := &reload{key: key, match: f.match(key), hash: current.hash, changed: f.window.changed[key].at}
	var ok bool
	r.container, ok = f.workload.chooseContainer(key, r.match)

	switch {
	case !ok, !known && !c.outOfDate(f, r):
		return now, nil
	case !known:
		return now, r
	case was == now:
		return now, nil
	case was == "" && !c.OnCreate:
		return now, nil
	case now == "" && !c.OnDelete:
		// The old value is kept, so that a source that comes back with the same data is no change.
		return was, nil
	case c.marked(f, r) && !f.changedSince(current) && !f.window.changed[key].oldMark, c.absorbed(f, current):
		return now, nil
	}
	return now, r
}

// outOfDate reports whether, under first-sight=compare, a variable of an earlier reload shows that
// the pods have read other data.
func (c *Config) outOfDate(f *facts, r *reload) bool {
	if !f.firstSight || c.FirstSight != FirstSightCompare || r.hash == "" || c.byAnnotation(f) {
		return false
	}
	value, ok := f.workload.Containers[r.container].Vars[variable(r.key)]
	return ok && value != r.hash
}

// marked reports whether the template already carries the mark of this reload, because another
// manager was first, or because a variable that is to be removed is not there.
func (c *Config) marked(f *facts, r *reload) bool {
	w := f.workload
	if c.restarts(f) {
		return false
	}
	if !c.byAnnotation(f) {
		return f.hasVariable(r.variable())
	}
	return marksSource(w.Template[f.rules.markKey()], w.Namespace, r.key, cmp.Or(r.hash, deletedHash))
}

// hasVariable reports whether a container has the variable that is to be set, or lacks the one that
// is to be removed.
func (f *facts) hasVariable(e envMark) bool {
	value, ok := f.workload.Containers[e.container].Vars[e.name]
	return ok == (e.value != "") && value == e.value
}

// changedSince reports whether the source changed after the last write to the workload. If so, a
// mark of the same data is from an earlier time at which the source had them.
func (f *facts) changedSince(s source) bool {
	order, err := resourceversion.CompareResourceVersion(f.workload.version, s.version)
	return err == nil && order < 0
}

// absorbed reports whether somebody else rolled the workload after the source changed.
func (c *Config) absorbed(f *facts, s source) bool {
	if !c.AbsorbRollouts || f.rolled == "" || !s.exists() {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(f.rolled, s.version)
	return err == nil && order > 0
}

func (c *Config) byAnnotation(f *facts) bool {
	return f.rules.native || c.Strategy == StrategyAnnotations
}

// markKey returns the template's annotation under the annotations strategy.
func (r *rules) markKey() string {
	if r.native {
		return nativeMark
	}
	return compatMark
}
