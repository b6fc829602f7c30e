// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package judge finds out from an API server's audit log whether anybody has written without
// leading.
//
// etcd gives the order: a write and a version of the Lease are compared by resourceVersion,
// which counts all changes. Clocks do not matter. A request may be executed without being logged as
// successful (its client disconnects, the API server is killed), so versions that a watch has seen
// complete the log. To find out whose write such a version was, the log is searched for a request
// with an uncertain outcome that would have written the same.
//
// Processes are distinguished by the name of their program in the user agent, so that two lives of
// one Pod count as two.
package judge

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// LeaseVersion is one version of the Lease.
type LeaseVersion struct {
	Revision    uint64
	UID         types.UID
	Holder      string // identity
	Transitions int32
	Duration    time.Duration // of the claim
	Writer      string        // the process that wrote it
	Time        time.Time     // when the API server had responded, or when a watch has shown it
	Deleted     bool
}

// Write is one successful write that only a leader may make.
type Write struct {
	Revision uint64
	Object   string
	Writer   string    // process
	Received time.Time // by the API server; zero if only a watch has shown it
	Done     time.Time // when the API server had responded, or when a watch has shown it

	value string // of the history's annotation; empty if the log has it
}

// Verdict is what is wrong with a write.
type Verdict string

// The verdicts, from bad to harmless.
const (
	// NeverLed means that the process had not acquired the Lease.
	NeverLed Verdict = "never led"
	// Overlap means that another process had acquired the Lease afterwards, and written.
	Overlap Verdict = "overlaps with the successor's writes"
	// Late means that another process had acquired the Lease, but not yet written.
	Late Verdict = "late, before the successor's first write"
	// InOrder means the same behind the fence in the API server, or of a successor that took the Lease on
	// evidence, before the claim had run out. The store then takes writes of one Pod at a time, in the
	// order of the terms (ADR 0003, rule 11): what a process has sent before it died, or what waited in an
	// API server that stood still, may be the last of its term.
	InOrder Verdict = "late and in order, before the first write of a successor behind the fence"
	// AfterRelease means that the process had released the Lease, and nobody had acquired it yet.
	AfterRelease Verdict = "after the release"
	// Revoked means that the Lease had been changed or deleted by hand, and nobody had acquired it
	// yet. This does no harm: replicas wait for a lease duration after such a change.
	Revoked Verdict = "after a change by hand"
	// Unknown means that the author of the write is not known, because the API server was killed before
	// it logged the request.
	Unknown Verdict = "by an unknown author"
)

// Finding is a write whose process did not hold the Lease.
type Finding struct {
	Write
	Verdict Verdict
	// Since is the version of the Lease with which the process ceased to hold it; zero for
	// NeverLed.
	Since LeaseVersion
}

// Stale reports whether another process may have been leading at the time, or had the right to.
func (f Finding) Stale() bool {
	return f.Verdict != InOrder && f.Verdict != Revoked && f.Verdict != Unknown
}

// String returns the whole finding on one line.
func (f Finding) String() string {
	s := fmt.Sprintf("%s: %s wrote %s at revision %d (received %s, done %s)", f.Verdict, f.Writer, f.Object, f.Revision, clock(f.Received), clock(f.Done))
	if f.Since.Revision > 0 {
		s += fmt.Sprintf("; the Lease at revision %d, written by %s at %s, names %q", f.Since.Revision, f.Since.Writer, clock(f.Since.Time), f.Since.Holder)
	}
	return s
}

func clock(t time.Time) string { return t.Format("15:04:05.000000") }

// Acquisition is the beginning of a term.
type Acquisition struct {
	LeaseVersion
	Process string
	// Previous is the version before, the last one of the previous holder.
	Previous LeaseVersion
}

// early reports whether the claim of the version before had not run out.
func (a *Acquisition) early() bool {
	return a.Previous.Holder != "" && a.Time.Sub(a.Previous.Time) < a.Previous.Duration
}

// Judgement is the result for a History.
type Judgement struct {
	Writes       int // the judged writes
	Unlogged     int // judged writes that the audit log does not have as successful
	Findings     []Finding
	Acquisitions []Acquisition
	First        map[string]Write // the first write of each process
	Last         Write
}

// Stale returns the findings that must not occur.
func (j *Judgement) Stale() []Finding {
	return slices.DeleteFunc(slices.Clone(j.Findings), func(f Finding) bool { return !f.Stale() })
}

// Former returns the writes of former leaders that were stored after the first write of a successor,
// and the writes of processes that never led. No rule of the election permits such a write.
func (j *Judgement) Former() []Finding {
	return slices.DeleteFunc(slices.Clone(j.Findings), func(f Finding) bool { return f.Verdict != Overlap && f.Verdict != NeverLed })
}

