// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"math"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// view is what a standby knows of the Lease. All times are on its own clock.
type view struct {
	known bool                  // false until the first response
	lease *coordinationv1.Lease // nil if there is none

	// claim is when the holder's claim expires: the duration that the holder has written, counted
	// from when this replica first saw this version of the Lease, which is after it was written.
	claim time.Duration

	// distrust is until when an earlier holder may still act that neither released the Lease nor
	// let its claim expire. That happens if the Lease was deleted, edited or taken by somebody who
	// breaks the rules, or if this replica missed versions.
	distrust time.Duration
}

// freeAt returns the time from which nobody else can believe that it leads, if no newer version is
// seen.
func (v view) freeAt() time.Duration {
	return max(v.claim, v.distrust)
}

// observe returns the view after the Lease was seen, or seen to be absent (nil). gapless reports
// that no version between this and the last one was missed.
func (v view) observe(lease *coordinationv1.Lease, now time.Duration, gapless bool, own timing) view {
	if lease == nil {
		if v.known && v.lease == nil {
			return v
		}
		// The last holder may have renewed the Lease until it was deleted. This also holds if the
		// Lease is absent at first sight: somebody may lead on a Lease that was just deleted.
		return view{known: true, distrust: max(v.freeAt(), now+max(own.lease, durationOf(v.lease, 0)))}
	}
	previous := v.lease
	if previous != nil && !isNewer(lease, previous) {
		return v
	}
	next := view{known: true, lease: lease, distrust: v.distrust}
	duration := durationOf(lease, own.lease)
	switch {
	case previous == nil:
	case isSameHolding(previous, lease):
		// A holder never changes its duration, so somebody has edited it.
		duration = max(duration, durationOf(previous, 0))
		next.claim = v.claim
	case isFree(previous) && isNext(previous, lease):
	case !v.ranOut(now, own) || !gapless || previous.UID != lease.UID:
		next.distrust = max(v.freeAt(), now+max(own.lease, durationOf(previous, 0)))
	}
	if v.isFreed(lease) {
		next.claim = 0
	} else {
		next.claim = max(next.claim, now+duration)
	}
	return next
}

// isFreed reports whether the Lease is free in a later version. Within a term, the holder must have
// released it, or it must have been free before.
func (v view) isFreed(later *coordinationv1.Lease) bool {
	if v.lease == nil || termOf(v.lease) != termOf(later) || isFree(v.lease) {
		return isFree(later)
	}
	return isRelease(v.lease, later)
}

// ranOut reports whether the claim has expired or almost expired. Almost is enough: another replica
// may have seen the last renewal a little earlier, and the holder gave up at its renew deadline.
func (v view) ranOut(now time.Duration, own timing) bool {
	return now >= v.claim-(own.lease-own.deadline)
}

// isNext reports whether the later version belongs to the next term.
func isNext(earlier, later *coordinationv1.Lease) bool {
	term := termOf(earlier)
	term.Transitions++
	return termOf(later) == term
}

// isSameHolding reports whether the later version is a renewal, a release, or an edit of other
// fields.
func isSameHolding(earlier, later *coordinationv1.Lease) bool {
	if termOf(earlier) != termOf(later) {
		return false
	}
	return holderOf(earlier) == holderOf(later) || isRelease(earlier, later)
}

// isRelease reports whether the later version of the same term is its release. A release sets both
// times again; two manual edits that look like one do not.
func isRelease(earlier, later *coordinationv1.Lease) bool {
	return holderOf(earlier) != "" && isFree(later) && !later.Spec.RenewTime.Equal(earlier.Spec.RenewTime)
}

// Reason says why a term ended or why a replica did not get the Lease.
type Reason string

// The reasons why a term ends.
const (
	ReasonReleased      Reason = "Released"      // after the drain
	ReasonRenewDeadline Reason = "RenewDeadline" // no renewal succeeded in time
	ReasonHolderChanged Reason = "HolderChanged" // the Lease names somebody else
	ReasonLeaseReplaced Reason = "LeaseReplaced" // it was deleted and created anew
	ReasonLeaseDeleted  Reason = "LeaseDeleted"  // it was deleted
	ReasonDrainTimeout  Reason = "DrainTimeout"  // lead did not return in time, or left work behind
	ReasonReleaseFailed Reason = "ReleaseFailed" // lead returned, but the release failed
	ReasonNeverLed      Reason = "NeverLed"      // the replica was stopped before it led
)

// tenure is what the holder knows of its own term.
type tenure struct {
	term  Term
	lease *coordinationv1.Lease // the newest version known to be its own
	sent  time.Duration         // when the last acknowledged write was about to be sent
	lost  Reason                // set when the Lease was seen to belong to another
}

// observe processes a version of the Lease, or its absence.
func (t *tenure) observe(lease *coordinationv1.Lease, identity string) {
	switch {
	case lease == nil:
		t.lost = ReasonLeaseDeleted
	case !isNewer(lease, t.lease):
		// A late event from before the term.
	case lease.UID != t.term.LeaseUID:
		t.lost = ReasonLeaseReplaced
	case holderOf(lease) != identity || termOf(lease) != t.term:
		t.lost = ReasonHolderChanged
	default:
		// This is a renewal of ours whose response was lost, or an edit of other fields. Neither
		// extends the term: only a response proves when a write was sent. The next renewal, based
		// on this version, extends it.
		t.lease = lease
	}
}

