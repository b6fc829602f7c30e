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
	own      Timing
	identity string
	address  string // where standbys reach this process; may be empty
	witness  bool   // whether somebody looks at the holder's process
	jitter   *rand.Rand

	// What is known of the Lease.
	known         bool                  // whether lease is current: false before the first answer, and from a conflict until it is explained
	lease         *coordinationv1.Lease // the newest version, nil if there is none
	duration      time.Duration         // of the holder's claim, as the holder wrote it, whatever an edit says
	claimExpires  time.Duration         // when the holder's claim expires
	distrustUntil time.Duration         // until when an earlier holder may act without a claim (rule 5)
	restored      bool                  // whether the store was restored (rule 10)
	endAt         time.Duration         // when a standby may end, if the store was restored

	// What is known of the holder's process, see evidence.go.
	note        holderNote    // what the holder says of itself in lease
	watched     Watched       // the process that is looked at
	leader      LeaderState   // what is seen of that process
	leaderSince time.Duration // since when leader is seen

	// The term of this replica. holding stays true: Run serves one term. See term.go.
	holding   bool
	term      Term
	began     time.Duration // when the acquisition was acknowledged
	sent      time.Duration // when the last acknowledged write was about to be sent
	owesUntil time.Duration // until when the term may not write without proof (rule 11)
	admitted  bool          // whether the API server's fence admits this replica, or there is none
	leading   bool          // whether lead was started
	gaveUp    bool          // whether the attempt to lead was abandoned
	lost      Reason        // why the term has ended; empty: it has not

	// The end of lead.
	stopping     bool          // whether Run was asked to return
	leadReturned bool          // whether lead has returned; its writes may still be under way
	drainUntil   time.Duration // when lead must have returned and its writes must have ended
	quietAt      time.Duration // when lead has returned and none of its writes can be executed any more

	// The requests. At most one of each kind is in flight.
	writing, reading, watching        bool
	acquiringOwesUntil                time.Duration // owesUntil, if the acquisition in flight begins a term
	writeAt, readAt, watchAt          time.Duration // when the next request of this kind may be sent
	writeFails, readFails, watchFails failures
	readFrom                          *coordinationv1.Lease // the newest version when the read was sent
	watchUp, watchCaughtUp            bool                  // whether the watch is established; whether it has sent a version
	watchUpAt                         time.Duration         // when the watch was established
}

// New returns the state of a replica that knows nothing yet. Standbys reach it at the address, which may
// be empty. witness says that somebody looks at the leader's process.
func New(identity string, own Timing, address string, witness bool) *State {
	return &State{own: own, identity: identity, address: address, witness: witness, jitter: NewJitter(identity),
		drainUntil: never, quietAt: never}
}

// Decide returns the next action. It is called again after every event, and when the time of an
// ActWait has come.
func (p *State) Decide(now time.Duration) Action {
	if p.holding {
		return p.decideHolding(now)
	}
	switch {
	case p.stopping && !p.writing:
		return Action{Kind: ActEnd, Reason: ReasonNeverLed}
	case p.restored && (p.writing || now < p.endAt):
		return Action{Kind: ActWait, Until: max(p.endAt, now+p.own.Retry)}
	case p.restored:
		return Action{Kind: ActEnd, Reason: ReasonStoreRestored}
	case p.watched != p.watchable():
		return Action{Kind: ActLook}
	case now >= p.nextReadAt():
		return Action{Kind: ActRead}
	case now >= p.nextWatchAt():
		return Action{Kind: ActWatch}
	}
	wait := Action{Kind: ActWait, Until: min(p.nextReadAt(), p.nextWatchAt())}
	if !p.known || p.writing {
		return wait
	}
	act, at := Action{Kind: ActAcquire}, p.freeAt() // rules 3, 4 and 5
	switch {
	case p.lease == nil:
		act, at = Action{Kind: ActCreate}, 0 // rule 6: a creation begins no term
	case now < at && p.isLeaderGone(): // rule 11
		act.OwesUntil, at = at, now
	}
	if at = max(at, p.writeAt); now < at {
		wait.Until = min(wait.Until, at)
		return wait
	}
	return act
}

