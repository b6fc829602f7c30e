// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// This file is the other half of the protocol: how the state changes when something has happened.

func newState(identity string, t timing) *state {
	return &state{timing: t, identity: identity, drainUntil: never}
}

// observe processes a version of the Lease, or its absence (nil). gapless reports that no version
// between this and the last one was missed.
func (s *state) observe(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	before := s.newest()
	if s.phase == standingBy {
		// This replica's own acquisition required the version before it.
		gapless = gapless || lease != nil && s.isUnanswered(lease)
		s.view = s.view.observe(lease, now, gapless, s.timing)
		s.forget()
	} else {
		s.tenure.observe(lease, s.identity)
		if s.phase == releasing && lease != nil && isFree(lease) && termOf(lease) == s.tenure.term {
			s.tenure.lost = ReasonReleased // the response to the release was lost or is late
		}
	}
	if s.newest() != before {
		s.doubtful = false
	}
}

// newest returns the newest known version, nil if there is none.
func (s *state) newest() *coordinationv1.Lease {
	if s.tenure != nil {
		return s.tenure.lease
	}
	return s.view.lease
}

// forget drops the unanswered acquisition once another version has replaced the one that it
// required: if it was not executed before, it can no longer succeed.
func (s *state) forget() {
	current := s.view.lease
	if s.unanswered != nil && (current == nil ||
		current.ResourceVersion != s.unanswered.base && !s.isUnanswered(current)) {
		s.unanswered = nil
	}
}

// hasRead processes the response to a read; next is when to read again.
func (s *state) hasRead(lease *coordinationv1.Lease, now, next time.Duration) {
	s.reading, s.doubtful = false, false
	s.readAt = next
	s.observe(lease, now, false)
}

// readFailed postpones the next read.
func (s *state) readFailed(next time.Duration) {
	s.reading = false
	s.readAt = next
}

// hasCreated processes the Lease that this replica has created. No term begins.
func (s *state) hasCreated(lease *coordinationv1.Lease, now time.Duration) {
	s.writing = false
	s.observe(lease, now, false)
}

// hasAcquired processes the response to a write that acquires the Lease. sent is the time before it
// was sent. It reports whether a term has begun.
func (s *state) hasAcquired(lease *coordinationv1.Lease, sent, now time.Duration) bool {
	s.writing, s.reading = false, false
	if now >= sent+s.deadline {
		// The Lease is ours, but the process was paused or the response too slow.
		s.unanswered = &acquisition{base: lease.ResourceVersion, term: termOf(lease), acquired: lease.Spec.AcquireTime}
		s.observe(lease, now, true)
		return false
	}
	s.tenure = &tenure{term: termOf(lease), lease: lease, sent: sent}
	if s.view.lease != nil {
		s.tenure.observe(s.view.lease, s.identity) // the watch may be ahead of the response
	}
	s.phase = leading
	if s.stopping {
		s.phase = releasing
	}
	s.unanswered, s.writeAt, s.readAt = nil, now, now
	return s.phase == leading
}

// acquisitionFailed processes a failed or unanswered write that acquires the Lease. base is the
// version that it required, nil if it was to create the Lease.
func (s *state) acquisitionFailed(base, wrote *coordinationv1.Lease, conflict bool, retry time.Duration) {
	if base != nil {
		s.unanswered = &acquisition{base: base.ResourceVersion, term: termOf(wrote), acquired: wrote.Spec.AcquireTime}
		s.forget()
	}
	s.writeFailed(base, conflict, retry)
}

// writeFailed postpones the next write until retry. After a conflict it postpones it until the
// conflicting version is known; retry is then when to read that version, unless the watch shows it
// before.
func (s *state) writeFailed(base *coordinationv1.Lease, conflict bool, retry time.Duration) {
	s.writing = false
	switch {
	case !conflict:
		s.writeAt = retry
	case s.isNewest(base):
		s.doubtful, s.readAt = true, retry
	}
}

// isNewest reports whether no newer version is known.
func (s *state) isNewest(lease *coordinationv1.Lease) bool {
	newest := s.newest()
	if lease == nil || newest == nil {
		return lease == newest
	}
	return lease.ResourceVersion == newest.ResourceVersion
}

// hasRenewed extends the term, unless it has ended meanwhile.
func (s *state) hasRenewed(lease *coordinationv1.Lease, sent, now time.Duration) {
	s.writing = false
	if now >= s.tenure.sent+s.deadline {
		s.tenure.lost = ReasonRenewDeadline
		return
	}
	s.tenure.sent = sent
	s.tenure.observe(lease, s.identity)
}

// hasReleased ends the term.
func (s *state) hasReleased() {
	s.writing = false
	s.tenure.lost = ReasonReleased
}
