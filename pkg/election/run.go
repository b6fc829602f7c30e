// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// LostError is the cause with which the context of lead ends, and the error of Run, if the term
// ended before lead had returned.
type LostError struct {
	Reason protocol.Reason
	Term   protocol.Term
}

// Error implements error.
func (e *LostError) Error() string {
	return fmt.Sprintf("leadership of term %s ended: %s", e.Term, e.Reason)
}

// ErrRestored is the error of Run if the API server shows an earlier version of the Lease than before:
// etcd was restored from a snapshot. The process has to start anew, since nothing that it knows is true.
var ErrRestored = errors.New("the API server shows an earlier version of the lease than before, its store was restored")

// ErrUnfinished must be wrapped by the error of lead if some of its work may still go on, for
// instance a goroutine that did not return. The Lease is then not released but expires.
var ErrUnfinished = errors.New("work may be unfinished")

// Run competes for the Lease until it is won, then calls lead and returns when lead has returned,
// or when Run gives it up:
//
//   - ctx ends while standing by: Run returns nil.
//   - the Lease is won: the fence in the API server names this replica. lead is called, and the client's
//     fence opened, when the API server admits it and no predecessor can write any more. If it is not
//     admitted for a lease duration, the Lease is given up and Run returns a *LostError.
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
		l.fence.Close()
		stopRequests()
		e.requests.wg.Wait()
		e.timer.Stop()
	}()
	if l.apiFence != nil {
		e.requests.wg.Go(func() { l.apiFence.Run(requests, l.holds.Load) })
	}
	klog.FromContext(ctx).Info("Competing for the lease", "lease", l.lease, "identity", l.who.Identity)
	return e.run(ctx, requests, lead)
}

// runUnelected calls lead without an election.
func (l *Lock) runUnelected(ctx context.Context, lead func(context.Context) error) error {
	l.fence.TurnOff()
	l.shown.Unelected()
	if l.apiFence != nil {
		asking, stop := context.WithCancel(context.WithoutCancel(ctx))
		var asked sync.WaitGroup
		asked.Go(func() { l.apiFence.Run(asking, func() bool { return false }) })
		defer asked.Wait()
		defer stop()
	}
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
		l.fence.Close()
		return fmt.Errorf("%w: the controllers did not drain within %s", ErrUnfinished, l.cfg.DrainTimeout)
	}
}

// elector runs one lock. Only the goroutine of Run uses it: it asks the protocol what to do, starts
// the requests, and tells the protocol what has happened.
type elector struct {
	lock     *Lock
	protocol *protocol.State
	requests *requester
	timer    *time.Timer

	stopStarting context.CancelFunc      // stops naming this replica, and the proof
	cancelLead   context.CancelCauseFunc // nil before lead has started
	leadDone     chan error              // receives once, when lead has returned
	leadErr      error                   // the error of lead
	idle         <-chan struct{}         // closed when lead has returned and no write is in flight
}

func newElector(l *Lock) *elector {
	t := l.cfg.timing()
	return &elector{
		lock:     l,
		protocol: protocol.New(l.who.Identity, t, l.who.Process, l.who.Witness != nil, l.apiFence != nil),
		requests: newRequester(l.who, l.lease.Name, t.RequestTimeout()),
		timer:    time.NewTimer(0),

		stopStarting: func() {},
	}
}

func (e *elector) run(ctx, requests context.Context, lead func(context.Context) error) error {
	stop := ctx.Done()
	for {
		now := e.now()
		act := e.protocol.Decide(now)
		e.lock.shown.Update(e.protocol.View(), act.Kind == protocol.ActEnd)
		switch act.Kind {
		case protocol.ActEnd:
			return e.end(ctx, act.Reason)
		case protocol.ActLead:
			e.lead(ctx, requests, lead)
			continue
		case protocol.ActGiveUp:
			klog.FromContext(ctx).Error(e.lock.shown.Problem(), "Giving the lease up: this replica cannot begin to lead", "lease", e.lock.lease)
			e.stopStarting()
			e.protocol.OnGiveUp(now)
			continue
		case protocol.ActWait:
		default:
			e.start(requests, act, now)
			continue
		}
		// The timer stops while the machine is suspended, the clock does not. Check it soon after
		// the machine resumes.
		e.timer.Reset(min(act.Until-now, e.lock.cfg.RetryPeriod.Duration))
		select {
		case <-stop:
			stop = nil
			e.drain(ctx)
		case msg := <-e.requests.inbox:
			if e.handle(klog.FromContext(ctx), msg) {
				e.begin(requests)
			}
		case e.leadErr = <-e.leadDone:
			e.leadReturned()
		case <-e.idle:
			e.idle = nil
			e.quiet(requests)
		case <-e.lock.fenceChanged:
			e.protocol.OnServerFence(e.lock.shown.ServerFence() == apifence.Enforced)
		case <-e.timer.C:
		}
	}
}

