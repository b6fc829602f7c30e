// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// Term returns the term of this replica, and whether it has one.
func (p *State) Term() (Term, bool) { return p.term, p.holding }

// Deadline returns when the term of this replica ends unless it is renewed (rule 2).
func (p *State) Deadline() time.Duration { return p.sent + p.own.Deadline }

// CoveredUntil returns until when nobody else can have taken the Lease.
func (p *State) CoveredUntil() time.Duration { return p.sent + p.own.Covered() }

// Owes reports whether the term of this replica owes anything at now.
func (p *State) Owes(now time.Duration) bool { return now < p.owesUntil }

// IsReleasable reports whether the Lease may be released.
func (p *State) IsReleasable(now time.Duration) bool { return now >= p.releaseAt() }

// releaseAt returns from when on the Lease may be released: the next holder does not wait (rule 4), so
// no write of lead may be under way (rule 8), nor may a predecessor be able to write (rule 11).
func (p *State) releaseAt() time.Duration { return max(p.quietAt, p.owesUntil) }

// claimed returns the duration that a write of the Lease claims: it also covers what is owed, so that a
// replica that knows only this record waits for the predecessors too.
func (p *State) claimed(owesUntil, now time.Duration) time.Duration {
	left := (owesUntil - now + time.Second - 1).Truncate(time.Second)
	return min(max(p.own.Lease, left), MaxLease)
}

// endOfTerm returns why the term ends now, or "".
func (p *State) endOfTerm(now time.Duration) Reason {
	released := p.IsReleasable(now)
	switch {
	case p.lost != "":
		return p.lost
	case now >= p.Deadline() && released:
		return ReasonReleaseFailed
	case now >= p.Deadline(): // rule 2
		return ReasonRenewDeadline
	case now >= p.drainUntil && !released: // rule 8
		return ReasonDrainTimeout
	}
	return ""
}

// nextStep returns ActLead when lead may start, ActGiveUp when the wait takes too long, else "".
func (p *State) nextStep(now time.Duration) ActionKind {
	switch {
	case p.leading || p.stopping || p.gaveUp:
	case p.admitted && now >= p.owesUntil: // rule 11
		return ActLead
	case !p.admitted && now >= p.began+p.own.Lease:
		return ActGiveUp
	}
	return ""
}

// nextStepAt returns when the term takes another step, if nothing happens before.
func (p *State) nextStepAt(now time.Duration) time.Duration {
	at := never
	switch {
	case p.leading || p.stopping || p.gaveUp:
	case p.admitted:
		at = p.owesUntil
	default:
		at = p.began + p.own.Lease
	}
	if !p.IsReleasable(now) {
		at = min(at, p.drainUntil, p.releaseAt())
	}
	return at
}

// OnAcquired processes the answer to an acquisition. sent is the time before it was sent. It reports
// whether a term has begun that may lead: the fence in the API server has to name this replica next.
func (p *State) OnAcquired(lease *coordinationv1.Lease, sent, now time.Duration) bool {
	p.writing, p.reading = false, false
	if now >= sent+p.own.Deadline { // rule 2: the process was paused, or the answer too slow
		p.learn(lease, now, true)
		return false
	}
	newest := p.lease // the watch may be ahead of the answer
	p.holding, p.term, p.began, p.sent, p.owesUntil = true, TermOf(lease), now, sent, p.acquiringOwesUntil
	p.lease, p.note, p.known = lease, noteOf(lease), true
	p.writeAt, p.writeFails = now, failures{}
	p.learn(newest, now, true)
	if p.stopping {
		p.quietAt = now
	}
	return !p.stopping
}

// OnAdmitted processes that the API server's fence admits this replica, or that there is none.
func (p *State) OnAdmitted() { p.admitted = true }

// OnProved processes that every API server refuses the predecessors (rule 11).
func (p *State) OnProved() { p.owesUntil = 0 }

// OnLeadStarted notes that lead has started.
func (p *State) OnLeadStarted() { p.leading = true }

// OnGiveUp abandons the attempt to lead. The Lease is released as soon as it may be.
func (p *State) OnGiveUp(now time.Duration) {
	p.gaveUp, p.quietAt, p.writeAt = true, now, 0
}

// OnEvicted ends the term, unless it has ended for another reason.
func (p *State) OnEvicted(why Reason) {
	if p.lost == "" {
		p.lost = why
	}
}

// OnRenewed extends the term, unless it has ended meanwhile.
func (p *State) OnRenewed(lease *coordinationv1.Lease, sent, now time.Duration) {
	p.writing = false
	if now >= p.Deadline() { // rule 2
		p.OnExpired()
		return
	}
	p.sent, p.writeFails = sent, failures{}
	p.learn(lease, now, true)
}

// OnExpired ends the term.
func (p *State) OnExpired() { p.OnEvicted(ReasonRenewDeadline) }

// OnReleased ends the term.
func (p *State) OnReleased() {
	p.writing = false
	p.lost = ReasonReleased
	if p.gaveUp {
		p.lost = ReasonCannotLead
	}
}

// OnStop begins to stop: a standby returns, a leader drains. A holder that has not begun to lead releases
// the Lease as soon as it may.
func (p *State) OnStop(drainUntil, now time.Duration) {
	p.stopping = true
	p.drainUntil = min(p.drainUntil, drainUntil)
	if p.holding && !p.leading {
		p.quietAt, p.writeAt = min(p.quietAt, now), 0
	}
}

// OnLeadReturned bounds the time for which the last writes of lead may go on. unfinished reports
// that some of its work may go on for ever: then the Lease is not released.
func (p *State) OnLeadReturned(drainUntil, now time.Duration, unfinished bool) {
	p.leadReturned = true
	p.drainUntil = min(p.drainUntil, drainUntil)
	if unfinished {
		p.drainUntil = now
	}
}

// OnQuiet lets the Lease be released from at on, when no write of lead can be executed any more (rule 8).
// If the drain may not last that long, the term ends now.
func (p *State) OnQuiet(at, now time.Duration) {
	p.quietAt, p.writeAt = at, 0
	if at > p.drainUntil {
		p.drainUntil = now
	}
}

// judgeTerm ends the term of this replica if the version belongs to another term (rule 9). A renewal that got
// no answer, or an edit of other fields, does not extend it (rule 2): only an answer proves when a
// write was sent.
func (p *State) judgeTerm(lease *coordinationv1.Lease, now time.Duration) {
	switch {
	case lease == nil:
		p.lost = ReasonLeaseDeleted
	case lease.UID != p.term.LeaseUID:
		p.lost = ReasonLeaseReplaced
	case p.IsReleasable(now) && isFree(lease) && TermOf(lease) == p.term:
		p.OnReleased() // the answer to the release was lost or is late
	case HolderOf(lease) != p.identity || TermOf(lease) != p.term:
		p.lost = ReasonHolderChanged
	}
}
