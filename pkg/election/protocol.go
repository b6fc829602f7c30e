// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"math"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// protocol decides what a replica does, by the rules of docs/adr/0003-leader-election.md. It holds
// everything that the rules depend on, and nothing else changes it. Its methods do no I/O and read
// no clock: times are those of the replica's own clock, and now is always passed in.
//
// decide, proposal, freeAt and the methods named is... only ask. The methods named on... change the
// state when something has happened: Run calls them.
type protocol struct {
	own      timing
	identity string
	process  Process
	jitter   *rand.Rand
	asked    bool // the API server is, for its fence

	// What is known of the Lease.
	known    bool                  // false before the first answer, and from a conflict until it is explained
	lease    *coordinationv1.Lease // the newest version, nil if there is none
	duration time.Duration         // that the holder has written, whatever an edit says
	claim    time.Duration         // when the holder's claim expires
	distrust time.Duration         // until when an earlier holder may act without a claim, see rule 5
	attempt  *attempt              // the last acquisition, until its fate is known
	restored bool                  // the store was, and Run has not told so yet

	// What is known of the holder's process, see evidence.go.
	witness     bool          // somebody looks at it
	fenced      bool          // the fence in the API server is in force
	note        holderNote    // of lease
	watched     watched       // the process that is looked at
	leader      LeaderState   // what is seen of it
	leaderSince time.Duration // since when
	cautious    time.Duration // evidence does not count before

	// The term of this replica. Holding is for good: Run serves one term.
	holding bool
	term    Term
	sent    time.Duration // when the last acknowledged write was about to be sent
	early   takeover      // how it began
	lost    Reason        // why the term has ended

	// The end of lead.
	stopping     bool          // Run was asked to return
	leadReturned bool          // its writes may still be under way
	drainUntil   time.Duration // when lead must have returned and its writes must have ended
	quietAt      time.Duration // when lead has returned and none of its writes can be executed any more

	// The requests. At most one of each kind is in flight.
	writing, reading, watching        bool
	writeAt, readAt, watchAt          time.Duration // none before this time
	writeFails, readFails, watchFails failures
	readFrom                          *coordinationv1.Lease // the newest version when the read was sent
	watchUp, watchCaughtUp            bool                  // established; has shown a version
	watchUpAt                         time.Duration
}

// attempt is an acquisition. All attempts to replace one version write the same acquireTime, so it
// does not matter which of them is executed.
type attempt struct {
	base     string // the resourceVersion that it replaces
	term     Term
	acquired *metav1.MicroTime
	early    takeover
}

// never is a time that never comes.
const never = time.Duration(math.MaxInt64)

const (
	// A standby with a watch still reads the Lease every 70 to 80 s, or asks for the fence in the API
	// server instead. That is less than once a minute, and often enough that the connection on which
	// it will take the Lease is not closed as idle, which client and API server do after 90 s. A watch
	// that is dead shows when the claim of the Lease that is known has expired.
	rereadPeriod = 70 * time.Second
	rereadJitter = 10 * time.Second

	// maxBackoff limits the time between two requests of one kind that are refused. With the
	// jitter, a standby makes less than six requests a minute.
	maxBackoff = 40 * time.Second
)

func newProtocol(identity string, own timing) *protocol {
	return &protocol{own: own, identity: identity, jitter: newJitter(identity), drainUntil: never, quietAt: never}
}

type actionKind string

// What a replica may do next.
const (
	actWait    actionKind = "wait"
	actRead    actionKind = "read"
	actWatch   actionKind = "watch"
	actCreate  actionKind = "create"  // the Lease; leading takes an actAcquire later
	actAcquire actionKind = "acquire" // it from the last holder
	actResume  actionKind = "resume"  // an acquisition of ours that got no answer
	actRenew   actionKind = "renew"
	actRelease actionKind = "release"
	actLook    actionKind = "look" // at the process that is watchable now, instead of another
	actEnd     actionKind = "end"  // return from Run
)

type action struct {
	kind   actionKind
	until  time.Duration // of actWait
	reason Reason        // of actEnd
	early  takeover      // of actAcquire
}