func (e *elector) now() time.Duration {
	return e.lock.who.Clock.Now()
}

// start starts an action that is a request.
func (e *elector) start(ctx context.Context, act protocol.Action, now time.Duration) {
	p := e.protocol
	switch act.Kind {
	case protocol.ActRead:
		p.OnReading()
		e.requests.read(ctx)
	case protocol.ActWatch:
		p.OnWatching()
		e.requests.watch(ctx)
	case protocol.ActLook:
		p.OnLook()
		_, process := p.Watched()
		e.requests.look(ctx, process)
	default:
		timeout := e.requests.timeout
		if _, holding := p.Term(); holding { // an answer after the deadline is useless
			timeout = min(timeout, p.Deadline()-now)
		}
		day := time.Now().Truncate(time.Microsecond) // the precision of the Lease
		base, lease := p.View().Lease, p.Proposal(act, now, day)
		if act.Kind == protocol.ActCreate {
			lease = protocol.NewLease(e.lock.lease, e.lock.who.Identity, e.lock.cfg.LeaseDuration.Duration, day)
		}
		p.OnSent(act)
		e.requests.write(ctx, act.Kind, base, lease, timeout)
	}
}

// handle processes the outcome of a request and reports whether the Lease was won.
func (e *elector) handle(logger klog.Logger, msg message) bool {
	p, now := e.protocol, e.now()
	switch msg := msg.(type) {
	case readDone:
		if msg.id != e.requests.readID || !p.IsReading() {
			return false
		}
		f := failureOf(msg.err)
		e.lock.shown.Finished(logger, "get", msg.err, f)
		if f.Kind != protocol.FailNone {
			p.OnReadFailed(f, now)
			return false
		}
		p.OnRead(msg.lease, now)
	case writeDone:
		return e.handleWrite(logger, msg, now)
	case watchStarted:
		if msg.id == e.requests.watchID && p.IsWatching() {
			p.OnWatchUp(now)
			e.lock.shown.Finished(logger, "watch", nil, protocol.Failure{})
		}
	case watchEvent:
		if lease, ok := msg.event.Object.(*coordinationv1.Lease); ok && msg.id == e.requests.watchID && p.IsWatching() {
			p.OnEvent(lease, msg.event.Type == watch.Deleted, now)
		}
	case watchEnded:
		if msg.id == e.requests.watchID && p.IsWatching() {
			f := failureOf(msg.err)
			e.lock.shown.Finished(logger, "watch", msg.err, f)
			p.OnWatchEnd(f, now)
		}
	case leaderSeen:
		if msg.id == e.requests.lookID {
			p.OnLeader(msg.state, now)
			holder, process := p.Watched()
			e.lock.shown.SawLeader(logger, holder, process, msg.state)
		}
	case raised:
		e.handleRaised(logger, msg.err)
	case proved:
		p.OnProved()
	case kept:
		e.handleRaised(logger, msg.err)
	case quiet:
		at := now
		if !msg.enforced {
			at = e.lock.fence.QuietAt()
		}
		p.OnQuiet(at)
	}
	return false
}

// handleRaised processes that the fence in the API server admits this replica, or why it never will.
func (e *elector) handleRaised(logger klog.Logger, err error) {
	switch {
	case err == nil:
		e.protocol.OnRaised()
	case errors.Is(err, apifence.ErrSuperseded):
		logger.Error(err, "Another replica holds the lease", "lease", e.lock.lease)
		e.protocol.OnEvicted(protocol.ReasonHolderChanged)
	default:
		logger.Error(err, "This replica cannot lead any more", "lease", e.lock.lease)
		e.protocol.OnEvicted(protocol.ReasonCannotLead)
	}
}

func (e *elector) handleWrite(logger klog.Logger, msg writeDone, now time.Duration) bool {
	p, f := e.protocol, failureOf(msg.err)
	e.lock.shown.Wrote(logger, msg.kind, msg.err, f, msg.took)
	if f.Kind != protocol.FailNone {
		p.OnWriteFailed(msg.base, f, now)
		return false
	}
	switch msg.kind {
	case protocol.ActCreate:
		logger.Info("Created the lease, waiting for its duration: somebody may lead on one that was deleted",
			"lease", e.lock.lease, "duration", e.lock.cfg.LeaseDuration.Duration)
		p.OnCreated(msg.lease, now)
	case protocol.ActAcquire:
		return p.OnAcquired(msg.lease, msg.sent, now)
	case protocol.ActRenew:
		p.OnRenewed(msg.lease, msg.sent, now)
		if e.cancelLead != nil && !e.lock.fence.Extend(msg.sent+e.lock.cfg.RenewDeadline.Duration) {
			p.OnExpired() // the deadline has passed since now was read
		}
	case protocol.ActRelease:
		p.OnReleased()
	}
	return false
}

