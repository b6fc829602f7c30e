// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// MaxSources limits the sources that a workload watches because its patterns name them, and, apart from
// these, all other sources. Their state has to fit into an annotation, and each may take a request.
const MaxSources = 300

// Facts are everything that a decision depends on.
type Facts struct {
	Workload  *Workload
	Selection *Selection
	// Sources are the cached sources that the workload references, names or has recorded.
	Sources map[SourceKey]Source
	// RecordedState is what was last recorded of the workload; nil if nothing ever was.
	RecordedState State
	Window        Window
	Now           time.Time
}

// Reload is one source that makes the workload roll.
type Reload struct {
	Key       SourceKey
	Hash      string // empty: deleted
	match     Match
	container int // index
	changed   time.Time
}

// Plan is what is to be done with a workload.
type Plan struct {
	// State is what is to be recorded, with or without reloads; nil means nothing for now.
	State State
	// Reloads are due now, in the order of the changes.
	Reloads []Reload
	// TrustedSources are the sources for which the cached data replace what is recorded, with or without a
	// reload. Data of an outdated cache must not replace it, see cacheIsBehind in configreload.
	TrustedSources []SourceKey
	// Pending is set if there are reloads, or the window may still bring some; decide again after this
	// time.
	Pending      bool
	RequeueAfter time.Duration
	// OpensWindow is set if there is a difference without a window; open a window.
	OpensWindow bool
	// Problems are the problems of the selection and of the selected sources.
	Problems []Problem
}

// HasNamedSource reports whether a reload is for a source named by an annotation, so that it needs no
// reference.
func (p *Plan) HasNamedSource() bool {
	return slices.ContainsFunc(p.Reloads, func(r Reload) bool { return r.match == Named })
}

// Hashes returns the hashes of the sources that cause the reloads.
func (p *Plan) Hashes() State {
	s := State{}
	for _, r := range p.Reloads {
		s[r.Key] = r.Hash
	}
	return s
}

// Decide returns what is to be done with a workload.
func (o *Options) Decide(facts *Facts) Plan {
	plan := Plan{Problems: facts.Selection.Problems}
	next := State{}
	var reloads []Reload
	watched, tooMany := facts.watchSet()
	if tooMany {
		// The text omits the number of sources: with it, each change of the number would cause another Event.
		plan.Problems = append(slices.Clone(plan.Problems), Problem{"sources", fmt.Sprintf(
			"the workload refers to more than %d, or its patterns name more; only the first by name are watched", MaxSources)})
	}
	for _, key := range watched {
		value, r := o.decideSource(facts, key)
		if r != nil {
			reloads = append(reloads, *r)
		}
		if recorded, known := facts.RecordedState[key]; r != nil || known && value != recorded {
			plan.TrustedSources = append(plan.TrustedSources, key)
		}
		next[key] = value
	}
	for _, key := range facts.goneSourcesNamedByPattern() {
		// The reload for a source that has disappeared also drops the source from the state.
		if _, r := o.decideSource(facts, key); r != nil {
			reloads = append(reloads, *r)
			plan.TrustedSources = append(plan.TrustedSources, key)
		}
	}

	due, wait := o.windowOver(facts, reloads)
	if !due {
		plan.TrustedSources, plan.Pending, plan.RequeueAfter, plan.OpensWindow = nil, true, wait, !facts.Window.IsOpen()
		return plan
	}
	// This is the order in which the reloads are written. Among changes of one instant, the first
	// by type and name is written last.
	slices.SortFunc(reloads, func(a, b Reload) int {
		return cmp.Or(a.changed.Compare(b.changed), -compareKeys(a.Key, b.Key))
	})
	plan.State, plan.Reloads = next, reloads
	return plan
}

// windowOver reports whether the window is over, and if not, how long it still lasts. Without window and
// reloads it returns true.
func (o *Options) windowOver(facts *Facts, reloads []Reload) (bool, time.Duration) {
	first, last := facts.Window.First, facts.Window.Last
	if !facts.Window.IsOpen() {
		if len(reloads) == 0 {
			return true, 0
		}
		first, last = facts.Now, facts.Now
	}
	quiet := cmp.Or(facts.Selection.Delay, o.QuietPeriod)
	at := last.Add(quiet)
	if limit := first.Add(max(o.MaxDelay, quiet)); limit.Before(at) {
		at = limit
	}
	wait := at.Sub(facts.Now)
	return wait <= 0, wait
}

