// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"time"

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
// etcd was restored from a snapshot. The process has to start anew, since its caches may be wrong.
var ErrRestored = errors.New("the API server shows an earlier version of the Lease than before; etcd was restored")

// ErrUnfinished must be wrapped by the error of lead if some of its work may still go on, for
// instance a goroutine that did not return. The Lease is then not released but expires.
var ErrUnfinished = errors.New("work may be unfinished")

// Run competes for the Lease until it is won, calls lead when the fence in the API server admits this
// replica and no predecessor can write any more, and returns when lead has returned:
//
//   - ctx ends while standing by: Run returns nil.
//   - ctx ends while leading, or lead returns by itself: the context of lead is cancelled. The Lease is
//     renewed while lead drains, and released when lead has returned, its last writes have finished and
//     no unanswered write can be executed any more. Run returns the error of lead. If the drain takes
//     longer than the DrainTimeout or lead returns ErrUnfinished, the Lease is not released and Run
//     returns a *LostError.
//   - the term is lost: the fence closes, then the context of lead is cancelled with a *LostError
//     as its cause. Run waits for lead for as long as the Lease would still have covered it, and
//     returns the *LostError joined with the error of lead.
//   - the fence does not admit this replica for a lease duration: Run releases the Lease and returns a
//     *LostError.
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
	e := newElector(l)
	var stopRequests context.CancelFunc
	e.ctx, stopRequests = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		l.fence.Close()
		stopRequests()
		e.wg.Wait()
		e.timer.Stop()
	}()
	if l.apiFence != nil {
		askCtx, stop := context.WithCancel(e.ctx)
		e.stopAsking = stop
		e.wg.Go(func() { l.apiFence.Run(askCtx) })
	}
	klog.FromContext(ctx).Info("Competing for the Lease", "lease", l.lease, "identity", l.candidate.Identity)
	return e.run(ctx, lead)
}

// runUnelected calls lead without an election.
func (l *Lock) runUnelected(ctx context.Context, lead func(context.Context) error) error {
	l.fence.TurnOff()
	l.display.SetUnelected()
	done := make(chan error, 1)
	go func() { done <- lead(ctx) }()
	late := make(chan struct{})
	defer context.AfterFunc(ctx, func() { time.AfterFunc(l.cfg.DrainTimeout, func() { close(late) }) })()
	select {
	case err := <-done:
		return err
	case <-late:
		l.fence.Close()
		return fmt.Errorf("%w: the controllers did not drain within %s", ErrUnfinished, l.cfg.DrainTimeout)
	}
}

// elector runs one lock. Only the goroutine of Run uses it: it asks the protocol what to do, starts
// the requests, and tells the protocol what has happened.
type elector struct {
	lock     *Lock
	state    *protocol.State
	timer    *time.Timer
	requests // see requests.go

	stopAsking   context.CancelFunc      // stops a standby's checks of the API server's fence
	stopStarting context.CancelFunc      // stops naming this replica, and the proof
	cancelLead   context.CancelCauseFunc // nil before lead has started
	leadDone     chan error              // receives once, when lead has returned
	leadErr      error                   // the error of lead
	idle         <-chan struct{}         // closed when lead has returned and no write is in flight
}

func newElector(l *Lock) *elector {
	t := l.cfg.timing()
	return &elector{
		lock:  l,
		state: protocol.New(l.candidate.Identity, t, l.candidate.Address, l.candidate.Witness != nil),
		timer: time.NewTimer(0),
		requests: requests{answers: make(chan func()), timeout: t.RequestTimeout(),
			jitter: protocol.NewJitter(l.candidate.Identity + "/watch"), stopWatch: func() {}, stopLook: func() {}},

		stopAsking: func() {}, stopStarting: func() {},
	}
}

func (e *elector) run(ctx context.Context, lead func(context.Context) error) error {
	stop := ctx.Done()
	for {
		now := e.now()
		act := e.state.Decide(now)
		e.lock.display.Update(e.state.View(), act.Kind == protocol.ActEnd)
		switch act.Kind {
		case protocol.ActEnd:
			return e.endRun(ctx, act.Reason)
		case protocol.ActLead:
			e.startLead(ctx, lead)
			continue
		case protocol.ActGiveUp:
			klog.FromContext(ctx).Error(e.lock.display.Problem(), "This replica cannot lead; releasing the Lease", "lease", e.lock.lease)
			e.stopStarting()
			e.state.OnGiveUp(now)
			continue
		case protocol.ActWait:
		default:
			e.startRequest(act, now)
			continue
		}
		// The timer stops while the machine is suspended, the clock does not. Check it soon after
		// the machine resumes.
		e.timer.Reset(min(act.Until-now, e.lock.cfg.RetryPeriod.Duration))
		select {
		case <-stop:
			stop = nil
			e.beginStop(ctx)
		case handle := <-e.answers:
			handle()
		case e.leadErr = <-e.leadDone:
			e.leadReturned()
		case <-e.idle:
			e.idle = nil
			e.reportQuiet()
		case <-e.timer.C:
		}
	}
}

