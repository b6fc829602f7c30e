// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// State holds everything that the rules depend on. Only its own methods change it.
type State struct {
	timing   Timing
	identity string
	address  string // where standbys reach this process; may be empty
	witness  bool   // whether somebody looks at the holder's process
	jitter   *rand.Rand

	// What is known of the Lease.
	known         bool                  // whether lease is current: false before the first answer, and from a conflict until it is explained
	lease         *coordinationv1.Lease // the newest version, nil if there is none
	duration      time.Duration         // how long the holder's claim lasts, as the holder wrote it, whatever an edit says
	claimExpires  time.Duration         // when the holder's claim expires
	distrustUntil time.Duration         // time until which an earlier holder may still write although its claim is gone (rule 5)
	restored      bool                  // whether the store was restored to an earlier state (rule 10)
	endAt         time.Duration         // time from which a standby may end after the store was restored

	// What is known of the holder's process, see evidence.go.
	note        holderNote    // what the holder says of itself in lease
	process     LeaderProcess // the process that is looked at
	leader      LeaderState   // what is seen of that process
	leaderSince time.Duration // since when leader is seen

	// The term of this replica. holding stays true: Run serves one term. See term.go.
	holding    bool
	term       Term
	acquiredAt time.Duration // when the acquisition was acknowledged
	sent       time.Duration // when the last acknowledged write was about to be sent
	proofUntil time.Duration // time until which the term may write only with a proof that every API server refuses the predecessors (rule 11)
	admitted   bool          // whether the API server's fence admits this replica, or there is none
	leading    bool          // whether lead was started
	gaveUp     bool          // whether the attempt to lead was abandoned
	endReason  Reason        // why the term has ended; empty: it has not

	// The end of lead.
	stopping     bool          // whether Run was asked to return
	leadReturned bool          // whether lead has returned; its writes may still be under way
	drainUntil   time.Duration // when lead must have returned and its writes must have ended
	quietAt      time.Duration // when lead has returned and none of its writes can be executed any more

	// The requests. At most one of each kind is in flight.
	writing, reading, watching        bool
	acquiringProofUntil               time.Duration // proofUntil, if the acquisition in flight begins a term
	writeAt, readAt, watchAt          time.Duration // when the next request of this kind may be sent
	writeFails, readFails, watchFails failures
	readFrom                          *coordinationv1.Lease // the newest version when the read was sent
	watchUp, watchCaughtUp            bool                  // whether the watch is established; whether it has sent a version
	watchUpAt                         time.Duration         // when the watch was established
}

// New returns the state of a replica that knows nothing yet. Standbys reach it at the address, which may
// be empty. witness says that somebody looks at the leader's process.
func New(identity string, timing Timing, address string, witness bool) *State {
	return &State{timing: timing, identity: identity, address: address, witness: witness, jitter: NewJitter(identity),
		drainUntil: never, quietAt: never}
}

// Decide returns the next action. It is called again after every event, and when the time of an
// ActWait has come.
func (s *State) Decide(now time.Duration) Action {
	if s.holding {
		return s.decideHolding(now)
	}
	switch {
	case s.stopping && !s.writing:
		return Action{Kind: ActEnd, Reason: ReasonNeverLed}
	case s.restored && (s.writing || now < s.endAt):
		return Action{Kind: ActWait, Until: max(s.endAt, now+s.timing.Retry)}
	case s.restored:
		return Action{Kind: ActEnd, Reason: ReasonStoreRestored}
	case s.process != s.targetProcess():
		return Action{Kind: ActLook}
	case now >= s.nextReadAt():
		return Action{Kind: ActRead}
	case now >= s.nextWatchAt():
		return Action{Kind: ActWatch}
	}
	wait := Action{Kind: ActWait, Until: min(s.nextReadAt(), s.nextWatchAt())}
	if !s.known || s.writing {
		return wait
	}
	act, at := Action{Kind: ActAcquire}, s.freeAt() // rules 3, 4 and 5
	switch {
	case s.lease == nil:
		act, at = Action{Kind: ActCreate}, 0 // rule 6: a creation begins no term
	case now < at && s.isLeaderGone(): // rule 11
		act.ProofUntil, at = at, now
	}
	if at = max(at, s.writeAt); now < at {
		wait.Until = min(wait.Until, at)
		return wait
	}
	return act
}