// match returns how the workload selects a source. An absent source has no match annotation, so a
// recorded absent source counts as matched.
func (f *Facts) match(key SourceKey) Match {
	s := f.Sources[key]
	if _, known := f.RecordedState[key]; known && !s.Exists() {
		s.Matched = true
	}
	return f.Selection.match(key, s)
}

// watchSet returns the sources whose state is recorded: each that is referenced or named, and neither
// excluded nor ignored. tooMany is set if there are more than MaxSources.
func (f *Facts) watchSet() (list []SourceKey, tooMany bool) {
	set, patternSet := map[SourceKey]bool{}, map[SourceKey]bool{}
	for _, key := range f.Workload.References() {
		set[key] = f.match(key) != No
	}
	for key := range f.Selection.Names {
		set[key] = set[key] || f.match(key) == Named
	}
	for key, s := range f.Sources {
		patternSet[key] = !set[key] && s.Exists() && f.match(key) == Named && !f.Selection.namesExactly(key)
	}
	list, tooMany = collectSources(set)
	more, alsoTooMany := collectSources(patternSet)
	list = append(list, more...)
	slices.SortFunc(list, compareKeys)
	return list, tooMany || alsoTooMany
}

// goneSourcesNamedByPattern returns the recorded sources that are gone and that only a pattern names.
func (f *Facts) goneSourcesNamedByPattern() []SourceKey {
	set := map[SourceKey]bool{}
	for key, value := range f.RecordedState {
		set[key] = value != "" && !f.Sources[key].Exists() && f.match(key) == Named && !f.Selection.namesExactly(key)
	}
	for _, key := range f.Workload.References() {
		delete(set, key)
	}
	list, _ := collectSources(set)
	return list
}

// collectSources returns the members of a set, sorted, or only the first members if there are too many.
func collectSources(set map[SourceKey]bool) (list []SourceKey, tooMany bool) {
	for key, isMember := range set {
		if isMember {
			list = append(list, key)
		}
	}
	slices.SortFunc(list, compareKeys)
	return list[:min(len(list), MaxSources)], len(list) > MaxSources
}

// decideSource compares one source with its record. It returns the value to record once everything is
// done, and the reload if there is one.
func (o *Options) decideSource(facts *Facts, key SourceKey) (string, *Reload) {
	workload, source, change := facts.Workload, facts.Sources[key], facts.Window.Changes[key]
	reload := &Reload{Key: key, match: facts.match(key), Hash: source.Hash, changed: change.At}
	current := source.RecordedHash()
	recorded, known := facts.RecordedState[key]
	if !known && !change.At.IsZero() {
		recorded, known = change.Before, true
	}
	appeared, gone := recorded == "", current == ""
	var marked bool
	reload.container, marked = workload.chooseContainer(key, reload.match)
	switch {
	case !marked:
		return current, nil
	// A class has data only while pods mount it. Only a new mount of a running pod is a change.
	case key.Type == SecretProviderClass && source.ChangedVersion == "":
		return cmp.Or(current, recorded), nil
	case known && recorded == current:
		return current, nil
	// The pods began with this data. A recorded older state came from a cache of sources that was behind.
	case Newer(workload.CreatedVersion, cmp.Or(source.ChangedVersion, source.Version)):
		return current, nil
	// The pods may have read the source before it changed, although no state recorded it then.
	case appeared && Newer(source.ChangedVersion, workload.ContentVersion):
		return current, reload
	case !known, appeared && !o.OnCreate:
		return current, nil
	// The old value is kept, so that a source that comes back with the same data is not a change.
	case gone && !o.OnDelete:
		return recorded, nil
	// There is no variable to remove; the original does not roll either.
	case gone && !o.marksByAnnotation(facts) && !slices.Contains(workload.Containers[reload.container].Vars, variableName(key)):
		return current, nil
	}
	return current, reload
}

func (o *Options) marksByAnnotation(facts *Facts) bool {
	return facts.Selection.native || o.Strategy == StrategyAnnotations
}

// Concerns reports whether a workload selects a source, before or after a change of it.
func Concerns(workload *Workload, s *Selection, key SourceKey, before, after Source) bool {
	selects := func(source Source) bool {
		m := s.match(key, source)
		// The index finds a workload with patterns for every source, so match must confirm that it selects this
		// one.
		return source.Exists() && (m == Named || m == Auto && workload.RefersTo(key))
	}
	return selects(before) || selects(after)
}