// judging is the state of judging one history.
type judging struct {
	processes    map[string]string   // by identity
	acquisitions []Acquisition       // in order
	versions     []LeaseVersion      // in order
	revisions    map[string][]uint64 // revisions by process, in order
	fenced       bool
}

// judge judges all writes. processes maps identities to the replicas' processes.
func judge(versions []LeaseVersion, writes []Write, processes map[string]string, fenced bool) *Judgement {
	j := &judging{processes: processes, versions: versions, revisions: map[string][]uint64{}, fenced: fenced}
	j.findAcquisitions()
	for _, w := range writes {
		j.revisions[w.Writer] = append(j.revisions[w.Writer], w.Revision)
	}
	result := &Judgement{Writes: len(writes), Acquisitions: j.acquisitions, First: map[string]Write{}}
	for _, w := range writes {
		if _, known := result.First[w.Writer]; !known {
			result.First[w.Writer] = w
		}
		result.Last = w
		if f, ok := j.judgeWrite(w); ok {
			result.Findings = append(result.Findings, f)
		}
	}
	return result
}

// findAcquisitions finds the beginnings of terms. A term begins with the first version that names a
// replica under a new number of transitions. Creating the Lease (0 transitions) is only a claim,
// since somebody may lead on a deleted one.
func (j *judging) findAcquisitions() {
	var previous LeaseVersion
	for _, v := range j.versions {
		process, known := j.processes[v.Holder]
		sameTerm := v.UID == previous.UID && v.Holder == previous.Holder && v.Transitions == previous.Transitions
		if known && !v.Deleted && !sameTerm && v.Transitions > 0 {
			j.acquisitions = append(j.acquisitions, Acquisition{LeaseVersion: v, Process: process, Previous: previous})
		}
		previous = v
	}
}

// judgeWrite returns what is wrong with the write, if anything.
func (j *judging) judgeWrite(w Write) (Finding, bool) {
	if w.Writer == "" || strings.Contains(w.Writer, " or ") {
		return Finding{Write: w, Verdict: Unknown}, true
	}
	count, _ := slices.BinarySearchFunc(j.acquisitions, w.Revision, func(a Acquisition, r uint64) int { return cmp.Compare(a.Revision, r) })
	earlier := j.acquisitions[:count] // those before the write
	last := -1
	for i, a := range slices.Backward(earlier) {
		if a.Process == w.Writer {
			last = i
			break
		}
	}
	if last < 0 {
		return Finding{Write: w, Verdict: NeverLed}, true
	}
	if last+1 < len(earlier) {
		successor := earlier[last+1]
		f := Finding{Write: w, Verdict: Late, Since: successor.LeaseVersion}
		if j.anyWroteBefore(earlier[last+1:], w) {
			f.Verdict = Overlap
		} else if (j.fenced || successor.early()) && last+2 == len(earlier) {
			f.Verdict = InOrder
		}
		return f, true
	}
	return j.findEnd(w, earlier[last])
}

// findEnd finds the end of a term without a successor.
func (j *judging) findEnd(w Write, term Acquisition) (Finding, bool) {
	for _, v := range j.versions {
		switch {
		case v.Revision <= term.Revision:
		case v.Revision >= w.Revision:
			return Finding{}, false
		case v.Deleted, v.UID != term.UID, v.Holder != term.Holder, v.Transitions != term.Transitions:
			f := Finding{Write: w, Verdict: Revoked, Since: v}
			if !v.Deleted && v.Holder == "" && v.Writer == term.Process {
				f.Verdict = AfterRelease
			}
			return f, true
		}
	}
	return Finding{}, false
}

// anyWroteBefore reports whether one of the later leaders has written before the write.
func (j *judging) anyWroteBefore(later []Acquisition, w Write) bool {
	return slices.ContainsFunc(later, func(a Acquisition) bool {
		first, ok := j.firstWriteSince(a)
		return ok && first < w.Revision
	})
}

func (j *judging) firstWriteSince(a Acquisition) (uint64, bool) {
	all := j.revisions[a.Process]
	i, _ := slices.BinarySearch(all, a.Revision)
	if i == len(all) {
		return 0, false
	}
	return all[i], true
}

// sorted returns the values by revision.
func sorted[V any](m map[uint64]V) []V {
	values := make([]V, 0, len(m))
	for _, revision := range slices.Sorted(maps.Keys(m)) {
		values = append(values, m[revision])
	}
	return values
}