func (s *State) decideHolding(now time.Duration) Action {
	if end := s.endOfTerm(now); end != "" {
		return Action{Kind: ActEnd, Reason: end}
	}
	if kind := s.nextStep(now); kind != "" {
		return Action{Kind: kind}
	}
	switch {
	case now >= s.nextReadAt():
		return Action{Kind: ActRead}
	case now >= s.nextWatchAt():
		return Action{Kind: ActWatch}
	}
	wait := Action{Kind: ActWait, Until: min(s.Deadline(), s.nextStepAt(now), s.nextReadAt(), s.nextWatchAt())}
	if !s.known || s.writing {
		return wait
	}
	kind, at := ActRenew, max(s.sent+s.timing.Retry, s.writeAt)
	if now >= s.releaseAt() {
		kind, at = ActRelease, s.writeAt
	}
	if now >= at {
		return Action{Kind: kind}
	}
	wait.Until = min(wait.Until, at)
	return wait
}

// nextReadAt returns when the Lease is read next. A holder reads it only after a conflict.
func (s *State) nextReadAt() time.Duration {
	if s.reading || s.holding && s.known {
		return never
	}
	return s.readAt
}

// nextWatchAt returns when a watch is started. A replica whose reads fail, or that has only the Lease left
// to release, does not try to watch.
func (s *State) nextWatchAt() time.Duration {
	if s.watching || !s.known || s.readFails.n > 0 || s.quietAt != never {
		return never
	}
	return s.watchAt
}

// Proposal returns the Lease as the action writes it. The write requires the known version (rule 1). now
// is the replica's clock, and wallTime the time of day.
func (s *State) Proposal(act Action, now time.Duration, wallTime time.Time) *coordinationv1.Lease {
	switch act.Kind {
	case ActAcquire:
		lease := AcquiredLease(s.lease, s.identity, s.claimDuration(act.ProofUntil, now), wallTime)
		setNote(lease, holderNote{Holder: s.identity, Address: s.address, Early: act.ProofUntil > 0})
		return lease
	case ActRenew:
		return renewedLease(s.lease, s.claimDuration(s.proofUntil, now), wallTime)
	case ActRelease:
		return ReleasedLease(s.lease, wallTime)
	}
	return nil
}

// OnSent begins a write. Its answer, if it gets one, is passed to another method.
func (s *State) OnSent(act Action) {
	s.writing, s.acquiringProofUntil = true, act.ProofUntil
}

// OnCreated processes the Lease that this replica has created. No term begins (rule 6).
func (s *State) OnCreated(lease *coordinationv1.Lease, now time.Duration) {
	s.writing, s.reading = false, false // a read in flight was sent before the write
	s.learn(lease, now, false)
}

// OnWriteFailed postpones the next write. After a conflict nothing is written until the newer
// version is known: the watch shows it, or a read does. base is the version that the write
// required.
func (s *State) OnWriteFailed(base *coordinationv1.Lease, f Failure, now time.Duration) {
	s.writing = false
	s.writeFails.count(f)
	switch f.Kind {
	case FailConflict:
		if s.lease == base {
			s.known, s.reading = false, false // a read in flight was sent before the write
			s.readAt = now + s.backoff(s.writeFails, s.timing.Retry/16, s.backoffLimit(f), f)
		}
	case FailUnauthorized:
		if s.holding { // rule 9: its credentials are not accepted any more, or an API server that starts cannot check them
			s.endReason = ReasonUnauthorized
		}
		s.writeAt = now + s.backoff(s.writeFails, s.timing.Retry, s.backoffLimit(f), f)
	case FailRefused:
		s.writeAt = now + s.backoff(s.writeFails, s.timing.Retry, s.backoffLimit(f), f)
	case FailUnanswered:
		s.writeAt = now + s.backoff(s.writeFails, s.timing.Retry/2, s.backoffLimit(f), f)
		s.restartWatch(now) // the watch may hang too
	}
}

// OnReading begins a read.
func (s *State) OnReading() {
	s.reading, s.readFrom = true, s.lease
}