// decide returns the next action. It is called again after every event, and when the time of an
// actWait has come.
func (p *protocol) decide(now time.Duration) action {
	if p.holding {
		return p.decideHolding(now)
	}
	switch {
	case p.stopping && !p.writing:
		return action{kind: actEnd, reason: ReasonNeverLed}
	case p.watched != p.watchable():
		return action{kind: actLook}
	case !p.reading && now >= p.readAt:
		return action{kind: actRead}
	case p.isWatchWanted() && now >= p.watchAt:
		return action{kind: actWatch}
	}
	wait := action{kind: actWait, until: never}
	if !p.reading {
		wait.until = p.readAt
	}
	if p.isWatchWanted() {
		wait.until = min(wait.until, p.watchAt)
	}
	if !p.known || p.writing {
		return wait
	}
	kind, at := actAcquire, min(p.freeAt(), p.earlyAt()) // rules 3, 4, 5 and 12
	switch {
	case p.lease == nil:
		kind, at = actCreate, 0 // rule 6: it does not lead by that
	case p.isOwnAttempt(p.lease):
		kind, at = actResume, p.distrust // rule 11
	}
	at = max(at, p.writeAt)
	if now >= at {
		act := action{kind: kind}
		if kind == actAcquire && now < p.freeAt() {
			act.early = takeover{evidence: p.leader, claim: p.freeAt()}
		}
		return act
	}
	wait.until = min(wait.until, at)
	return wait
}

func (p *protocol) decideHolding(now time.Duration) action {
	deadline := p.sent + p.own.deadline
	quiet := now >= p.quietAt
	switch {
	case p.lost != "":
		return action{kind: actEnd, reason: p.lost}
	case now >= deadline && quiet:
		return action{kind: actEnd, reason: ReasonReleaseFailed}
	case now >= deadline: // rule 2
		return action{kind: actEnd, reason: ReasonRenewDeadline}
	case now >= p.drainUntil && !quiet: // rule 8
		return action{kind: actEnd, reason: ReasonDrainTimeout}
	case !p.known && !p.reading && now >= p.readAt:
		return action{kind: actRead}
	case p.isWatchWanted() && now >= p.watchAt:
		return action{kind: actWatch}
	}
	wait := action{kind: actWait, until: deadline}
	if !quiet {
		wait.until = min(wait.until, p.drainUntil, p.quietAt)
	}
	if !p.known && !p.reading {
		wait.until = min(wait.until, p.readAt)
	}
	if p.isWatchWanted() {
		wait.until = min(wait.until, p.watchAt)
	}
	if !p.known || p.writing {
		return wait
	}
	kind, at := actRenew, max(p.sent+p.own.retry, p.writeAt)
	if quiet { // rule 8
		kind, at = actRelease, p.writeAt
	}
	if now >= at {
		return action{kind: kind}
	}
	wait.until = min(wait.until, at)
	return wait
}

// proposal returns the Lease as the action writes it. The write requires the version that is known
// (rule 1). now is the time of day.
func (p *protocol) proposal(act action, now time.Time) *coordinationv1.Lease {
	switch act.kind {
	case actAcquire:
		lease := acquiredLease(p.lease, p.identity, p.own.lease, now)
		setNote(lease, holderNote{Holder: p.identity, Process: p.process, Evidence: act.early.evidence})
		if p.attempt != nil && p.attempt.base == lease.ResourceVersion {
			lease.Spec.AcquireTime = p.attempt.acquired // rule 11
		}
		return lease
	case actResume, actRenew:
		return renewedLease(p.lease, p.own.lease, now)
	case actRelease:
		return releasedLease(p.lease, now)
	}
	return nil
}

// freeAt returns the time from which nobody else can believe that it leads, if no newer version is
// seen.
func (p *protocol) freeAt() time.Duration {
	return max(p.claim, p.distrust)
}

// isWatchWanted reports whether a watch is missing. A replica whose reads fail does not try to
// watch, nor does one that has only the Lease left to release.
func (p *protocol) isWatchWanted() bool {
	return !p.watching && p.known && p.readFails.n == 0 && p.quietAt == never
}

// isOwnAttempt reports whether the Lease shows an acquisition by this replica (rule 11). The write
// required the version before, so nobody can have held the Lease in between. An edit that only
// names this replica has another acquireTime.
func (p *protocol) isOwnAttempt(lease *coordinationv1.Lease) bool {
	a := p.attempt
	return a != nil && holderOf(lease) == p.identity && termOf(lease) == a.term && lease.Spec.AcquireTime.Equal(a.acquired)
}

