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

// A watch is restarted after a random time from this to twice this, so that a dead connection is not
// taken for a quiet one for ever.
const watchLifetime = 5 * time.Minute

// requester makes the requests of one elector. Each request runs in its own goroutine and reports
// to inbox, so that a hanging request does not block the elector. The methods are called only by
// the goroutine of Run.
type requester struct {
	client  LeaseClient
	clock   Clock
	name    string
	timeout time.Duration // of one request, except for watches
	jitter  *rand.Rand

	inbox chan message
	wg    sync.WaitGroup

	readID    int // of the current read; answers to others are stale
	watchID   int // of the current watch, likewise
	stopWatch context.CancelFunc

	witness  Witness
	lookID   int // of the process that the witness looks at, likewise
	stopLook context.CancelFunc
}

// message is the outcome of a request.
type message any

type (
	readDone struct {
		id    int
		lease *coordinationv1.Lease
		err   error
	}
	writeDone struct {
		kind  protocol.ActionKind
		base  *coordinationv1.Lease // the version that it required, nil for protocol.ActCreate
		lease *coordinationv1.Lease // the answer
		err   error
		sent  time.Duration // on the clock, before it was sent
		took  time.Duration
	}
	watchStarted struct{ id int }
	watchEvent   struct {
		id    int
		event watch.Event
	}
	watchEnded struct {
		id  int
		err error // nil if it ended normally
	}
	raised     struct{ err error }     // by the fence in the API server
	proved     struct{}                // every API server refuses the predecessors
	kept       struct{ err error }     // the fence in the API server cannot name this replica any more
	quiet      struct{ enforced bool } // the fence in the API server is in force
	leaderSeen struct {
		id    int
		state protocol.LeaderState
	}
)

func newRequester(who Candidate, name string, timeout time.Duration) *requester {
	return &requester{client: who.Client, clock: who.Clock, name: name, timeout: timeout,
		jitter: protocol.NewJitter(who.Identity + "/watch"), inbox: make(chan message), stopWatch: func() {},
		witness: who.Witness, stopLook: func() {}}
}

// report sends a message to the elector, or drops it if the elector has returned.
func (r *requester) report(ctx context.Context, msg message) {
	select {
	case r.inbox <- msg:
	case <-ctx.Done():
	}
}

func (r *requester) read(ctx context.Context) {
	r.readID++
	id := r.readID
	r.wg.Go(func() {
		request, cancel := context.WithTimeout(ctx, r.timeout)
		defer cancel()
		// Without a resourceVersion the read is consistent: the API server asks the store.
		lease, err := r.client.Get(request, r.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease, err = nil, nil
		}
		r.report(ctx, readDone{id: id, lease: lease, err: err})
	})
}

// write creates the Lease, or updates it from the version base (rule 1). The
// term that it begins or extends counts from before the request (rule 2). The API server cannot
// have executed the write earlier, so no standby can have seen it earlier.
func (r *requester) write(
	ctx context.Context, kind protocol.ActionKind, base, lease *coordinationv1.Lease, timeout time.Duration,
) {
	r.wg.Go(func() {
		sent := r.clock.Now()
		request, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		done := writeDone{kind: kind, base: base, sent: sent}
		if kind == protocol.ActCreate {
			done.lease, done.err = r.client.Create(request, lease, metav1.CreateOptions{})
		} else {
			done.lease, done.err = r.client.Update(request, lease, metav1.UpdateOptions{})
		}
		done.took = r.clock.Now() - sent
		r.report(ctx, done)
	})
}

// watch follows the Lease from the present on, in place of the last watch. A watch from a known
// version would be silent if the store was restored to an earlier one.
func (r *requester) watch(ctx context.Context) {
	r.stopWatch()
	r.watchID++
	id := r.watchID
	lifetime := watchLifetime + time.Duration(r.jitter.Int64N(int64(watchLifetime)))
	opts := metav1.ListOptions{
		FieldSelector:  fields.OneTermEqualSelector(metav1.ObjectNameField, r.name).String(),
		TimeoutSeconds: ptr.To(int64(lifetime / time.Second)),
	}
	own, stop := context.WithCancel(ctx)
	r.stopWatch = stop
	r.wg.Go(func() {
		defer stop()
		// The context must outlive the call, so a timer limits the call.
		hung := time.AfterFunc(r.timeout, stop)
		w, err := r.client.Watch(own, opts)
		if inTime := hung.Stop(); err == nil && !inTime {
			w.Stop()
			err = context.DeadlineExceeded
		}
		if err != nil {
			r.report(ctx, watchEnded{id: id, err: err})
			return
		}
		defer w.Stop()
		r.report(own, watchStarted{id: id})
		r.follow(own, id, w.ResultChan())
	})
}

func (r *requester) follow(ctx context.Context, id int, events <-chan watch.Event) {
	for {
		select {
		case <-ctx.Done():
			return
		case event, open := <-events:
			switch {
			case !open:
				r.report(ctx, watchEnded{id: id, err: nil})
				return
			case event.Type == watch.Error:
				r.report(ctx, watchEnded{id: id, err: apierrors.FromObject(event.Object)})
				return
			}
			r.report(ctx, watchEvent{id: id, event: event})
		}
	}
}

// look lets the witness look at a process, in place of the last one. The zero Process is none.
func (r *requester) look(ctx context.Context, process protocol.Process) {
	r.stopLook()
	r.lookID++
	if process == (protocol.Process{}) {
		return
	}
	id := r.lookID
	own, stop := context.WithCancel(ctx)
	r.stopLook = stop
	r.wg.Go(func() {
		defer stop()
		r.witness.Watch(own, process, func(state protocol.LeaderState) { r.report(own, leaderSeen{id: id, state: state}) })
	})
}
