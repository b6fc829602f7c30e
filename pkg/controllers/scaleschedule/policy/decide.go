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

// Wanted says how a workload is to be.
type Wanted uint8

// How a workload is to be. Leave means that the controller does not change it.
const (
	Leave Wanted = iota
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
	OfWorkload Scope = iota
	OfNamespace
	OfFlags
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
	Wanted   Wanted
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
func (e *Evaluator) Decide(workload, namespace *Object, now time.Time) Verdict {
	d := &decision{values: [3]*Values{&workload.Values, &namespace.Values, &e.flags}, defaults: e.defaults, now: now}
	excluded := d.spans(d.scope(Exclude), Exclude)
	until := d.excludedUntil()
	forced := d.scope(ForceUptime, ForceDowntime)
	forceUp, forceDown := d.spans(forced, ForceUptime), d.spans(forced, ForceDowntime)
	timed := d.scope(Uptime, Downtime, UpscalePeriod, DownscalePeriod)
	uptime, downtime := d.spans(timed, Uptime), d.spans(timed, Downtime)
	upscale, downscale := d.spans(timed, UpscalePeriod), d.spans(timed, DownscalePeriod)
	d.Target = d.target()
	grace := d.grace()
	if len(d.Problems) > 0 {
		return d.Verdict
	}
	d.Next = until
	if d.inside(excluded) || !until.IsZero() {
		return d.Verdict
	}
	switch up, down := d.inside(forceUp), d.inside(forceDown); {
	case up && down:
		d.conflict(forced, ForceUptime, ForceDowntime)
	case up:
		d.Wanted = Up
	case down:
		d.Wanted = Down
	case d.values[timed].has(UpscalePeriod, DownscalePeriod):
		switch up, down := d.inside(upscale), d.inside(downscale); {
		case up && down:
			d.conflict(timed, UpscalePeriod, DownscalePeriod)
		case up:
			d.Wanted = Up
		case down:
			d.Wanted = Down
		}
	default:
		// Both are asked, so that Next is right.
		up, down := d.inside(uptime), d.inside(downtime)
		d.Wanted = Up
		if down || !up && d.values[timed].has(Uptime) {
			d.Wanted = Down
		}
	}
	if end := workload.Created.Add(grace); d.Wanted == Down && end.After(now) {
		d.Wanted, d.Next = Leave, sooner(d.Next, end)
	}
	return d.Verdict
}

// Since returns when the verdict that holds at now began, if that was at most within before now.
func (e *Evaluator) Since(workload, namespace *Object, now time.Time, within time.Duration) (since time.Time, known bool) {
	v := e.Decide(workload, namespace, now.Add(-within))
	for !v.Next.IsZero() && !v.Next.After(now) {
		next := e.Decide(workload, namespace, v.Next)
		if next.Wanted != v.Wanted {
			since, known = v.Next, true
		}
		v = next
	}
	return since, known
}

// scope returns the most specific scope that sets one of the keys, or the flags.
func (d *decision) scope(of ...Key) Scope {
	for _, s := range []Scope{OfWorkload, OfNamespace} {
		if d.values[s].has(of...) {
			return s
		}
	}
	return OfFlags
}

// name returns the name of an annotation, or of a flag.
func (d *decision) name(s Scope, k Key) string {
	if s == OfFlags {
		return "--scale-schedule-" + k.String()
	}
	return d.values[s].annotation(k)
}

// invalid notes that a value of a scope that counts cannot be understood.
func (d *decision) invalid(s Scope, k Key, err error) {
	name := d.name(s, k)
	text := fmt.Sprintf("%s: %v; what it is for is not scaled", name, err)
	if d.values[s].text[k] == tooLong {
		text = fmt.Sprintf("%s is longer than %d bytes, or all together are longer than %d; what it is for is not scaled", name, MaxValue, maxTogether)
	}
	d.Problems = append(d.Problems, Problem{s, InvalidSchedule, k, text})
}

// conflict notes that both of two keys count now, so that neither does.
func (d *decision) conflict(s Scope, a, b Key) {
	d.Problems = append(d.Problems, Problem{s, ConflictingSchedule, a, fmt.Sprintf("both %s and %s hold now; nothing is scaled for them", d.name(s, a), d.name(s, b))})
}

// spans returns the spans of a key; none if it is not set.
func (d *decision) spans(s Scope, k Key) Spans {
	if !d.values[s].has(k) {
		return nil
	}
	spans, err := ParseSpans(d.values[s].text[k], d.defaults)
	if err != nil {
		d.invalid(s, k, err)
	}
	return spans
}

// inside reports whether now is inside of spans, and notes when that may change.
func (d *decision) inside(spans Spans) bool {
	inside, next := spans.At(d.now)
	d.Next = sooner(d.Next, next)
	return inside
}

// excludedUntil returns the time of the most specific scope that sets one in the future; zero if none does.
func (d *decision) excludedUntil() time.Time {
	for s, v := range d.values {
		if !v.has(ExcludeUntil) {
			continue
		}
		t, err := parseUntil(v.text[ExcludeUntil])
		if err != nil {
			d.invalid(Scope(s), ExcludeUntil, err)
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
	return t, fmt.Errorf("%q is none of YYYY-MM-DD, YYYY-MM-DDTHH:MM and a time in RFC 3339", cut(value))
}

// target returns the replicas of a workload that is down.
func (d *decision) target() int64 {
	s := d.scope(DowntimeReplicas, DownscaleReplicas)
	target, found := int64(0), false
	for _, k := range []Key{DowntimeReplicas, DownscaleReplicas} {
		if !d.values[s].has(k) {
			continue
		}
		n, err := number(strings.TrimSpace(d.values[s].text[k]))
		switch {
		case err != nil:
			d.invalid(s, k, fmt.Errorf("%q is not a number from 0 to %d", cut(d.values[s].text[k]), math.MaxInt32))
		case found && int64(n) != target:
			d.invalid(s, k, fmt.Errorf("differs from %s", d.name(s, DowntimeReplicas)))
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
		d.invalid(s, GracePeriod, fmt.Errorf("%q %w", cut(value), errGrace))
	}
	return grace
}
