// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
)

// Reason says why a term ended or why a replica did not get the Lease.
type Reason string

// The reasons why a term ends.
const (
	ReasonReleased      Reason = "Released"      // after the drain
	ReasonRenewDeadline Reason = "RenewDeadline" // no renewal succeeded in time
	ReasonHolderChanged Reason = "HolderChanged" // the Lease names somebody else
	ReasonLeaseReplaced Reason = "LeaseReplaced" // it was deleted and created anew
	ReasonLeaseDeleted  Reason = "LeaseDeleted"  // it was deleted
	ReasonDrainTimeout  Reason = "DrainTimeout"  // lead or its writes did not end in time
	ReasonReleaseFailed Reason = "ReleaseFailed" // lead returned, but the release failed
	ReasonNeverLed      Reason = "NeverLed"      // the replica was stopped before it led
)

// LostError is the cause with which the context of lead ends, and the error of Run, if the term
// ended before lead had returned.
type LostError struct {
	Reason Reason
	Term   Term
}

// Error implements error.
func (e *LostError) Error() string {
	return fmt.Sprintf("leadership of term %s ended: %s", e.Term, e.Reason)
}

// ErrUnfinished must be wrapped by the error of lead if some of its work may still go on, for
// instance a goroutine that did not return. The Lease is then not released but expires.
var ErrUnfinished = errors.New("work may be unfinished")

// Run competes for the Lease until it is won, then calls lead and returns when lead has returned,
// or when Run gives it up:
//
//   - ctx ends while standing by: Run returns nil.
//   - ctx ends while leading: the context of lead is cancelled. The Lease is renewed while lead
//     drains. It is released after lead has returned, its last writes have finished and none that
//     got no answer can be executed any more. Run returns the error of lead. If that takes longer
//     than the DrainTimeout or lead returns ErrUnfinished, the Lease is not released and Run
//     returns a *LostError.
//   - lead returns by itself: its context is cancelled, then the same.
//   - the term is lost: the fence closes, then the context of lead is cancelled with a *LostError
//     as its cause. Run waits for lead for as long as the Lease would still have covered it, and
//     returns the *LostError joined with the error of lead.
//
// So Run may return while a lead that ignores its context still runs. That lead cannot write any
// more, and the process should exit. A lock serves one Run. With LeaderElect off, the fence is
// open until lead has returned, or has not returned within the DrainTimeout.
func (l *Lock) Run(ctx context.Context, lead func(ctx context.Context) error) error {
	if !l.used.CompareAndSwap(false, true) {
		return errors.New("a lock can be run only once: its terms must not be confused")
	}
	if !l.cfg.LeaderElect {
		return l.runUnelected(ctx, lead)
	}
	requests, stopRequests := context.WithCancel(context.WithoutCancel(ctx))
	e := newElector(l)
	defer func() {
		l.fence.close()
		stopRequests()
		e.requests.wg.Wait()
		e.timer.Stop()
	}()
	klog.FromContext(ctx).Info("Competing for the lease", "lease", l.lease, "identity", l.who.Identity)
	return e.run(ctx, requests, lead)
}

