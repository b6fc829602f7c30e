// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// freeAt returns the time from which nobody else can believe that it leads, if no newer version is
// seen.
func (s *State) freeAt() time.Duration {
	return max(s.claimExpires, s.distrustUntil)
}

// isExpired reports whether the holder's claim has expired or almost expired. Another replica may
// have seen the last renewal a little earlier; the fence of the holder is closed by SettleTime
// before the end of its claim, see SafeLease.
func (s *State) isExpired(now time.Duration) bool {
	return now >= s.claimExpires-SettleTime
}

// isFreed reports whether the Lease is free in a later version (rule 4). Within a term, a free Lease counts
// only if its holder released it or if the version before was free too.
func (s *State) isFreed(later *coordinationv1.Lease) bool {
	if s.lease == nil || TermOf(s.lease) != TermOf(later) || isFree(s.lease) {
		return isFree(later)
	}
	return isRelease(s.lease, later)
}

// learn processes a version of the Lease, or its absence (nil). gapless reports that no version
// between this and the newest was missed.
func (s *State) learn(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	switch {
	case lease == nil && s.lease == nil && s.known: // nothing new
	case lease != nil && s.lease != nil && !isNewer(lease, s.lease): // an old version, shown late
	case s.holding:
		s.judgeTerm(lease, now)
		s.setLease(lease, now)
	default:
		s.weighEvidence(lease, now)
		s.judgeClaim(lease, now, gapless)
		s.setLease(lease, now)
	}
}

func (s *State) setLease(lease *coordinationv1.Lease, now time.Duration) {
	if !s.known && !s.reading {
		s.readAt = s.nextRead(now)
	}
	s.lease, s.note, s.known, s.writeFails = lease, noteOf(lease), true, failures{}
}

// onRestored processes an answer that is older than the newest version, but true: the store was
// restored to an earlier state (rule 10), and whatever this process knows may be wrong. The process ends,
// and the restarted process knows nothing. A standby waits before it ends: a leader of the lost versions may
// still act, and the restarted process might see a Lease that is free.
func (s *State) onRestored(now time.Duration) {
	if s.holding {
		s.endReason = ReasonStoreRestored
		return
	}
	s.restored, s.endAt = true, max(s.freeAt(), now+max(s.timing.Lease, s.duration))
}

// judgeClaim sets until when the holder of a version, and its predecessors, may act.
func (s *State) judgeClaim(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	if lease == nil {
		// Rule 5: the last holder may have renewed the Lease until it was deleted. This also holds
		// if the Lease is absent at first sight: somebody may lead on one that was just deleted.
		s.distrustUntil = max(s.freeAt(), now+max(s.timing.Lease, s.duration))
		s.claimExpires, s.duration = 0, 0
		return
	}
	before, duration := s.lease, DurationOf(lease, s.timing.Lease)
	if before != nil && before.UID == lease.UID {
		duration = s.durationAfter(before, lease, gapless)
	}
	switch {
	case before == nil:
	case isSameHolding(before, lease):
	case isFree(before) && isNext(before, lease):
	case gapless && isNext(before, lease) && noteOf(lease).Early: // its claim covers the earlier claims, see holderNote
	case !s.isExpired(now) || !gapless: // rule 5; another UID is never without a gap
		s.distrustUntil = max(s.freeAt(), now+max(s.timing.Lease, s.duration))
	}
	expires := now + duration // rule 3
	if s.isFreed(lease) {     // rule 4
		expires = 0
	}
	s.claimExpires, s.duration = expires, duration
}

// durationAfter returns the duration that counts after another version of the Lease (rule 3). An
// acquisition or a renewal changes the renewTime, an edit does not. Where renewals were missed, the last
// version may be an edit of a renewal.
func (s *State) durationAfter(before, lease *coordinationv1.Lease, gapless bool) time.Duration {
	written := DurationOf(lease, s.timing.Lease)
	switch {
	case lease.Spec.RenewTime.Equal(before.Spec.RenewTime):
		return s.duration
	case !gapless && isSameHolding(before, lease):
		return max(s.duration, written)
	}
	return written
}