// acquisition is a write that would have begun a term, but got no response, or got it after the
// term had passed.
type acquisition struct {
	base     string // the resourceVersion that the write required
	term     Term
	acquired *metav1.MicroTime // as written; an edit that only names this replica does not have it
}

type phase int

const (
	standingBy phase = iota
	leading          // lead runs, or its last writes are in flight
	releasing        // lead has returned and nothing is in flight
)

// never is a time that never comes.
const never = time.Duration(math.MaxInt64)

// state is everything that the protocol depends on. Its methods neither do I/O nor read a clock.
type state struct {
	timing
	identity string
	phase    phase
	view     view
	tenure   *tenure // while leading and releasing

	stopping   bool          // Run was asked to return
	drainUntil time.Duration // while leading: when lead must have returned

	unanswered *acquisition // the last one, if it failed or came too late

	writing  bool          // a write is in flight; there is at most one
	writeAt  time.Duration // no write before this time, after one that failed
	reading  bool
	readAt   time.Duration // when to read the Lease, unless an event arrives before
	doubtful bool          // after a conflict, until the newer version is seen
	watched  bool          // a watch is running
	watchAt  time.Duration // no watch before this time, after one that failed
}

type actionKind string

// What a replica may do next.
const (
	actWait    actionKind = "wait"
	actRead    actionKind = "read"
	actWatch   actionKind = "watch"
	actCreate  actionKind = "create"  // the Lease; leading takes an actAcquire later
	actAcquire actionKind = "acquire" // it from the last holder
	actResume  actionKind = "resume"  // an acquisition of ours that got no response
	actRenew   actionKind = "renew"
	actRelease actionKind = "release"
	actEnd     actionKind = "end" // return from Run
)

type action struct {
	kind   actionKind
	until  time.Duration // of actWait
	reason Reason        // of actEnd
}

// decide returns the next action. It is called again after every event, and when the time of an
// actWait has come.
func (s *state) decide(now time.Duration) action {
	if s.phase != standingBy {
		return s.decideHolding(now)
	}
	switch {
	case s.stopping && !s.writing:
		return action{kind: actEnd, reason: ReasonNeverLed}
	case !s.reading && now >= s.readAt:
		return action{kind: actRead}
	case s.view.known && !s.watched && now >= s.watchAt:
		return action{kind: actWatch}
	}
	wait := action{kind: actWait, until: s.nextRequest()}
	if !s.view.known || s.writing || s.doubtful {
		return wait
	}
	kind, at := actAcquire, s.view.freeAt()
	switch {
	case s.view.lease == nil:
		// The Lease is created at once. Waiting would prove nothing: a create requires no version,
		// so others may have held a Lease unseen. The new Lease is a claim that has to expire like
		// any other; by then the claim of every earlier holder has expired too.
		kind, at = actCreate, 0
	case s.isUnanswered(s.view.lease):
		kind, at = actResume, s.view.distrust
	}
	at = max(at, s.writeAt)
	if now >= at {
		return action{kind: kind}
	}
	wait.until = min(wait.until, at)
	return wait
}

// isUnanswered reports whether the Lease shows an acquisition by this replica that got no response.
// That write required the version before, so nobody can have held the Lease in between.
func (s *state) isUnanswered(lease *coordinationv1.Lease) bool {
	a := s.unanswered
	return a != nil && holderOf(lease) == s.identity && termOf(lease) == a.term && lease.Spec.AcquireTime.Equal(a.acquired)
}

func (s *state) decideHolding(now time.Duration) action {
	t := s.tenure
	deadline := t.sent + s.deadline
	switch {
	case t.lost != "":
		return action{kind: actEnd, reason: t.lost}
	case now >= deadline && s.phase == releasing:
		return action{kind: actEnd, reason: ReasonReleaseFailed}
	case now >= deadline:
		return action{kind: actEnd, reason: ReasonRenewDeadline}
	case s.phase == leading && now >= s.drainUntil:
		return action{kind: actEnd, reason: ReasonDrainTimeout}
	case s.doubtful && !s.reading && now >= s.readAt:
		return action{kind: actRead}
	case s.phase == leading && !s.watched && now >= s.watchAt:
		return action{kind: actWatch}
	}
	until := min(deadline, s.nextRequest())
	if s.phase == leading {
		until = min(until, s.drainUntil)
	}
	if s.writing || s.doubtful {
		return action{kind: actWait, until: until}
	}
	kind, at := actRenew, max(t.sent+s.retry, s.writeAt)
	if s.phase == releasing {
		kind, at = actRelease, s.writeAt
	}
	if now >= at {
		return action{kind: kind}
	}
	return action{kind: actWait, until: min(until, at)}
}

// nextRequest returns when the next read or watch is due.
func (s *state) nextRequest() time.Duration {
	next := never
	if !s.reading && (s.phase == standingBy || s.doubtful) {
		next = s.readAt
	}
	if !s.watched && s.view.known && s.phase != releasing {
		next = min(next, s.watchAt)
	}
	return next
}
