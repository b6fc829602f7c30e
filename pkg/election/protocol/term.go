// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// Term returns the term of this replica, and whether it has one.
func (s *State) Term() (Term, bool) { return s.term, s.holding }

// Deadline returns when the term of this replica ends unless it is renewed (rule 2).
func (s *State) Deadline() time.Duration { return s.sent + s.timing.Deadline }

// CoveredUntil returns until when nobody else can have taken the Lease.
func (s *State) CoveredUntil() time.Duration { return s.sent + s.timing.Covered() }

// MustProve reports whether the term of this replica still needs a proof before lead may write.
func (s *State) MustProve(now time.Duration) bool { return now < s.proofUntil }

// IsReleasable reports whether the Lease may be released.
func (s *State) IsReleasable(now time.Duration) bool { return now >= s.releaseAt() }

// releaseAt returns from when on the Lease may be released: the next holder does not wait (rule 4), so
// no write of lead may be under way (rule 8), nor may a predecessor be able to write (rule 11).
func (s *State) releaseAt() time.Duration { return max(s.quietAt, s.proofUntil) }

// claimDuration returns the duration that a write of the Lease claims: it lasts until proofUntil at least, so
// that a replica that knows only this record waits for the predecessors too.
func (s *State) claimDuration(proofUntil, now time.Duration) time.Duration {
	left := (proofUntil - now + time.Second - 1).Truncate(time.Second)
	return min(max(s.timing.Lease, left), MaxLease)
}

// endOfTerm returns why the term ends now, or "".
func (s *State) endOfTerm(now time.Duration) Reason {
	released := s.IsReleasable(now)
	switch {
	case s.endReason != "":
		return s.endReason
	case now >= s.Deadline() && released:
		return ReasonReleaseFailed
	case now >= s.Deadline(): // rule 2
		return ReasonRenewDeadline
	case now >= s.drainUntil && !released: // rule 8
		return ReasonDrainTimeout
	}
	return ""
}

// nextStep returns ActLead when lead may start, ActGiveUp when the wait takes too long, else "".
func (s *State) nextStep(now time.Duration) ActionKind {
	switch {
	case s.leading || s.stopping || s.gaveUp:
	case s.admitted && now >= s.proofUntil: // rule 11
		return ActLead
	case !s.admitted && now >= s.acquiredAt+s.timing.Lease:
		return ActGiveUp
	}
	return ""
}

// nextStepAt returns when the term takes another step, if nothing happens before.
func (s *State) nextStepAt(now time.Duration) time.Duration {
	at := never
	switch {
	case s.leading || s.stopping || s.gaveUp:
	case s.admitted:
		at = s.proofUntil
	default:
		at = s.acquiredAt + s.timing.Lease
	}
	if !s.IsReleasable(now) {
		at = min(at, s.drainUntil, s.releaseAt())
	}
	return at
}

// OnAcquired processes the answer to an acquisition. sent is the time before it was sent. It reports
// whether a term has begun that may lead: the fence in the API server has to name this replica next.
func (s *State) OnAcquired(lease *coordinationv1.Lease, sent, now time.Duration) bool {
	s.writing, s.reading = false, false
	if now >= sent+s.timing.Deadline { // rule 2: the process was paused, or the answer too slow
		s.learn(lease, now, true)
		return false
	}
	newest := s.lease // the watch may be ahead of the answer
	s.holding, s.term, s.acquiredAt, s.sent, s.proofUntil = true, TermOf(lease), now, sent, s.acquiringProofUntil
	s.lease, s.note, s.known = lease, noteOf(lease), true
	s.writeAt, s.writeFails = now, failures{}
	s.learn(newest, now, true)
	if s.stopping {
		s.quietAt = now
	}
	return !s.stopping
}

// OnAdmitted processes that the API server's fence admits this replica, or that there is none.
func (s *State) OnAdmitted() { s.admitted = true }

// OnProved processes that every API server refuses the predecessors (rule 11).
func (s *State) OnProved() { s.proofUntil = 0 }

// OnLeadStarted notes that lead has started.
func (s *State) OnLeadStarted() { s.leading = true }

// OnGiveUp abandons the attempt to lead. The Lease is released as soon as it may be.
func (s *State) OnGiveUp(now time.Duration) {
	s.gaveUp, s.quietAt, s.writeAt = true, now, 0
}

// OnEvicted ends the term, unless it has ended for another reason.
func (s *State) OnEvicted(reason Reason) {
	if s.endReason == "" {
		s.endReason = reason
	}
}

// OnRenewed extends the term, unless it has ended meanwhile.
func (s *State) OnRenewed(lease *coordinationv1.Lease, sent, now time.Duration) {
	s.writing = false
	if now >= s.Deadline() { // rule 2
		s.OnExpired()
		return
	}
	s.sent, s.writeFails = sent, failures{}
	s.learn(lease, now, true)
}

// OnExpired ends the term.
func (s *State) OnExpired() { s.OnEvicted(ReasonRenewDeadline) }

// OnReleased ends the term.
func (s *State) OnReleased() {
	s.writing = false
	s.endReason = ReasonReleased
	if s.gaveUp {
		s.endReason = ReasonCannotLead
	}
}

// OnStop begins to stop: a standby returns, a leader drains. A holder that has not begun to lead releases
// the Lease as soon as it may.
func (s *State) OnStop(drainUntil, now time.Duration) {
	s.stopping = true
	s.drainUntil = min(s.drainUntil, drainUntil)
	if s.holding && !s.leading {
		s.quietAt, s.writeAt = min(s.quietAt, now), 0
	}
}

// OnLeadReturned bounds the time for which the last writes of lead may go on. unfinished reports
// that some of its work may go on for ever: then the Lease is not released.
func (s *State) OnLeadReturned(drainUntil, now time.Duration, unfinished bool) {
	s.leadReturned = true
	s.drainUntil = min(s.drainUntil, drainUntil)
	if unfinished {
		s.drainUntil = now
	}
}

// OnQuiet lets the Lease be released from at on, when no write of lead can be executed any more (rule 8).
// If the drain may not last that long, the term ends now.
func (s *State) OnQuiet(at, now time.Duration) {
	s.quietAt, s.writeAt = at, 0
	if at > s.drainUntil {
		s.drainUntil = now
	}
}

// judgeTerm ends the term of this replica if the version belongs to another term (rule 9). A renewal that got
// no answer, or an edit of other fields, does not extend it (rule 2): only an answer proves when a
// write was sent.
func (s *State) judgeTerm(lease *coordinationv1.Lease, now time.Duration) {
	switch {
	case lease == nil:
		s.endReason = ReasonLeaseDeleted
	case lease.UID != s.term.LeaseUID:
		s.endReason = ReasonLeaseReplaced
	case s.IsReleasable(now) && isFree(lease) && TermOf(lease) == s.term:
		s.OnReleased() // the answer to the release was lost or is late
	case HolderOf(lease) != s.identity || TermOf(lease) != s.term:
		s.endReason = ReasonHolderChanged
	}
}
