// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"
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
// instance a write whose outcome is unknown. The Lease is then not released but expires.
var ErrUnfinished = errors.New("work may be unfinished")

// Run competes for the Lease until it is won, then calls lead and returns when lead has returned,
// or when Run gives it up:
//
//   - ctx ends while standing by: Run returns nil.
//   - ctx ends while leading: the context of lead is cancelled. The Lease is renewed while lead
//     drains, and released after lead has returned and its last writes have finished. Run returns
//     the error of lead. If lead takes longer than cfg.DrainTimeout or returns ErrUnfinished, the
//     Lease is not released and Run returns a *LostError.
//   - lead returns by itself: the same, without the drain.
//   - the term is lost: the fence closes, then the context of lead is cancelled with a *LostError
//     as its cause. Run waits for lead for as long as the Lease would still have covered it, and
//     returns the *LostError joined with the error of lead.
//
// So Run may return while a lead that ignores its context still runs. That lead cannot write any
// more, and the process should exit. A lock serves one Run. With cfg.LeaderElect off, the fence is
// open until lead has returned, or has not returned within cfg.DrainTimeout.
func Run(ctx context.Context, cfg Config, lock *Lock, lead func(ctx context.Context) error) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	if !lock.used.CompareAndSwap(false, true) {
		return errors.New("a lock can be run only once: its terms must not be confused")
	}
	if !cfg.LeaderElect {
		return runUnelected(ctx, cfg, lock, lead)
	}
	requests, stopRequests := context.WithCancel(context.WithoutCancel(ctx))
	e := newElector(cfg, lock)
	defer func() {
		lock.fence.close()
		stopRequests()
		e.wg.Wait()
		e.timer.Stop()
	}()
	klog.FromContext(ctx).Info("Competing for the lease", "lease", lock.name, "identity", lock.identity)
	return e.run(ctx, requests, lead)
}

// runUnelected calls lead without an election.
func runUnelected(ctx context.Context, cfg Config, lock *Lock, lead func(context.Context) error) error {
	lock.leadUnelected()
	done := make(chan error, 1)
	go func() { done <- lead(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		lock.fence.close()
		return fmt.Errorf("%w: the controllers did not drain within %s", ErrUnfinished, cfg.DrainTimeout)
	}
}

// elector runs one lock. Only the goroutine of Run uses it; the goroutines that it starts send to
// inbox.
type elector struct {
	*state
	requester

	lock         *Lock
	drainTimeout time.Duration
	jitter       *rand.Rand
	timer        *time.Timer

	watchUp       bool          // the watch is established, not only requested
	watchUpAt     time.Duration // when it was established
	watchFailures int           // in a row
	watchesAnew   bool          // the watch begins with the present, not where the last one ended

	cancelLead context.CancelCauseFunc
	leadDone   chan error      // receives once, when lead has returned
	leadErr    error           // the error of lead
	idle       <-chan struct{} // closed when lead has returned and no write is in flight
}

func newElector(cfg Config, lock *Lock) *elector {
	t := cfg.timing()
	return &elector{
		state:        newState(lock.identity, t),
		requester:    newRequester(lock.client, lock.clock, lock.name, t.requestTimeout()),
		lock:         lock,
		drainTimeout: cfg.DrainTimeout,
		jitter:       newJitter(lock.identity),
		timer:        time.NewTimer(0),
	}
}

func (e *elector) run(ctx, requests context.Context, lead func(context.Context) error) error {
	stop := ctx.Done()
	for {
		now := e.clock.Now()
		act := e.decide(now)
		e.lock.publish(e)
		if act.kind == actEnd {
			return e.end(ctx, act.reason)
		}
		if act.kind != actWait {
			e.start(requests, act.kind)
			continue
		}
		// The timer stops while the machine is suspended, the clock does not. Check it soon after
		// the machine resumes.
		e.timer.Reset(min(act.until-now, e.retry))
		select {
		case <-stop:
			stop = nil
			e.drain(ctx)
		case msg := <-e.inbox:
			if e.handle(klog.FromContext(ctx), msg) {
				e.begin(ctx, lead)
			}
		case e.leadErr = <-e.leadDone:
			e.leadReturned()
		case <-e.idle:
			e.idle = nil
			e.phase = releasing
			e.writeAt = 0
		case <-e.timer.C:
		}
	}
}

// begin opens the fence for the term just won, then starts lead.
func (e *elector) begin(ctx context.Context, lead func(context.Context) error) {
	e.lock.fence.openUntil(e.tenure.sent + e.deadline)
	e.lock.publish(e)
	// lead drains after ctx has ended, so the end of ctx does not end the term.
	leadCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	e.cancelLead, e.leadDone = cancel, make(chan error, 1)
	done := e.leadDone
	go func() { done <- lead(leadCtx) }()
	klog.FromContext(ctx).Info("Started leading", "lease", e.lock.name, "term", e.tenure.term)
	e.lock.record(e.tenure.lease, "became leader")
}

// drain begins to stop: a standby returns, a leader drains.
func (e *elector) drain(ctx context.Context) {
	e.stopping = true
	if e.phase != leading {
		return
	}
	e.drainUntil = min(e.drainUntil, e.clock.Now()+e.drainTimeout)
	e.cancelLead(context.Cause(ctx))
}

// leadReturned lets the last writes of lead finish before the Lease is released; there are some if
// lead has left goroutines behind. After ErrUnfinished the Lease is not released.
func (e *elector) leadReturned() {
	e.leadDone = nil
	if errors.Is(e.leadErr, ErrUnfinished) {
		e.drainUntil = e.clock.Now()
		return
	}
	e.drainUntil = min(e.drainUntil, e.clock.Now()+e.drainTimeout)
	e.idle = e.lock.fence.shut()
}

// end returns from Run.
func (e *elector) end(ctx context.Context, reason Reason) error {
	logger := klog.FromContext(ctx)
	defer e.lock.ended(reason)
	if e.tenure == nil {
		return nil
	}
	e.lock.fence.close()
	if e.cancelLead != nil { // it has led, and did not only get the Lease while it was stopping
		defer func() {
			logger.Info("Stopped leading", "lease", e.lock.name, "term", e.tenure.term, "reason", reason)
			e.lock.record(e.tenure.lease, "stopped leading")
		}()
	}
	lost := &LostError{Reason: reason, Term: e.tenure.term}
	if e.phase == releasing {
		if reason == ReasonReleaseFailed {
			return errors.Join(lost, e.leadErr)
		}
		return e.leadErr // lead had finished; whoever holds the Lease now may have it
	}
	if e.cancelLead != nil {
		e.cancelLead(lost)
	}
	if e.leadDone != nil && reason != ReasonDrainTimeout {
		e.awaitLead()
	}
	return errors.Join(lost, e.leadErr)
}

// awaitLead waits for lead for as long as the Lease still covers it.
func (e *elector) awaitLead() {
	left := e.tenure.sent + e.covered() - e.clock.Now()
	e.timer.Reset(max(left, 0))
	select {
	case e.leadErr = <-e.leadDone:
	case <-e.timer.C:
	}
}
