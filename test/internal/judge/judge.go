// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package judge tells from an API server's audit log whether anybody has written who did not lead.
//
// The order is that of etcd: a write and a version of the Lease are compared by resourceVersion, which counts the
// changes of everything. Clocks decide nothing. Since a request may be executed without being logged as successful (its
// client has gone, the API server is killed), versions that a watch has seen complete the log. Whose write such a version
// was tells a request of the log that would have written the same and had no certain outcome.
//
// Processes are told apart by the name of their program in the user agent, so that two lives of one Pod are two.
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
	By          string    // the process that wrote it
	Time        time.Time // when the API server had answered, or when a watch has shown it
	Deleted     bool
}

// Write is one successful write that only a leader may make.
type Write struct {
	Revision uint64
	Object   string
	By       string    // process
	Received time.Time // by the API server; zero if only a watch has shown it
	Done     time.Time // when the API server had answered, or when a watch has shown it

	value string // of the history's annotation; empty if the log has it
}

// Verdict is what is wrong with a write.
type Verdict string

// The verdicts, from bad to harmless.
const (
	// NeverLed: its process had not acquired the Lease.
	NeverLed Verdict = "never led"
	// Overlap: another process had acquired the Lease, and written.
	Overlap Verdict = "overlaps with the successor's writes"
	// Late: another process had acquired the Lease, but not yet written.
	Late Verdict = "late, before the successor's first write"
	// AfterRelease: its process had released the Lease, and nobody has acquired it yet.
	AfterRelease Verdict = "after the release"
	// Revoked: the Lease had been changed or deleted by hand, and nobody has acquired it yet. To nobody's harm: replicas
	// wait for a lease duration after such a change.
	Revoked Verdict = "after a change by hand"
	// Unknown: nobody knows whose write it was, as the API server was killed before it logged the request.
	Unknown Verdict = "by nobody knows whom"
)

// Finding is a write whose process did not hold the Lease.
type Finding struct {
	Write
	Verdict Verdict
	// Since is the version of the Lease by which the process ceased to hold it; zero for NeverLed.
	Since LeaseVersion
}

// Stale tells whether another may have been leading at the time, or had the right to.
func (f Finding) Stale() bool { return f.Verdict != Revoked && f.Verdict != Unknown }

// String tells the whole finding on one line.
func (f Finding) String() string {
	s := fmt.Sprintf("%s: %s wrote %s at revision %d (received %s, done %s)", f.Verdict, f.By, f.Object, f.Revision, clock(f.Received), clock(f.Done))
	if f.Since.Revision > 0 {
		s += fmt.Sprintf("; the lease at revision %d, written by %s at %s, names %q", f.Since.Revision, f.Since.By, clock(f.Since.Time), f.Since.Holder)
	}
	return s
}

func clock(t time.Time) string { return t.Format("15:04:05.000000") }

// Acquisition is the begin of a term.
type Acquisition struct {
	LeaseVersion
	Process string
	// Previous is the version before, the last word of whoever held the Lease.
	Previous LeaseVersion
}

// Judgement is what a History comes to.
type Judgement struct {
	Writes       int // that were judged
	Unlogged     int // of them, those that the audit log does not have as successful
	Findings     []Finding
	Acquisitions []Acquisition
}

// Stale are the findings that must not be.
func (j *Judgement) Stale() []Finding {
	return slices.DeleteFunc(slices.Clone(j.Findings), func(f Finding) bool { return !f.Stale() })
}

// judging is the state of judging one history.
type judging struct {
	processOf    map[string]string   // by identity
	acquisitions []Acquisition       // in order
	versions     []LeaseVersion      // in order
	wrote        map[string][]uint64 // revisions by process, in order
}

// judge judges all writes. processOf tells the replicas' processes by identity.
func judge(versions []LeaseVersion, writes []Write, processOf map[string]string) *Judgement {
	j := &judging{processOf: processOf, versions: versions, wrote: map[string][]uint64{}}
	j.findAcquisitions()
	for _, w := range writes {
		j.wrote[w.By] = append(j.wrote[w.By], w.Revision)
	}
	result := &Judgement{Writes: len(writes), Acquisitions: j.acquisitions}
	for _, w := range writes {
		if f, ok := j.find(w); ok {
			result.Findings = append(result.Findings, f)
		}
	}
	return result
}

// findAcquisitions: a term begins with the first version that names a replica under a new number of transitions. To
// create the Lease (0 transitions) is a claim only, as nobody can know whether somebody leads on one that was deleted.
func (j *judging) findAcquisitions() {
	var previous LeaseVersion
	for _, v := range j.versions {
		process, ours := j.processOf[v.Holder]
		sameTerm := v.UID == previous.UID && v.Holder == previous.Holder && v.Transitions == previous.Transitions
		if ours && !v.Deleted && !sameTerm && v.Transitions > 0 {
			j.acquisitions = append(j.acquisitions, Acquisition{LeaseVersion: v, Process: process, Previous: previous})
		}
		previous = v
	}
}

// find returns what is wrong with the write, if anything is.
func (j *judging) find(w Write) (Finding, bool) {
	if w.By == "" || strings.Contains(w.By, " or ") {
		return Finding{Write: w, Verdict: Unknown}, true
	}
	after, _ := slices.BinarySearchFunc(j.acquisitions, w.Revision, func(a Acquisition, r uint64) int { return cmp.Compare(a.Revision, r) })
	before := j.acquisitions[:after] // than the write
	last := -1
	for i, a := range slices.Backward(before) {
		if a.Process == w.By {
			last = i
			break
		}
	}
	if last < 0 {
		return Finding{Write: w, Verdict: NeverLed}, true
	}
	if last+1 < len(before) {
		successor := before[last+1]
		f := Finding{Write: w, Verdict: Late, Since: successor.LeaseVersion}
		if first, ok := j.firstWriteSince(successor); ok && first < w.Revision {
			f.Verdict = Overlap
		}
		return f, true
	}
	return j.findEnd(w, before[last])
}

// findEnd looks for the end of a term without a successor.
func (j *judging) findEnd(w Write, term Acquisition) (Finding, bool) {
	for _, v := range j.versions {
		switch {
		case v.Revision <= term.Revision:
		case v.Revision >= w.Revision:
			return Finding{}, false
		case v.Deleted, v.UID != term.UID, v.Holder != term.Holder, v.Transitions != term.Transitions:
			f := Finding{Write: w, Verdict: Revoked, Since: v}
			if !v.Deleted && v.Holder == "" && v.By == term.Process {
				f.Verdict = AfterRelease
			}
			return f, true
		}
	}
	return Finding{}, false
}

func (j *judging) firstWriteSince(a Acquisition) (uint64, bool) {
	all := j.wrote[a.Process]
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
