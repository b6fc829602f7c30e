// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// freeAt returns the time from which nobody else can believe that it leads, if no newer version is
// seen.
func (p *State) freeAt() time.Duration {
	return max(p.claimExpires, p.distrustUntil)
}

// isExpired reports whether the holder's claim has expired or almost expired. Another replica may
// have seen the last renewal a little earlier; the fence of the holder is closed by SettleTime
// before the end of its claim, see SafeLease.
func (p *State) isExpired(now time.Duration) bool {
	return now >= p.claimExpires-SettleTime
}

// isFreed reports whether the Lease is free in a later version (rule 4). Within a term, a free Lease counts
// only if its holder released it or if the version before was free too.
func (p *State) isFreed(later *coordinationv1.Lease) bool {
	if p.lease == nil || TermOf(p.lease) != TermOf(later) || isFree(p.lease) {
		return isFree(later)
	}
	return isRelease(p.lease, later)
}

// learn processes a version of the Lease, or its absence (nil). gapless reports that no version
// between this and the newest was missed.
func (p *State) learn(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	switch {
	case lease == nil && p.lease == nil && p.known: // nothing new
	case lease != nil && p.lease != nil && !isNewer(lease, p.lease): // an old version, shown late
	case p.holding:
		p.judgeTerm(lease, now)
		p.setLease(lease, now)
	default:
		p.weighEvidence(lease, now)
		p.judgeClaim(lease, now, gapless)
		p.setLease(lease, now)
	}
}

func (p *State) setLease(lease *coordinationv1.Lease, now time.Duration) {
	if !p.known && !p.reading {
		p.readAt = p.nextRead(now)
	}
	p.lease, p.note, p.known, p.writeFails = lease, noteOf(lease), true, failures{}
}

// onRestored processes an answer that is older than the newest version, but true: the store was
// restored to an earlier state (rule 10), and whatever this process knows may be wrong. The process ends,
// and the restarted process knows nothing. A standby waits before it ends: a leader of the lost versions may
// still act, and the restarted process might see a Lease that is free.
func (p *State) onRestored(now time.Duration) {
	if p.holding {
		p.lost = ReasonStoreRestored
		return
	}
	p.restored, p.endAt = true, max(p.freeAt(), now+max(p.own.Lease, p.duration))
}

// judgeClaim sets until when the holder of a version, and its predecessors, may act.
func (p *State) judgeClaim(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	if lease == nil {
		// Rule 5: the last holder may have renewed the Lease until it was deleted. This also holds
		// if the Lease is absent at first sight: somebody may lead on one that was just deleted.
		p.distrustUntil = max(p.freeAt(), now+max(p.own.Lease, p.duration))
		p.claimExpires, p.duration = 0, 0
		return
	}
	before, duration := p.lease, DurationOf(lease, p.own.Lease)
	if before != nil && before.UID == lease.UID {
		duration = p.durationAfter(before, lease, gapless)
	}
	switch {
	case before == nil:
	case isSameHolding(before, lease):
	case isFree(before) && isNext(before, lease):
	case gapless && isNext(before, lease) && noteOf(lease).Early: // its claim covers the earlier claims, see holderNote
	case !p.isExpired(now) || !gapless: // rule 5; another UID is never without a gap
		p.distrustUntil = max(p.freeAt(), now+max(p.own.Lease, p.duration))
	}
	expires := now + duration // rule 3
	if p.isFreed(lease) {     // rule 4
		expires = 0
	}
	p.claimExpires, p.duration = expires, duration
}

// durationAfter returns the duration that counts after another version of the Lease (rule 3). An
// acquisition or a renewal changes the renewTime, an edit does not. Where renewals were missed, the last
// version may be an edit of a renewal.
func (p *State) durationAfter(before, lease *coordinationv1.Lease, gapless bool) time.Duration {
	written := DurationOf(lease, p.own.Lease)
	switch {
	case lease.Spec.RenewTime.Equal(before.Spec.RenewTime):
		return p.duration
	case !gapless && isSameHolding(before, lease):
		return max(p.duration, written)
	}
	return written
}