func (p *State) decideHolding(now time.Duration) Action {
	if end := p.endOfTerm(now); end != "" {
		return Action{Kind: ActEnd, Reason: end}
	}
	if kind := p.nextStep(now); kind != "" {
		return Action{Kind: kind}
	}
	switch {
	case now >= p.nextReadAt():
		return Action{Kind: ActRead}
	case now >= p.nextWatchAt():
		return Action{Kind: ActWatch}
	}
	wait := Action{Kind: ActWait, Until: min(p.Deadline(), p.nextStepAt(now), p.nextReadAt(), p.nextWatchAt())}
	if !p.known || p.writing {
		return wait
	}
	kind, at := ActRenew, max(p.sent+p.own.Retry, p.writeAt)
	if now >= p.releaseAt() {
		kind, at = ActRelease, p.writeAt
	}
	if now >= at {
		return Action{Kind: kind}
	}
	wait.Until = min(wait.Until, at)
	return wait
}

// nextReadAt returns when the Lease is read next. A holder reads it only after a conflict.
func (p *State) nextReadAt() time.Duration {
	if p.reading || p.holding && p.known {
		return never
	}
	return p.readAt
}

// nextWatchAt returns when a watch is started. A replica whose reads fail, or that has only the Lease left
// to release, does not try to watch.
func (p *State) nextWatchAt() time.Duration {
	if p.watching || !p.known || p.readFails.n > 0 || p.quietAt != never {
		return never
	}
	return p.watchAt
}

// Proposal returns the Lease as the action writes it. The write requires the known version (rule 1). now
// is the replica's clock, and day the time of day.
func (p *State) Proposal(act Action, now time.Duration, day time.Time) *coordinationv1.Lease {
	switch act.Kind {
	case ActAcquire:
		lease := AcquiredLease(p.lease, p.identity, p.claimed(act.OwesUntil, now), day)
		setNote(lease, holderNote{Holder: p.identity, Address: p.address, Early: act.OwesUntil > 0})
		return lease
	case ActRenew:
		return renewedLease(p.lease, p.claimed(p.owesUntil, now), day)
	case ActRelease:
		return ReleasedLease(p.lease, day)
	}
	return nil
}

// OnSent begins a write. Its answer, if it gets one, is passed to another method.
func (p *State) OnSent(act Action) {
	p.writing, p.acquiringOwesUntil = true, act.OwesUntil
}

// OnCreated processes the Lease that this replica has created. No term begins (rule 6).
func (p *State) OnCreated(lease *coordinationv1.Lease, now time.Duration) {
	p.writing, p.reading = false, false // a read in flight was sent before the write
	p.learn(lease, now, false)
}

// OnWriteFailed postpones the next write. After a conflict nothing is written until the newer
// version is known: the watch shows it, or a read does. base is the version that the write
// required.
func (p *State) OnWriteFailed(base *coordinationv1.Lease, f Failure, now time.Duration) {
	p.writing = false
	p.writeFails.count(f)
	switch f.Kind {
	case FailConflict:
		if p.lease == base {
			p.known, p.reading = false, false // a read in flight was sent before the write
			p.readAt = now + p.backoff(p.writeFails, p.own.Retry/16, p.patience(f), f)
		}
	case FailUnauthorized:
		if p.holding { // rule 9: its credentials are not accepted any more, or an API server that starts cannot check them
			p.lost = ReasonUnauthorized
		}
		p.writeAt = now + p.backoff(p.writeFails, p.own.Retry, p.patience(f), f)
	case FailRefused:
		p.writeAt = now + p.backoff(p.writeFails, p.own.Retry, p.patience(f), f)
	case FailUnanswered:
		p.writeAt = now + p.backoff(p.writeFails, p.own.Retry/2, p.patience(f), f)
		p.restartWatch(now) // the watch may hang too
	}
}

// OnReading begins a read.
func (p *State) OnReading() {
	p.reading, p.readFrom = true, p.lease
}