// isExpired reports whether the holder's claim has expired or almost expired. Another replica may
// have seen the last renewal a little earlier; the fence of the holder is closed by settleTime
// before the end of its claim, see safeLease.
func (p *protocol) isExpired(now time.Duration) bool {
	return now >= p.claim-settleTime
}

// isFreed reports whether the Lease is free in a later version (rule 4). Within a term, the holder
// must have released it, or it must have been free before.
func (p *protocol) isFreed(later *coordinationv1.Lease) bool {
	if p.lease == nil || termOf(p.lease) != termOf(later) || isFree(p.lease) {
		return isFree(later)
	}
	return isRelease(p.lease, later)
}

// learn processes a version of the Lease, or its absence (nil). gapless reports that no version
// between this and the newest was missed.
func (p *protocol) learn(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	switch {
	case lease == nil && p.lease == nil && p.known: // nothing new
	case lease != nil && p.lease != nil && !isNewer(lease, p.lease): // a late echo
	case p.holding:
		p.judgeTerm(lease, now)
		p.setLease(lease, now)
	default:
		gapless = gapless || lease != nil && p.isOwnAttempt(lease)
		p.weighEvidence(lease, now)
		p.judgeClaim(lease, now, gapless)
		p.setLease(lease, now)
	}
}

// relearn processes a version that is older than the newest, but true: the store was restored to an
// earlier state (rule 10). Whoever led in the lost versions may still act.
func (p *protocol) relearn(lease *coordinationv1.Lease, now time.Duration) {
	p.restored = true
	if p.holding {
		p.judgeTerm(lease, now)
	} else {
		p.distrust = max(p.distrust, now+max(p.own.lease, p.duration))
		p.judgeClaim(lease, now, false)
	}
	p.setLease(lease, now)
}

func (p *protocol) setLease(lease *coordinationv1.Lease, now time.Duration) {
	if !p.known && !p.reading {
		p.readAt = p.nextRead(now)
	}
	p.lease, p.note, p.known, p.writeFails = lease, noteOf(lease), true, failures{}
	if a := p.attempt; a != nil && (lease == nil || lease.ResourceVersion != a.base && !p.isOwnAttempt(lease)) {
		p.attempt = nil // another version has replaced its base: if it was not executed before, it cannot succeed
	}
}

// judgeClaim sets until when the holder of a version, and those before it, may act.
func (p *protocol) judgeClaim(lease *coordinationv1.Lease, now time.Duration, gapless bool) {
	if lease == nil {
		// Rule 5: the last holder may have renewed the Lease until it was deleted. This also holds
		// if the Lease is absent at first sight: somebody may lead on one that was just deleted.
		p.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))
		p.claim, p.duration = 0, 0
		return
	}
	before, duration := p.lease, durationOf(lease, p.own.lease)
	if before != nil && before.UID == lease.UID {
		duration = p.durationAfter(before, lease, gapless)
	}
	switch {
	case before == nil:
	case isSameHolding(before, lease):
	case isFree(before) && isNext(before, lease):
	case gapless && isNext(before, lease) && noteOf(lease).Evidence == LeaderGone: // rule 12: it has ended
	case !p.isExpired(now) || !gapless: // rule 5; another UID is never without a gap
		p.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))
	}
	claim := now + duration // rule 3
	if p.isFreed(lease) {   // rule 4
		claim = 0
	}
	p.claim, p.duration = claim, duration
}

// durationAfter returns the duration that counts after another version of the Lease (rule 3). Whoever
// takes or renews it sets the renewTime anew, an edit does not. Where renewals were missed, the last
// version may be an edit of one.
func (p *protocol) durationAfter(before, lease *coordinationv1.Lease, gapless bool) time.Duration {
	written := durationOf(lease, p.own.lease)
	switch {
	case lease.Spec.RenewTime.Equal(before.Spec.RenewTime):
		return p.duration
	case !gapless && isSameHolding(before, lease):
		return max(p.duration, written)
	}
	return written
}

// judgeTerm ends the term of this replica if the version is not of it (rule 9). A renewal that got
// no answer, or an edit of other fields, does not extend it (rule 2): only an answer proves when a
// write was sent.
func (p *protocol) judgeTerm(lease *coordinationv1.Lease, now time.Duration) {
	switch {
	case lease == nil:
		p.lost = ReasonLeaseDeleted
	case lease.UID != p.term.LeaseUID:
		p.lost = ReasonLeaseReplaced
	case now >= p.quietAt && isFree(lease) && termOf(lease) == p.term:
		p.lost = ReasonReleased // the answer to the release was lost or is late
	case holderOf(lease) != p.identity || termOf(lease) != p.term:
		p.lost = ReasonHolderChanged
	}
}