// begin lets the fence in the API server name this replica, which has won the Lease, and proves that no
// predecessor can write if the term owes that.
func (e *elector) begin(requests context.Context) {
	e.lock.holds.Store(true)
	e.requests.look(requests, protocol.Process{})
	starting, stop := context.WithCancel(requests)
	e.stopStarting = stop
	if e.lock.apiFence == nil {
		e.protocol.OnRaised()
		return
	}
	owes := e.protocol.Owes(e.now()) != protocol.Obligation{}
	e.requests.wg.Go(func() {
		err := e.lock.apiFence.Raise(starting)
		if starting.Err() != nil {
			return
		}
		e.requests.report(starting, raised{err})
		if err == nil && owes && e.lock.apiFence.Prove(starting, e.lock.shown.Unproved) == nil {
			e.requests.report(starting, proved{})
		}
	})
}

// lead opens the fence for the term and starts lead.
func (e *elector) lead(ctx, requests context.Context, lead func(context.Context) error) {
	p := e.protocol
	e.stopStarting()
	e.lock.shown.Started(klog.FromContext(ctx), p.View())
	p.OnLead()
	e.lock.fence.OpenUntil(p.Deadline())
	e.lock.shown.Update(p.View(), false)
	// lead drains after ctx has ended, so the end of ctx does not end the term.
	leadCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	e.cancelLead, e.leadDone = cancel, make(chan error, 1)
	done := e.leadDone
	go func() { done <- lead(leadCtx) }()
	if e.lock.apiFence != nil {
		keeping := klog.NewContext(requests, klog.FromContext(ctx))
		e.requests.wg.Go(func() {
			if err := e.lock.apiFence.Keep(keeping); err != nil {
				e.requests.report(requests, kept{err})
			}
		})
	}
	e.lock.shown.Record(p.View().Lease, "became leader")
}

// drain begins to stop: a standby returns, a leader drains.
func (e *elector) drain(ctx context.Context) {
	now := e.now()
	e.protocol.OnStop(now+e.lock.cfg.DrainTimeout, now)
	e.stopStarting()
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
	e.protocol.OnLeadReturned(now+e.lock.cfg.DrainTimeout, now, unfinished)
	if !unfinished {
		e.idle = e.lock.fence.Shut() // rule 8
	}
}

// quiet lets the Lease be released when no write of lead can be executed any more (rule 8). A write
// without an answer may still be, unless the API server refuses what comes late, which is asked for now.
func (e *elector) quiet(requests context.Context) {
	at := e.lock.fence.QuietAt()
	e.protocol.OnQuiet(at)
	if at <= e.now() || e.lock.apiFence == nil {
		return
	}
	e.requests.wg.Go(func() { e.requests.report(requests, quiet{e.lock.apiFence.IsEnforced(requests)}) })
}

// end returns from Run.
func (e *elector) end(ctx context.Context, reason protocol.Reason) error {
	logger, p := klog.FromContext(ctx), e.protocol
	term, held := p.Term()
	defer func() { e.lock.shown.Ended(reason, held) }()
	if !held {
		if reason == protocol.ReasonStoreRestored {
			return ErrRestored
		}
		return nil
	}
	e.lock.fence.Close() // rule 9: before lead's context ends
	e.stopStarting()
	lost := &LostError{Reason: reason, Term: term}
	if e.cancelLead != nil {
		e.cancelLead(lost)
		defer func() {
			logger.Info("Stopped leading", "lease", e.lock.lease, "term", term, "reason", reason)
			e.lock.shown.Record(p.View().Lease, "stopped leading")
		}()
	}
	switch {
	case p.IsReleasable(e.now()) && reason != protocol.ReasonReleaseFailed && reason != protocol.ReasonCannotLead:
		return e.leadErr // lead had finished; whoever holds the Lease now may have it
	case e.leadDone != nil && reason != protocol.ReasonDrainTimeout:
		e.awaitLead()
	}
	return errors.Join(lost, e.leadErr)
}

// awaitLead waits for lead for as long as the Lease still covers it.
func (e *elector) awaitLead() {
	left := e.protocol.CoveredUntil() - e.now()
	e.timer.Reset(max(left, 0))
	select {
	case e.leadErr = <-e.leadDone:
	case <-e.timer.C:
	}
}
