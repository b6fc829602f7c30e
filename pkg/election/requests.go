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

// answer lets the goroutine of Run process an answer, unless ctx has ended.
func (r *requests) answer(ctx context.Context, process func()) {
	select {
	case r.answers <- process:
	case <-ctx.Done():
	}
}

// start starts an action that is a request.
func (e *elector) start(act protocol.Action, now time.Duration) {
	switch act.Kind {
	case protocol.ActRead:
		e.read()
	case protocol.ActWatch:
		e.watch()
	case protocol.ActLook:
		e.look(e.protocol.OnLook())
	default:
		e.write(act, now)
	}
}

func (e *elector) read() {
	e.protocol.OnReading()
	e.readID++
	id := e.readID
	e.wg.Go(func() {
		request, cancel := context.WithTimeout(e.ctx, e.timeout)
		defer cancel()
		// Without a resourceVersion the read is consistent: the API server asks the store.
		lease, err := e.lock.who.Client.Get(request, e.lock.lease.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease, err = nil, nil
		}
		e.answer(e.ctx, func() {
			if id != e.readID || !e.protocol.IsReading() {
				return
			}
			f := failureOf(err)
			e.lock.display.Finished(e.logger(), "get", err, f)
			if f.Kind != protocol.FailNone {
				e.protocol.OnReadFailed(f, e.now())
				return
			}
			e.protocol.OnRead(lease, e.now())
		})
	})
}

// write creates the Lease, or updates it from the known version (rule 1). The term that the write begins
// or extends counts from before the request (rule 2). The API server cannot have executed the write
// earlier, so no standby can have seen it earlier.
func (e *elector) write(act protocol.Action, now time.Duration) {
	p, timeout := e.protocol, e.timeout
	if _, holding := p.Term(); holding { // an answer after the deadline is useless
		timeout = min(timeout, p.Deadline()-now)
	}
	day := time.Now().Truncate(time.Microsecond) // the precision of the Lease
	base, lease := p.View().Lease, p.Proposal(act, now, day)
	send := func(ctx context.Context) (*coordinationv1.Lease, error) {
		return e.lock.who.Client.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if act.Kind == protocol.ActCreate {
		lease = protocol.NewLease(e.lock.lease, e.lock.who.Identity, e.lock.cfg.LeaseDuration.Duration, day)
		send = func(ctx context.Context) (*coordinationv1.Lease, error) {
			return e.lock.who.Client.Create(ctx, lease, metav1.CreateOptions{})
		}
	}
	p.OnSent(act)
	e.wg.Go(func() {
		sent := e.now()
		request, cancel := context.WithTimeout(e.ctx, timeout)
		defer cancel()
		stored, err := send(request)
		took := e.now() - sent
		e.answer(e.ctx, func() {
			f := failureOf(err)
			e.lock.display.Wrote(e.logger(), act.Kind, err, f, took)
			if f.Kind != protocol.FailNone {
				p.OnWriteFailed(base, f, e.now())
				return
			}
			e.onWritten(act.Kind, stored, sent)
		})
	})
}

// onWritten processes the answer to a write that was about to be sent at sent.
func (e *elector) onWritten(kind protocol.ActionKind, lease *coordinationv1.Lease, sent time.Duration) {
	p, now := e.protocol, e.now()
	switch kind {
	case protocol.ActCreate:
		e.logger().Info("Created the Lease; waiting one lease duration, since the leader of a deleted Lease may still write",
			"lease", e.lock.lease, "duration", e.lock.cfg.LeaseDuration.Duration)
		p.OnCreated(lease, now)
	case protocol.ActAcquire:
		if p.OnAcquired(lease, sent, now) {
			e.begin()
		}
	case protocol.ActRenew:
		p.OnRenewed(lease, sent, now)
		if e.cancelLead != nil && !e.lock.fence.Extend(sent+e.lock.cfg.RenewDeadline.Duration) {
			p.OnExpired() // the deadline has passed since now was read
		}
	case protocol.ActRelease:
		p.OnReleased()
	}
}

// watch follows the Lease from the present on, in place of the last watch. A watch from a known version
// would be silent if the store was restored to an earlier state.
func (e *elector) watch() {
	e.protocol.OnWatching()
	e.stopWatch()
	e.watchID++
	id := e.watchID
	lifetime := watchLifetime + time.Duration(e.jitter.Int64N(int64(watchLifetime)))
	opts := metav1.ListOptions{
		FieldSelector:  fields.OneTermEqualSelector(metav1.ObjectNameField, e.lock.lease.Name).String(),
		TimeoutSeconds: ptr.To(int64(lifetime / time.Second)),
	}
	own, stop := context.WithCancel(e.ctx)
	e.stopWatch = stop
	answer := func(process func()) {
		e.answer(e.ctx, func() {
			if id == e.watchID && e.protocol.IsWatching() {
				process()
			}
		})
	}
	ended := func(err error) {
		answer(func() {
			f := failureOf(err)
			e.lock.display.Finished(e.logger(), "watch", err, f)
			e.protocol.OnWatchEnd(f, e.now())
		})
	}
	e.wg.Go(func() {
		defer stop()
		// The context must outlive the call, so a timer limits the call.
		hung := time.AfterFunc(e.timeout, stop)
		w, err := e.lock.who.Client.Watch(own, opts)
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
			e.protocol.OnWatchUp(e.now())
			e.lock.display.Finished(e.logger(), "watch", nil, protocol.Failure{})
		})
		for {
			select {
			case <-own.Done():
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
					answer(func() { e.protocol.OnEvent(lease, event.Type == watch.Deleted, e.now()) })
				}
			}
		}
	})
}

// look lets the witness look at a process, in place of the process before.
func (e *elector) look(process protocol.Watched) {
	e.stopLook()
	e.lookID++
	if process == (protocol.Watched{}) {
		return
	}
	id := e.lookID
	own, stop := context.WithCancel(e.ctx)
	e.stopLook = stop
	e.wg.Go(func() {
		defer stop()
		e.lock.who.Witness.Watch(own, process, func(state protocol.LeaderState) {
			e.answer(own, func() {
				if id == e.lookID {
					e.protocol.OnLeaderState(state, e.now())
					e.lock.display.SawLeader(e.logger(), process, state)
				}
			})
		})
	})
}
