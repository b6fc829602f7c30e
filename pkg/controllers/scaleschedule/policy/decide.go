// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// DesiredState says how a workload is to be.
type DesiredState uint8

// The desired states. AsIs means that the controller does not change the workload.
const (
	AsIs DesiredState = iota
	Up
	Down
)

// The reasons of warnings.
const (
	InvalidSchedule     = "InvalidSchedule"
	ConflictingSchedule = "ConflictingSchedule"
	ScaledByOther       = "ScaledByOther"
	ScaleContested      = "ScaleContested"
)

// Scope is where a value comes from. A more specific scope has a lower number.
type Scope uint8

// The scopes.
const (
	ScopeWorkload Scope = iota
	ScopeNamespace
	ScopeFlags
)

// Problem is something that the owner of an object should know. The object is the Namespace if that is the
// scope, otherwise the workload.
type Problem struct {
	Scope  Scope
	Reason string
	Key    Key
	Text   string
}

// Verdict says how a workload is to be, and with how many replicas it is down. Next is when that may
// change without a change of an object; zero if it never does.
type Verdict struct {
	Desired  DesiredState
	Target   int64
	Next     time.Time
	Problems []Problem
}

// decision is what Decide needs while it decides.
type decision struct {
	values   [3]*Values // by scope
	defaults Defaults
	now      time.Time
	Verdict
}

// Decide returns how a workload is to be at now. namespace is what counts of its Namespace.
//
// A key counts from the most specific scope that sets it: the workload, else its Namespace, else the flags.
// Of uptime, downtime and the two periods, only those of one scope count; of the two forces too: a workload
// with "uptime: always" stays up, whatever downtime its Namespace has. The first of these rules that applies
// decides:
//
//   - A value that is invalid, such as "downtime: 8-18 PST": as it is, with a warning.
//   - exclude and exclude-until: as it is. "exclude-until: 2026-12-27" leaves it alone until that day.
//   - force-uptime and force-downtime: up or down, whatever the rules below say. "force-uptime: always" of a
//     Namespace keeps up a workload with "downtime: always".
//   - upscale-period and downscale-period: up inside the one, down inside the other, as it is outside both.
//     "downscale-period: Mon-Fri 20-21 UTC" alone scales down on Monday at 20:00, and never up.
//   - uptime and downtime: down outside uptime and inside downtime, else up. "uptime: Mon-Fri 8-18 UTC" is up
//     on Monday at 9:00 and down at 19:00. Without any schedule, a workload is to be up.
//
// If both forces, or both periods, hold now, the workload is left as it is, with a warning. A new workload
// does not go down in its grace period: one with the uptime above that is created on Monday at 19:00 goes
// down at 19:15 if the period is 15m.
func (e *Evaluator) Decide(workload, namespace *Object, now time.Time) Verdict {
	d := &decision{values: [3]*Values{&workload.Values, &namespace.Values, &e.flags}, defaults: e.defaults, now: now}
	exclusion := d.spans(d.scope(Exclude), Exclude)
	exclusionEnd := d.exclusionEnd()
	forceScope := d.scope(ForceUptime, ForceDowntime)
	forceUp, forceDown := d.spans(forceScope, ForceUptime), d.spans(forceScope, ForceDowntime)
	scheduleScope := d.scope(Uptime, Downtime, UpscalePeriod, DownscalePeriod)
	uptime, downtime := d.spans(scheduleScope, Uptime), d.spans(scheduleScope, Downtime)
	upscale, downscale := d.spans(scheduleScope, UpscalePeriod), d.spans(scheduleScope, DownscalePeriod)
	d.Target = d.target()
	grace := d.grace()
	if len(d.Problems) > 0 {
		return d.Verdict
	}
	d.Next = exclusionEnd
	if d.inside(exclusion) || !exclusionEnd.IsZero() {
		return d.Verdict
	}
	switch up, down := d.inside(forceUp), d.inside(forceDown); {
	case up && down:
		d.addConflict(forceScope, ForceUptime, ForceDowntime)
	case up:
		d.Desired = Up
	case down:
		d.Desired = Down
	case d.values[scheduleScope].has(UpscalePeriod, DownscalePeriod):
		switch up, down := d.inside(upscale), d.inside(downscale); {
		case up && down:
			d.addConflict(scheduleScope, UpscalePeriod, DownscalePeriod)
		case up:
			d.Desired = Up
		case down:
			d.Desired = Down
		}
	default:
		// Evaluate both spans even if one decides: each may have the next change.
		up, down := d.inside(uptime), d.inside(downtime)
		d.Desired = Up
		if down || !up && d.values[scheduleScope].has(Uptime) {
			d.Desired = Down
		}
	}
	if end := workload.Created.Add(grace); d.Desired == Down && end.After(now) {
		d.Desired, d.Next = AsIs, earlier(d.Next, end)
	}
	return d.Verdict
}