func (e *elector) now() time.Duration { return e.lock.candidate.Clock.Now() }

func (e *elector) logger() klog.Logger { return klog.FromContext(e.ctx) }

// beginTerm names this replica, which has won the Lease, for the fence in the API server. If the term must
// be proved, it also proves that no predecessor can write.
func (e *elector) beginTerm() {
	e.stopAsking() // NameLeader and KeepNamed ask
	e.lookAt(protocol.LeaderProcess{})
	if e.lock.apiFence == nil {
		e.state.OnAdmitted()
		return
	}
	startCtx, stop := context.WithCancel(e.ctx)
	e.stopStarting = stop
	mustProve := e.state.MustProve(e.now())
	e.wg.Go(func() {
		err := e.lock.apiFence.NameLeader(startCtx)
		if startCtx.Err() != nil {
			return
		}
		e.sendAnswer(startCtx, func() { e.onAdmitted(err) })
		if err == nil && mustProve && e.lock.apiFence.Prove(startCtx, e.lock.display.SetUnproved) == nil {
			e.sendAnswer(startCtx, e.state.OnProved)
		}
	})
}

// onAdmitted processes that the fence in the API server admits this replica, or why it never will.
func (e *elector) onAdmitted(err error) {
	switch {
	case err == nil:
		e.state.OnAdmitted()
	case errors.Is(err, apifence.ErrSuperseded):
		e.logger().Error(err, "Another replica holds the Lease", "lease", e.lock.lease)
		e.state.OnEvicted(protocol.ReasonHolderChanged)
	default:
		e.logger().Error(err, "This replica cannot lead any more", "lease", e.lock.lease)
		e.state.OnEvicted(protocol.ReasonCannotLead)
	}
}

// startLead opens the fence for the term and starts lead.
func (e *elector) startLead(ctx context.Context, lead func(context.Context) error) {
	state := e.state
	e.stopStarting()
	e.lock.display.Started(e.logger(), state.View())
	state.OnLeadStarted()
	e.lock.fence.OpenUntil(state.Deadline())
	e.lock.display.Update(state.View(), false)
	// lead drains after ctx has ended, so the end of ctx does not end the term.
	leadCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	e.cancelLead, e.leadDone = cancel, make(chan error, 1)
	done := e.leadDone
	go func() { done <- lead(leadCtx) }()
	if e.lock.apiFence != nil {
		e.wg.Go(func() {
			if err := e.lock.apiFence.KeepNamed(e.ctx); err != nil {
				e.sendAnswer(e.ctx, func() { e.onAdmitted(err) })
			}
		})
	}
	e.lock.display.Record(state.View().Lease, "became leader")
}

// beginStop begins to stop: a standby returns, a leader drains.
func (e *elector) beginStop(ctx context.Context) {
	now := e.now()
	e.state.OnStop(now+e.lock.cfg.DrainTimeout, now)
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
	e.state.OnLeadReturned(now+e.lock.cfg.DrainTimeout, now, unfinished)
	if !unfinished {
		e.idle = e.lock.fence.Drain() // rule 8: they end before the Lease is released
	}
}

// reportQuiet tells the protocol, once no write of lead is in flight, when none of them can be executed any
// more: from then on the Lease may be released (rule 8).
func (e *elector) reportQuiet() { e.state.OnQuiet(e.lock.fence.QuietAt(), e.now()) }

// endRun returns from Run.
func (e *elector) endRun(ctx context.Context, reason protocol.Reason) error {
	logger, state := klog.FromContext(ctx), e.state
	term, held := state.Term()
	defer func() { e.lock.display.Ended(reason, held) }()
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
			e.lock.display.Record(state.View().Lease, "stopped leading")
		}()
	}
	switch {
	case state.IsReleasable(e.now()) && reason != protocol.ReasonReleaseFailed && reason != protocol.ReasonCannotLead:
		return e.leadErr // lead had finished, so nothing is lost with the Lease
	case e.leadDone != nil && reason != protocol.ReasonDrainTimeout:
		e.awaitLead()
	}
	return errors.Join(lost, e.leadErr)
}

// awaitLead waits for lead for as long as the Lease still covers it.
func (e *elector) awaitLead() {
	left := e.state.CoveredUntil() - e.now()
	e.timer.Reset(max(left, 0))
	select {
	case e.leadErr = <-e.leadDone:
	case <-e.timer.C:
	}
}
