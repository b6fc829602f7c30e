// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// A watch is restarted after a random time between watchLifetime and twice watchLifetime, so that a dead
// connection does not pass for a quiet one for ever.
const watchLifetime = 5 * time.Minute

// requests are the requests of one elector. Each runs in a goroutine of its own, so that a request that
// hangs does not block the elector, and hands its answer to the goroutine of Run.
type requests struct {
	ctx     context.Context // of all requests
	wg      sync.WaitGroup
	answers chan func()
	timeout time.Duration // of one request, except for watches
	jitter  *rand.Rand

	// Answers to other requests than the present ones are stale.
	readID, watchID, lookID int
	stopWatch, stopLook     context.CancelFunc
}

// sendAnswer lets the goroutine of Run process an answer, unless ctx has ended.
func (r *requests) sendAnswer(ctx context.Context, handle func()) {
	select {
	case r.answers <- handle:
	case <-ctx.Done():
	}
}

// startRequest starts an action that is a request.
func (e *elector) startRequest(act protocol.Action, now time.Duration) {
	switch act.Kind {
	case protocol.ActRead:
		e.readLease()
	case protocol.ActWatch:
		e.watchLease()
	case protocol.ActLook:
		e.lookAt(e.state.OnLook())
	default:
		e.writeLease(act, now)
	}
}

func (e *elector) readLease() {
	e.state.OnReading()
	e.readID++
	id := e.readID
	e.wg.Go(func() {
		requestCtx, cancel := context.WithTimeout(e.ctx, e.timeout)
		defer cancel()
		// Without a resourceVersion the read is consistent: the API server asks the store.
		lease, err := e.lock.candidate.Client.Get(requestCtx, e.lock.lease.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease, err = nil, nil
		}
		e.sendAnswer(e.ctx, func() {
			if id != e.readID || !e.state.IsReading() {
				return
			}
			f := failureOf(err)
			e.lock.display.Finished(e.logger(), "get", err, f)
			if f.Kind != protocol.FailNone {
				e.state.OnReadFailed(f, e.now())
				return
			}
			e.state.OnRead(lease, e.now())
		})
	})
}

// writeLease creates the Lease, or updates it from the known version (rule 1). The term that the write begins
// or extends counts from before the request (rule 2). The API server cannot have executed the write
// earlier, so no standby can have seen it earlier.
func (e *elector) writeLease(act protocol.Action, now time.Duration) {
	state, timeout := e.state, e.timeout
	if _, holding := state.Term(); holding { // an answer after the deadline is useless
		timeout = min(timeout, state.Deadline()-now)
	}
	wallTime := time.Now().Truncate(time.Microsecond) // the precision of the Lease
	base, lease := state.View().Lease, state.Proposal(act, now, wallTime)
	send := func(ctx context.Context) (*coordinationv1.Lease, error) {
		return e.lock.candidate.Client.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if act.Kind == protocol.ActCreate {
		lease = protocol.NewLease(e.lock.lease, e.lock.candidate.Identity, e.lock.cfg.LeaseDuration.Duration, wallTime)
		send = func(ctx context.Context) (*coordinationv1.Lease, error) {
			return e.lock.candidate.Client.Create(ctx, lease, metav1.CreateOptions{})
		}
	}
	state.OnSent(act)
	e.wg.Go(func() {
		sent := e.now()
		requestCtx, cancel := context.WithTimeout(e.ctx, timeout)
		defer cancel()
		stored, err := send(requestCtx)
		took := e.now() - sent
		e.sendAnswer(e.ctx, func() {
			f := failureOf(err)
			e.lock.display.Wrote(e.logger(), act.Kind, err, f, took)
			if f.Kind != protocol.FailNone {
				state.OnWriteFailed(base, f, e.now())
				return
			}
			e.onWritten(act.Kind, stored, sent)
		})
	})
}

// onWritten processes the answer to a write that was about to be sent at sent.
func (e *elector) onWritten(kind protocol.ActionKind, lease *coordinationv1.Lease, sent time.Duration) {
	state, now := e.state, e.now()
	switch kind {
	case protocol.ActCreate:
		e.logger().Info("Created the Lease; waiting one lease duration, since the leader of a deleted Lease may still write",
			"lease", e.lock.lease, "duration", e.lock.cfg.LeaseDuration.Duration)
		state.OnCreated(lease, now)
	case protocol.ActAcquire:
		if state.OnAcquired(lease, sent, now) {
			e.beginTerm()
		}
	case protocol.ActRenew:
		state.OnRenewed(lease, sent, now)
		if e.cancelLead != nil && !e.lock.fence.Extend(sent+e.lock.cfg.RenewDeadline.Duration) {
			state.OnExpired() // the deadline has passed since now was read
		}
	case protocol.ActRelease:
		state.OnReleased()
	}
}

// watchLease follows the Lease from the present on, in place of the last watch. A watch from a known version
// would be silent if the store was restored to an earlier state.
func (e *elector) watchLease() {
	e.state.OnWatching()
	e.stopWatch()
	e.watchID++
	id := e.watchID
	lifetime := watchLifetime + time.Duration(e.jitter.Int64N(int64(watchLifetime)))
	opts := metav1.ListOptions{
		FieldSelector:  fields.OneTermEqualSelector(metav1.ObjectNameField, e.lock.lease.Name).String(),
		TimeoutSeconds: ptr.To(int64(lifetime / time.Second)),
	}
	watchCtx, stop := context.WithCancel(e.ctx)
	e.stopWatch = stop
	answer := func(handle func()) {
		e.sendAnswer(e.ctx, func() {
			if id == e.watchID && e.state.IsWatching() {
				handle()
			}
		})
	}
	ended := func(err error) {
		answer(func() {
			f := failureOf(err)
			e.lock.display.Finished(e.logger(), "watch", err, f)
			e.state.OnWatchEnd(f, e.now())
		})
	}
	e.wg.Go(func() {
		defer stop()
		// The context must outlive the call, so a timer limits the call.
		hung := time.AfterFunc(e.timeout, stop)
		w, err := e.lock.candidate.Client.Watch(watchCtx, opts)
		if inTime := hung.Stop(); err == nil && !inTime {
			w.Stop()
			err = context.DeadlineExceeded
		}
		if err != nil {
			ended(err)
			return
		}
		defer w.Stop()
		answer(func() {
			e.state.OnWatchUp(e.now())
			e.lock.display.Finished(e.logger(), "watch", nil, protocol.Failure{})
		})
		for {
			select {
			case <-watchCtx.Done():
				return
			case event, open := <-w.ResultChan():
				switch {
				case !open:
					ended(nil)
					return
				case event.Type == watch.Error:
					ended(apierrors.FromObject(event.Object))
					return
				}
				if lease, ok := event.Object.(*coordinationv1.Lease); ok {
					answer(func() { e.state.OnEvent(lease, event.Type == watch.Deleted, e.now()) })
				}
			}
		}
	})
}

// lookAt lets the witness look at a process, in place of the process before.
func (e *elector) lookAt(process protocol.LeaderProcess) {
	e.stopLook()
	e.lookID++
	if process == (protocol.LeaderProcess{}) {
		return
	}
	id := e.lookID
	lookCtx, stop := context.WithCancel(e.ctx)
	e.stopLook = stop
	e.wg.Go(func() {
		defer stop()
		e.lock.candidate.Witness.Watch(lookCtx, process, func(leader protocol.LeaderState) {
			e.sendAnswer(lookCtx, func() {
				if id == e.lookID {
					e.state.OnLeaderState(leader, e.now())
					e.lock.display.SawLeader(e.logger(), process, leader)
				}
			})
		})
	})
}
