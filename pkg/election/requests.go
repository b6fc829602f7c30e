// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// requester makes the requests of one elector. Each request runs in its own goroutine and reports
// to inbox, so that a hanging request does not block the elector. The methods are called only by
// the goroutine of Run.
type requester struct {
	client  LeaseClient
	clock   Clock
	name    types.NamespacedName
	timeout time.Duration // of one request, except for watches

	inbox chan message
	wg    sync.WaitGroup

	readID    int // of the current read; responses to others are stale
	watchID   int // of the current watch, likewise
	watchFrom string
	stopWatch context.CancelFunc
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
		kind  actionKind
		base  *coordinationv1.Lease // the version that it required, nil for actCreate
		wrote *coordinationv1.Lease
		lease *coordinationv1.Lease // the response
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
)

func newRequester(client LeaseClient, clock Clock, name types.NamespacedName, timeout time.Duration) requester {
	return requester{client: client, clock: clock, name: name, timeout: timeout, inbox: make(chan message)}
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
		lease, err := r.client.Get(request, r.name.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease, err = nil, nil
		}
		r.report(ctx, readDone{id: id, lease: lease, err: err})
	})
}

// write creates the Lease or updates it from the version base. The term that it begins or extends
// counts from before the request. The API server cannot have executed the write earlier, so no
// standby can have seen it earlier.
func (r *requester) write(ctx context.Context, kind actionKind, base, lease *coordinationv1.Lease, timeout time.Duration) {
	sent := r.clock.Now()
	r.wg.Go(func() {
		request, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		done := writeDone{kind: kind, base: base, wrote: lease, sent: sent}
		if base == nil {
			done.lease, done.err = r.client.Create(request, lease, metav1.CreateOptions{})
		} else {
			done.lease, done.err = r.client.Update(request, lease, metav1.UpdateOptions{})
		}
		done.took = r.clock.Now() - sent
		r.report(ctx, done)
	})
}

// watch follows the Lease from the version last seen, or from the present if that is not known. The
// API server ends the watch after about lifetime.
func (r *requester) watch(ctx context.Context, lifetime time.Duration) {
	r.watchID++
	id := r.watchID
	opts := metav1.ListOptions{
		FieldSelector:       fields.OneTermEqualSelector(metav1.ObjectNameField, r.name.Name).String(),
		ResourceVersion:     r.watchFrom,
		AllowWatchBookmarks: true,
		TimeoutSeconds:      ptr.To(int64(lifetime / time.Second)),
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