// OnRead processes the answer to a read, nil if there is no Lease. The read was consistent: it
// returned what the store held after it was sent.
func (p *State) OnRead(lease *coordinationv1.Lease, now time.Duration) {
	newest := p.lease
	p.reading, p.readFails = false, failures{}
	switch {
	case p.readFrom != newest && lease == nil: // the watch has shown a creation since
	case p.readFrom == newest && isOlder(lease, newest): // rule 10
		p.onRestored(now)
		return
	default:
		p.learn(lease, now, false)
		if p.lease != newest && p.watchUp && now-p.watchUpAt > p.own.Retry {
			p.restartWatch(now) // the watch has missed this version: it may be dead
		}
	}
	p.known = true
	p.readAt = p.nextRead(now)
}

// OnReadFailed postpones the next read.
func (p *State) OnReadFailed(f Failure, now time.Duration) {
	p.reading = false
	p.readFails.count(f)
	p.readAt = now + p.backoff(p.readFails, p.own.Retry, p.patience(f), f)
}

// IsReading reports whether the answer to a read is awaited.
func (p *State) IsReading() bool { return p.reading }

// IsWatching reports whether there is a watch, or an attempt to have one.
func (p *State) IsWatching() bool { return p.watching }

// OnWatching begins a watch, with the present state.
func (p *State) OnWatching() {
	p.watching, p.watchUp, p.watchCaughtUp = true, false, false
}

// OnWatchUp processes that the watch is established. From now on it shows all changes. It does not show
// that the Lease was deleted before, or that the store was restored, so a standby reads the Lease.
func (p *State) OnWatchUp(now time.Duration) {
	p.watchUp, p.watchUpAt = true, now
	if !p.holding {
		p.reading, p.readAt = false, now
	}
}

// OnEvent processes an event of the watch: a version, or a deletion, which has a version too.
func (p *State) OnEvent(lease *coordinationv1.Lease, deleted bool, now time.Duration) {
	gapless := p.watchCaughtUp
	p.watchCaughtUp = true
	switch {
	case !deleted:
		p.learn(lease, now, gapless)
	case p.lease == nil || isNewer(lease, p.lease):
		p.learn(nil, now, gapless)
	}
}

// OnWatchEnd starts the watch again, at once if the last one was established. Meanwhile a standby polls.
func (p *State) OnWatchEnd(f Failure, now time.Duration) {
	lived := p.watchUp && now-p.watchUpAt > p.own.Retry
	p.watching, p.watchUp = false, false
	if lived {
		p.watchFails = failures{}
	}
	switch {
	case lived && f.Kind == FailNone:
		p.watchAt = now
		return
	case f.Kind == FailUnanswered:
		p.watchAt = now + p.around(p.own.Retry)
	default:
		f.Kind = FailRefused
		p.watchFails.count(f)
		p.watchAt = now + p.backoff(p.watchFails, p.own.Retry, MaxBackoff, f)
	}
	if p.readFails.n == 0 {
		p.readAt = min(p.readAt, now+p.around(p.own.Retry))
	}
}

// restartWatch starts the watch again.
func (p *State) restartWatch(now time.Duration) {
	if p.watching {
		p.watching, p.watchUp, p.watchAt = false, false, now
	}
}

// nextRead returns when a standby reads the Lease next, if nothing happens before. With a watch, it is when
// the next watch begins.
func (p *State) nextRead(now time.Duration) time.Duration {
	if p.watchUp {
		return never
	}
	return now + p.around(p.own.Retry)
}

// patience returns how long to wait at most between two reads or writes that fail. A refusal will last,
// but a leader must try again before its term ends.
func (p *State) patience(f Failure) time.Duration {
	if p.holding || f.Kind == FailUnanswered {
		return p.own.Retry
	}
	return max(p.own.Retry, MaxBackoff)
}

// backoff returns how long to wait after failures: around first, then four times as long each time,
// up to most; and for as long as the API server asks, unless that costs the term.
func (p *State) backoff(fails failures, first, most time.Duration, f Failure) time.Duration {
	d := first
	for n := 1; n < fails.n && d < most; n++ {
		d *= 4
	}
	if p.holding {
		f.After = min(f.After, p.own.Retry)
	}
	return max(p.around(min(d, most)), f.After)
}

// around returns a random duration between half of d and one and a half d.
func (p *State) around(d time.Duration) time.Duration {
	return d/2 + time.Duration(p.jitter.Int64N(int64(d)))
}