// onSent begins a write. Its answer, if it gets one, is passed to another method.
func (p *protocol) onSent(act action, lease *coordinationv1.Lease) {
	p.writing = true
	if act.kind == actAcquire {
		p.attempt = &attempt{base: lease.ResourceVersion, term: termOf(lease), acquired: lease.Spec.AcquireTime, early: act.early}
	}
}

// onCreated processes the Lease that this replica has created. No term begins (rule 6).
func (p *protocol) onCreated(lease *coordinationv1.Lease, now time.Duration) {
	p.writing, p.reading = false, false // a read in flight is from before
	p.learn(lease, now, false)
}

// onAcquired processes the answer to an acquisition. sent is the time before it was sent. It
// reports whether lead may start.
func (p *protocol) onAcquired(lease *coordinationv1.Lease, sent, now time.Duration) bool {
	p.writing, p.reading = false, false
	if now >= sent+p.own.deadline { // rule 2: the process was paused, or the answer too slow
		p.learn(lease, now, true)
		return false
	}
	newest := p.lease // the watch may be ahead of the answer
	if p.attempt != nil && now < p.attempt.early.claim {
		p.early = p.attempt.early
	}
	p.holding, p.term, p.sent = true, termOf(lease), sent
	p.lease, p.note, p.known, p.attempt = lease, noteOf(lease), true, nil
	p.writeAt, p.writeFails = now, failures{}
	p.learn(newest, now, true)
	if p.stopping {
		p.quietAt = now
	}
	return !p.stopping
}

// onRenewed extends the term, unless it has ended meanwhile.
func (p *protocol) onRenewed(lease *coordinationv1.Lease, sent, now time.Duration) {
	p.writing = false
	if now >= p.sent+p.own.deadline { // rule 2
		p.onExpired()
		return
	}
	p.sent, p.writeFails = sent, failures{}
	p.learn(lease, now, true)
}

// onExpired ends the term.
func (p *protocol) onExpired() {
	p.lost = ReasonRenewDeadline
}

// onReleased ends the term.
func (p *protocol) onReleased() {
	p.writing = false
	p.lost = ReasonReleased
}

// onWriteFailed postpones the next write. After a conflict nothing is written until the newer
// version is known: the watch shows it, or a read does. base is the version that the write
// required.
func (p *protocol) onWriteFailed(base *coordinationv1.Lease, f failure, now time.Duration) {
	p.writing = false
	p.writeFails.count(f)
	switch f.kind {
	case failConflict:
		if p.lease == base {
			p.known, p.reading = false, false // a read in flight is from before
			p.readAt = now + p.backoff(p.writeFails, p.own.retry/16, p.patience(f), f)
		}
	case failRefused:
		p.writeAt = now + p.backoff(p.writeFails, p.own.retry, p.patience(f), f)
	case failUnanswered:
		p.writeAt = now + p.backoff(p.writeFails, p.own.retry/2, p.patience(f), f)
		p.restartWatch(now) // it may hang as well
	}
}

// onReading begins a read.
func (p *protocol) onReading() {
	p.reading, p.readFrom = true, p.lease
}

// onRead processes the answer to a read, nil if there is no Lease. The read was consistent: it
// returned what the store held after it was sent.
func (p *protocol) onRead(lease *coordinationv1.Lease, now time.Duration) {
	newest := p.lease
	p.reading, p.readFails = false, failures{}
	switch {
	case p.readFrom != newest && lease == nil: // the watch has shown a creation since
	case p.readFrom == newest && isOlder(lease, newest): // rule 10
		p.relearn(lease, now)
		p.watchFails.count(failure{kind: failRefused})
		p.watching, p.watchUp = false, false
		p.watchAt = now + p.backoff(p.watchFails, p.own.retry, maxBackoff, failure{})
	default:
		p.learn(lease, now, false)
		if p.lease != newest && p.watchUp && now-p.watchUpAt > p.own.retry {
			p.restartWatch(now) // it should have shown this: it may be dead
		}
	}
	p.known = true
	p.readAt = p.nextRead(now)
}