// LastBoundary returns when the desired state of now began, if that was in the window before now. A boundary
// that does not change the desired state does not count.
func (e *Evaluator) LastBoundary(workload, namespace *Object, now time.Time, window time.Duration) (boundary time.Time, known bool) {
	v := e.Decide(workload, namespace, now.Add(-window))
	for !v.Next.IsZero() && !v.Next.After(now) {
		next := e.Decide(workload, namespace, v.Next)
		if next.Desired != v.Desired {
			boundary, known = v.Next, true
		}
		v = next
	}
	return boundary, known
}

// scope returns the most specific scope that sets one of the keys, or the flags.
func (d *decision) scope(keys ...Key) Scope {
	for _, s := range []Scope{ScopeWorkload, ScopeNamespace} {
		if d.values[s].has(keys...) {
			return s
		}
	}
	return ScopeFlags
}

// name returns the name of an annotation, or of a flag.
func (d *decision) name(s Scope, k Key) string {
	if s == ScopeFlags {
		return "--scale-schedule-" + k.String()
	}
	return d.values[s].annotation(k)
}

// addInvalid adds the problem that a value of a scope that counts cannot be understood.
func (d *decision) addInvalid(s Scope, k Key, err error) {
	name := d.name(s, k)
	text := fmt.Sprintf("%s: %v; what it is for is not scaled", name, err)
	if d.values[s].text[k] == tooLong {
		text = fmt.Sprintf("%s is longer than %d bytes, or all together are longer than %d; what it is for is not scaled", name, MaxValue, maxTotal)
	}
	d.Problems = append(d.Problems, Problem{s, InvalidSchedule, k, text})
}

// addConflict adds the problem that both of two keys count now, so that neither does.
func (d *decision) addConflict(s Scope, a, b Key) {
	d.Problems = append(d.Problems, Problem{s, ConflictingSchedule, a, fmt.Sprintf("both %s and %s hold now; nothing is scaled for them", d.name(s, a), d.name(s, b))})
}

// spans returns the spans of a key; none if it is not set.
func (d *decision) spans(s Scope, k Key) Spans {
	if !d.values[s].has(k) {
		return nil
	}
	spans, err := ParseSpans(d.values[s].text[k], d.defaults)
	if err != nil {
		d.addInvalid(s, k, err)
	}
	return spans
}

// inside reports whether now is inside of spans, and notes when that may change.
func (d *decision) inside(spans Spans) bool {
	inside, next := spans.Contains(d.now)
	d.Next = earlier(d.Next, next)
	return inside
}

// exclusionEnd returns the exclude-until of the most specific scope that sets one in the future; zero if none
// does.
func (d *decision) exclusionEnd() time.Time {
	for s, v := range d.values {
		if !v.has(ExcludeUntil) {
			continue
		}
		t, err := parseUntil(v.text[ExcludeUntil])
		if err != nil {
			d.addInvalid(Scope(s), ExcludeUntil, err)
			break
		}
		if t.After(d.now) {
			return t
		}
	}
	return time.Time{}
}

func parseUntil(value string) (t time.Time, err error) {
	value = strings.TrimSpace(value)
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04", time.DateOnly} {
		if t, err = time.Parse(layout, value); err == nil {
			return t, nil
		}
	}
	return t, fmt.Errorf("%q is none of YYYY-MM-DD, YYYY-MM-DDTHH:MM and a time in RFC 3339", truncate(value))
}

// target returns the replicas of a workload that is down.
func (d *decision) target() int64 {
	s := d.scope(DowntimeReplicas, DownscaleReplicas)
	target, found := int64(0), false
	for _, k := range []Key{DowntimeReplicas, DownscaleReplicas} {
		if !d.values[s].has(k) {
			continue
		}
		n, err := parseNumber(strings.TrimSpace(d.values[s].text[k]))
		switch {
		case err != nil:
			d.addInvalid(s, k, fmt.Errorf("%q is not a number from 0 to %d", truncate(d.values[s].text[k]), math.MaxInt32))
		case found && int64(n) != target:
			d.addInvalid(s, k, fmt.Errorf("differs from %s", d.name(s, DowntimeReplicas)))
		}
		target, found = int64(n), true
	}
	return target
}

var errGrace = errors.New("is neither a number of seconds nor a duration such as 15m")

// grace returns how long a workload is not scaled down after its creation.
func (d *decision) grace() time.Duration {
	s := d.scope(GracePeriod)
	value := strings.TrimSpace(d.values[s].text[GracePeriod])
	seconds, err := strconv.ParseUint(value, 10, 32)
	if err == nil {
		return time.Duration(seconds) * time.Second
	}
	grace, err := time.ParseDuration(value)
	if err != nil || grace < 0 {
		d.addInvalid(s, GracePeriod, fmt.Errorf("%q %w", truncate(value), errGrace))
	}
	return grace
}