// runUnelected calls lead without an election.
func (l *Lock) runUnelected(ctx context.Context, lead func(context.Context) error) error {
	l.fence.turnOff()
	l.shown.unelected()
	done := make(chan error, 1)
	go func() { done <- lead(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(l.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		l.fence.close()
		return fmt.Errorf("%w: the controllers did not drain within %s", ErrUnfinished, l.cfg.DrainTimeout)
	}
}

// elector runs one lock. Only the goroutine of Run uses it: it asks the protocol what to do, starts
// the requests, and tells the protocol what has happened.
type elector struct {
	lock     *Lock
	protocol *protocol
	requests *requester
	timer    *time.Timer

	cancelLead context.CancelCauseFunc // nil before lead has started
	leadDone   chan error              // receives once, when lead has returned
	leadErr    error                   // the error of lead
	idle       <-chan struct{}         // closed when lead has returned and no write is in flight
}

func newElector(l *Lock) *elector {
	t := l.cfg.timing()
	p := newProtocol(l.who.Identity, t)
	p.process, p.witness, p.asked = l.who.Process, l.who.Witness != nil, l.prepare != nil
	return &elector{
		lock:     l,
		protocol: p,
		requests: newRequester(l.who, l.lease.Name, t.requestTimeout()),
		timer:    time.NewTimer(0),
	}
}

func (e *elector) run(ctx, requests context.Context, lead func(context.Context) error) error {
	stop := ctx.Done()
	for {
		now := e.now()
		act := e.protocol.decide(now)
		e.lock.shown.update(e.protocol, act)
		switch act.kind {
		case actEnd:
			return e.end(ctx, act.reason)
		case actWait:
		default:
			e.start(requests, act, now)
			continue
		}
		// The timer stops while the machine is suspended, the clock does not. Check it soon after
		// the machine resumes.
		e.timer.Reset(min(act.until-now, e.protocol.own.retry))
		select {
		case <-stop:
			stop = nil
			e.drain(ctx)
		case msg := <-e.requests.inbox:
			if e.handle(klog.FromContext(ctx), msg) {
				e.begin(ctx, lead)
			}
		case e.leadErr = <-e.leadDone:
			e.leadReturned()
		case <-e.idle:
			e.idle = nil
			e.protocol.onQuiet(e.lock.quietAt())
		case <-e.lock.fenceChanged:
			e.protocol.onServerFence(e.lock.shown.serverFence() == ServerFenceEnforced)
		case <-e.timer.C:
		}
	}
}

func (e *elector) now() time.Duration {
	return e.lock.who.Clock.Now()
}

// start starts an action that is a request.
func (e *elector) start(ctx context.Context, act action, now time.Duration) {
	p := e.protocol
	switch act.kind {
	case actRead:
		p.onReading()
		e.requests.read(ctx)
	case actWatch:
		p.onWatching()
		e.requests.watch(ctx)
	case actLook:
		p.onLook()
		e.requests.look(ctx, p.watched.process)
	default:
		timeout := e.requests.timeout
		if p.holding { // an answer after the deadline is useless
			timeout = min(timeout, p.sent+p.own.deadline-now)
		}
		base, lease := p.lease, p.proposal(act, time.Now().Truncate(time.Microsecond)) // the precision of the Lease
		if act.kind == actCreate {
			lease = newLease(e.lock.lease, p.identity, p.own.lease, time.Now().Truncate(time.Microsecond))
		}
		prepare := func(context.Context) {}
		if act.kind == actAcquire && p.writeFails.n == 0 && e.lock.prepare != nil {
			prepare = e.lock.prepare
		}
		p.onSent(act, lease)
		e.requests.write(ctx, act.kind, base, lease, timeout, prepare)
	}
}

// handle processes the outcome of a request and reports whether lead may start.
func (e *elector) handle(logger klog.Logger, msg message) bool {
	p, now := e.protocol, e.now()
	switch msg := msg.(type) {
	case readDone:
		if msg.id != e.requests.readID || !p.reading {
			return false
		}
		f := e.lock.shown.finished(logger, "get", msg.err)
		if f.kind != failNone {
			p.onReadFailed(f, now)
			return false
		}
		p.onRead(msg.lease, now)
		if p.restored {
			p.restored = false
			logger.Info("The API server shows an earlier version of the lease than before: its store was restored", "lease", e.lock.lease)
			if e.lock.restored != nil {
				e.lock.restored()
			}
		}
	case writeDone:
		return e.handleWrite(logger, msg, now)
	case watchStarted:
		if msg.id == e.requests.watchID && p.watching {
			p.onWatchUp(now)
			e.lock.shown.finished(logger, "watch", nil)
		}
	case watchEvent:
		if lease, ok := msg.event.Object.(*coordinationv1.Lease); ok && msg.id == e.requests.watchID && p.watching {
			p.onEvent(lease, msg.event.Type == watch.Deleted, now)
		}
	case watchEnded:
		if msg.id == e.requests.watchID && p.watching {
			p.onWatchEnd(e.lock.shown.finished(logger, "watch", msg.err), now)
		}
	case leaderSeen:
		if msg.id == e.requests.lookID {
			p.onLeader(msg.state, now)
			e.lock.shown.sawLeader(logger, p)
		}
	}
	return false
}

func (e *elector) handleWrite(logger klog.Logger, msg writeDone, now time.Duration) bool {
	p := e.protocol
	f := e.lock.shown.wrote(logger, msg)
	if f.kind != failNone {
		p.onWriteFailed(msg.base, f, now)
		return false
	}
	switch msg.kind {
	case actCreate:
		logger.Info("Created the lease, waiting for its duration: somebody may lead on one that was deleted",
			"lease", e.lock.lease, "duration", p.own.lease)
		p.onCreated(msg.lease, now)
	case actAcquire, actResume:
		return p.onAcquired(msg.lease, msg.sent, now)
	case actRenew:
		p.onRenewed(msg.lease, msg.sent, now)
		if p.lost == "" && !e.lock.fence.extend(msg.sent+p.own.deadline) {
			p.onExpired() // the deadline has passed since now was read
		}
	case actRelease:
		p.onReleased()
	}
	return false
}

// begin opens the fence for the term just won, then starts lead.
func (e *elector) begin(ctx context.Context, lead func(context.Context) error) {
	p := e.protocol
	e.requests.look(ctx, Process{})
	e.lock.early = p.early
	e.lock.fence.openUntil(p.sent + p.own.deadline)
	e.lock.shown.update(p, action{})
	// lead drains after ctx has ended, so the end of ctx does not end the term.
	leadCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	e.cancelLead, e.leadDone = cancel, make(chan error, 1)
	done := e.leadDone
	go func() { done <- lead(leadCtx) }()
	klog.FromContext(ctx).Info("Started leading", "lease", e.lock.lease, "term", p.term)
	if p.early.evidence != "" {
		klog.FromContext(ctx).Info("Took the lease before it expired", "lease", e.lock.lease, "from", p.watched.holder, "evidence", p.early.evidence)
		e.lock.shown.metrics.tookEarly(string(p.early.evidence))
	}
	e.lock.shown.record(p.lease, "became leader")
}

// drain begins to stop: a standby returns, a leader drains.
func (e *elector) drain(ctx context.Context) {
	e.protocol.onStop(e.now() + e.lock.cfg.DrainTimeout)
	if e.cancelLead != nil {
		e.cancelLead(context.Cause(ctx))
	}
}

// leadReturned lets the last writes of lead finish before the Lease is released; there are some if
// lead has left goroutines behind. After ErrUnfinished the Lease is not released.
func (e *elector) leadReturned() {
	e.leadDone = nil
	e.cancelLead(nil)
	now := e.now()
	unfinished := errors.Is(e.leadErr, ErrUnfinished)
	e.protocol.onLeadReturned(now+e.lock.cfg.DrainTimeout, now, unfinished)
	if !unfinished {
		e.idle = e.lock.fence.shut() // rule 8
	}
}

// end returns from Run.
func (e *elector) end(ctx context.Context, reason Reason) error {
	logger, p := klog.FromContext(ctx), e.protocol
	defer e.lock.shown.ended(reason)
	if !p.holding {
		return nil
	}
	e.lock.fence.close() // rule 9: before lead's context ends
	lost := &LostError{Reason: reason, Term: p.term}
	if e.cancelLead != nil { // it has led, and did not only get the Lease while it was stopping
		e.cancelLead(lost)
		defer func() {
			logger.Info("Stopped leading", "lease", e.lock.lease, "term", p.term, "reason", reason)
			e.lock.shown.record(p.lease, "stopped leading")
		}()
		e.objectToTakeover(ctx)
	}
	switch {
	case e.now() >= p.quietAt && reason != ReasonReleaseFailed:
		return e.leadErr // lead had finished; whoever holds the Lease now may have it
	case e.leadDone != nil && reason != ReasonDrainTimeout:
		e.awaitLead()
	}
	return errors.Join(lost, e.leadErr)
}

// awaitLead waits for lead for as long as the Lease still covers it.
func (e *elector) awaitLead() {
	left := e.protocol.sent + e.protocol.own.covered() - e.now()
	e.timer.Reset(max(left, 0))
	select {
	case e.leadErr = <-e.leadDone:
	case <-e.timer.C:
	}
}