// onReadFailed postpones the next read.
func (p *protocol) onReadFailed(f failure, now time.Duration) {
	p.reading = false
	p.readFails.count(f)
	p.readAt = now + p.backoff(p.readFails, p.own.retry, p.patience(f), f)
}

// onWatching begins a watch, with the present state.
func (p *protocol) onWatching() {
	p.watching, p.watchUp, p.watchCaughtUp = true, false, false
}

// onWatchUp processes that the watch is established. From now on it shows all changes. But it does
// not show that the Lease was deleted before, or that the store was restored; a standby reads it.
func (p *protocol) onWatchUp(now time.Duration) {
	p.watchUp, p.watchUpAt = true, now
	if !p.holding {
		p.reading, p.readAt = false, now
	}
}

// onEvent processes what the watch shows: a version, or a deletion, which has a version too.
func (p *protocol) onEvent(lease *coordinationv1.Lease, deleted bool, now time.Duration) {
	gapless := p.watchCaughtUp
	p.watchCaughtUp = true
	switch {
	case !deleted:
		p.learn(lease, now, gapless)
	case p.lease == nil || isNewer(lease, p.lease):
		p.learn(nil, now, gapless)
	}
}

// onWatchEnd starts the watch again: at once if it has lived. Meanwhile a standby polls.
func (p *protocol) onWatchEnd(f failure, now time.Duration) {
	lived := p.watchUp && now-p.watchUpAt > p.own.retry
	p.watching, p.watchUp = false, false
	if lived {
		p.watchFails = failures{}
	}
	switch {
	case lived && f.kind == failNone:
		p.watchAt = now
		return
	case f.kind == failUnanswered:
		p.watchAt = now + p.around(p.own.retry)
	default:
		f.kind = failRefused
		p.watchFails.count(f)
		p.watchAt = now + p.backoff(p.watchFails, p.own.retry, maxBackoff, f)
	}
	if p.readFails.n == 0 {
		p.readAt = min(p.readAt, now+p.around(p.own.retry))
	}
}

// restartWatch starts the watch again.
func (p *protocol) restartWatch(now time.Duration) {
	if p.watching {
		p.watching, p.watchUp, p.watchAt = false, false, now
	}
}

// onStop begins to stop: a standby returns, a leader drains.
func (p *protocol) onStop(drainUntil time.Duration) {
	p.stopping = true
	p.drainUntil = min(p.drainUntil, drainUntil)
}

// onLeadReturned bounds the time for which the last writes of lead may go on. unfinished reports
// that some of its work may go on for ever: then the Lease is not released.
func (p *protocol) onLeadReturned(drainUntil, now time.Duration, unfinished bool) {
	p.leadReturned = true
	p.drainUntil = min(p.drainUntil, drainUntil)
	if unfinished {
		p.drainUntil = now
	}
}

// onQuiet lets the Lease be released from the time on at which no write of lead can be executed any
// more (rule 8).
func (p *protocol) onQuiet(at time.Duration) {
	p.quietAt, p.writeAt = at, 0
}

// nextRead returns when a standby reads the Lease next, if nothing happens before.
func (p *protocol) nextRead(now time.Duration) time.Duration {
	if p.watchUp && p.asked {
		return never // but when the next watch begins
	}
	if p.watchUp {
		return now + rereadPeriod + time.Duration(p.jitter.Int64N(int64(rereadJitter)))
	}
	return now + p.around(p.own.retry)
}

// patience returns how long to wait between two reads or writes that fail, at most. A refusal will
// last; but the term of a leader runs.
func (p *protocol) patience(f failure) time.Duration {
	if p.holding || f.kind == failUnanswered {
		return p.own.retry
	}
	return max(p.own.retry, maxBackoff)
}

// backoff returns how long to wait after failures: around first, then four times as long each time,
// up to most; and for as long as the API server asks, unless that costs the term.
func (p *protocol) backoff(fails failures, first, most time.Duration, f failure) time.Duration {
	d := first
	for n := 1; n < fails.n && d < most; n++ {
		d *= 4
	}
	if p.holding {
		f.after = min(f.after, p.own.retry)
	}
	return max(p.around(min(d, most)), f.after)
}

// around returns a random duration between half of d and one and a half d.
func (p *protocol) around(d time.Duration) time.Duration {
	return d/2 + time.Duration(p.jitter.Int64N(int64(d)))
}