// OnRead processes the answer to a read, nil if there is no Lease. The read was consistent: it
// returned what the store held after it was sent.
func (s *State) OnRead(lease *coordinationv1.Lease, now time.Duration) {
	newest := s.lease
	s.reading, s.readFails = false, failures{}
	switch {
	case s.readFrom != newest && lease == nil: // the watch has shown a creation since
	case s.readFrom == newest && isOlder(lease, newest): // rule 10
		s.onRestored(now)
		return
	default:
		s.learn(lease, now, false)
		if s.lease != newest && s.watchUp && now-s.watchUpAt > s.timing.Retry {
			s.restartWatch(now) // the watch has missed this version: it may be dead
		}
	}
	s.known = true
	s.readAt = s.nextRead(now)
}

// OnReadFailed postpones the next read.
func (s *State) OnReadFailed(f Failure, now time.Duration) {
	s.reading = false
	s.readFails.count(f)
	s.readAt = now + s.backoff(s.readFails, s.timing.Retry, s.backoffLimit(f), f)
}

// IsReading reports whether the answer to a read is awaited.
func (s *State) IsReading() bool { return s.reading }

// IsWatching reports whether there is a watch, or an attempt to have one.
func (s *State) IsWatching() bool { return s.watching }

// OnWatching begins a watch, with the present state.
func (s *State) OnWatching() {
	s.watching, s.watchUp, s.watchCaughtUp = true, false, false
}

// OnWatchUp processes that the watch is established. From now on it shows all changes. It does not show
// that the Lease was deleted before, or that the store was restored, so a standby reads the Lease.
func (s *State) OnWatchUp(now time.Duration) {
	s.watchUp, s.watchUpAt = true, now
	if !s.holding {
		s.reading, s.readAt = false, now
	}
}

// OnEvent processes an event of the watch: a version, or a deletion, which has a version too.
func (s *State) OnEvent(lease *coordinationv1.Lease, deleted bool, now time.Duration) {
	gapless := s.watchCaughtUp
	s.watchCaughtUp = true
	switch {
	case !deleted:
		s.learn(lease, now, gapless)
	case s.lease == nil || isNewer(lease, s.lease):
		s.learn(nil, now, gapless)
	}
}

// OnWatchEnd starts the watch again, at once if the last one was established. Meanwhile a standby polls.
func (s *State) OnWatchEnd(f Failure, now time.Duration) {
	lived := s.watchUp && now-s.watchUpAt > s.timing.Retry
	s.watching, s.watchUp = false, false
	if lived {
		s.watchFails = failures{}
	}
	switch {
	case lived && f.Kind == FailNone:
		s.watchAt = now
		return
	case f.Kind == FailUnanswered:
		s.watchAt = now + s.jittered(s.timing.Retry)
	default:
		f.Kind = FailRefused
		s.watchFails.count(f)
		s.watchAt = now + s.backoff(s.watchFails, s.timing.Retry, MaxBackoff, f)
	}
	if s.readFails.n == 0 {
		s.readAt = min(s.readAt, now+s.jittered(s.timing.Retry))
	}
}

// restartWatch starts the watch again.
func (s *State) restartWatch(now time.Duration) {
	if s.watching {
		s.watching, s.watchUp, s.watchAt = false, false, now
	}
}

// nextRead returns when a standby reads the Lease next, if nothing happens before. With a watch, it is when
// the next watch begins.
func (s *State) nextRead(now time.Duration) time.Duration {
	if s.watchUp {
		return never
	}
	return now + s.jittered(s.timing.Retry)
}

// backoffLimit returns how long to wait at most between two reads or writes that fail. A refusal will last,
// but a leader must try again before its term ends.
func (s *State) backoffLimit(f Failure) time.Duration {
	if s.holding || f.Kind == FailUnanswered {
		return s.timing.Retry
	}
	return max(s.timing.Retry, MaxBackoff)
}

// backoff returns how long to wait after failures: around first, then four times as long each time,
// up to most; and for as long as the API server asks, unless that costs the term.
func (s *State) backoff(fails failures, first, most time.Duration, f Failure) time.Duration {
	d := first
	for n := 1; n < fails.n && d < most; n++ {
		d *= 4
	}
	if s.holding {
		f.After = min(f.After, s.timing.Retry)
	}
	return max(s.jittered(min(d, most)), f.After)
}

// jittered returns a random duration between half of d and one and a half d.
func (s *State) jittered(d time.Duration) time.Duration {
	return d/2 + time.Duration(s.jitter.Int64N(int64(d)))
}
