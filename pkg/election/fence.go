// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// ErrNotLeading is what a write gets that the fence refused, and a write that
// was in flight when the term ended: the first has not been sent, the outcome of
// the second is unknown. Test for it with errors.Is.
var ErrNotLeading error = notLeading{}

// notLeading lets the queue loop recognise the refusal without importing this package.
type notLeading struct{}

func (notLeading) Error() string    { return "not leading" }
func (notLeading) NotLeading() bool { return true }

// fenceState is what the fence does with a write.
type fenceState int

const (
	fenceClosed fenceState = iota // refuse it, and cancel those in flight
	fenceOpen                     // admit it while the term is valid
	fenceShut                     // refuse it, and let those in flight finish
	fenceOff                      // admit it: leader election is off
)

// fence admits writes while a term is valid by its clock.
type fence struct {
	clock   Clock
	metrics *lockMetrics

	mu       sync.Mutex
	state    fenceState
	deadline time.Duration // of the term, on clock
	timer    *time.Timer   // at the deadline
	inFlight map[*admission]struct{}
	idle     chan struct{} // made by shut, closed when inFlight is empty
}

// admission is one write between the check and its response.
type admission struct {
	cancel context.CancelCauseFunc
	ended  bool // the term ended while it was in flight
}

func newFence(clock Clock, m *lockMetrics) *fence {
	return &fence{clock: clock, metrics: m, inFlight: map[*admission]struct{}{}}
}

// turnOff admits every write from now on.
func (f *fence) turnOff() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state = fenceOff
}

// openUntil begins a term that ends at deadline unless it is extended before,
// whether or not anybody calls close.
func (f *fence) openUntil(deadline time.Duration) {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state, f.deadline = fenceOpen, deadline
	f.timer = time.AfterFunc(deadline-now, f.expire)
}

// extend moves the deadline, and reports whether it has not passed before. A term
// that has ended stays so.
func (f *fence) extend(deadline time.Duration) bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.withinTerm(now) {
		return false
	}
	f.deadline = deadline
	return true
}

// expire cancels what is in flight at the deadline. The deadline may have moved,
// and the timer runs on the monotonic clock, which may be ahead of ours: the
// clock decides.
func (f *fence) expire() {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.withinTerm(now) {
		f.timer.Reset(f.deadline - now)
		return
	}
	f.closeLocked()
}

// close ends the term: it refuses every write from now on and cancels those in
// flight.
func (f *fence) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closeLocked()
}

func (f *fence) closeLocked() {
	f.state = fenceClosed
	if f.timer != nil {
		f.timer.Stop()
	}
	for a := range f.inFlight {
		a.ended = true
		a.cancel(ErrNotLeading)
	}
}

// shut refuses every write from now on but lets those in flight finish. The
// channel is closed when the last of them has.
func (f *fence) shut() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.idle = make(chan struct{})
	if len(f.inFlight) == 0 {
		close(f.idle)
	}
	f.state = fenceShut
	return f.idle
}

// admits reports whether a write would pass at this instant.
func (f *fence) admits() bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.admitsAt(now)
}

func (f *fence) admitsAt(now time.Duration) bool {
	return f.state == fenceOff || f.state == fenceOpen && f.withinTerm(now)
}

// withinTerm reports whether those in flight may go on.
func (f *fence) withinTerm(now time.Duration) bool {
	return (f.state == fenceOpen || f.state == fenceShut) && now < f.deadline
}

// admit returns nil if the write must not be sent.
func (f *fence) admit(cancel context.CancelCauseFunc) *admission {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.admitsAt(now) {
		return nil
	}
	a := &admission{cancel: cancel}
	f.inFlight[a] = struct{}{}
	return a
}

// sendable reports whether an admitted write may still be sent.
func (f *fence) sendable(a *admission) bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state != fenceOff && !f.withinTerm(now) {
		a.ended = true
	}
	return !a.ended
}

// done takes a write out of flight and reports whether its term ended meanwhile.
func (f *fence) done(a *admission) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.inFlight, a)
	if f.idle != nil && len(f.inFlight) == 0 {
		close(f.idle) // at most once: after shut, nothing is admitted
	}
	return a.ended
}

// fencedTransport is the RoundTripper in front of the transport of a client.
type fencedTransport struct {
	fence *fence
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper. Reads and watches pass. A write passes
// if the term is valid by the clock at this instant, not by a timer, which a
// paused process would run late; and it is cancelled when the term ends.
//
// A write that was handed to the transport may be executed by the API server
// after that all the same: it may lie in a socket, or in the queue of the API
// server. To refuse those is for the fence in the API server.
func (t *fencedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	switch req.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, "":
		return t.next.RoundTrip(req)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	a := t.fence.admit(cancel)
	if a == nil {
		cancel(nil)
		if req.Body != nil {
			_ = req.Body.Close() // a RoundTripper must; there is nothing to do about an error
		}
		t.fence.metrics.refused(req.Method)
		return nil, fmt.Errorf("%s %s was not sent: %w", req.Method, req.URL.Path, ErrNotLeading)
	}
	resp, err := t.next.RoundTrip(t.admitted(ctx, req, a))
	ended := t.fence.done(a)
	if err != nil {
		cancel(nil)
		if ended {
			return nil, fmt.Errorf("the term ended during %s %s, its outcome is unknown: %w: %w",
				req.Method, req.URL.Path, ErrNotLeading, err)
		}
		return nil, err
	}
	// The context must outlive the body, which the caller is yet to read.
	resp.Body = &cancelOnClose{ReadCloser: resp.Body, cancel: cancel}
	return resp, nil
}

// WrappedRoundTripper lets client-go find the transport underneath, to close its
// idle connections.
func (t *fencedTransport) WrappedRoundTripper() http.RoundTripper {
	return t.next
}

// admitted returns the request with the context of its admission and a body that
// asks the fence again whenever the transport reads from it. To dial and to shake
// hands may have taken long; the last read precedes the end of the request, and
// the API server executes no request that it has not got to the end.
func (t *fencedTransport) admitted(ctx context.Context, req *http.Request, a *admission) *http.Request {
	out := req.WithContext(ctx)
	if req.Body == nil || req.Body == http.NoBody {
		return out
	}
	out.Body = &fencedBody{ReadCloser: req.Body, fence: t.fence, admission: a}
	if req.GetBody != nil {
		out.GetBody = func() (io.ReadCloser, error) {
			body, err := req.GetBody()
			if err != nil {
				return nil, err
			}
			return &fencedBody{ReadCloser: body, fence: t.fence, admission: a}, nil
		}
	}
	return out
}

type fencedBody struct {
	io.ReadCloser
	fence     *fence
	admission *admission
}

func (b *fencedBody) Read(p []byte) (int, error) {
	if !b.fence.sendable(b.admission) {
		return 0, ErrNotLeading
	}
	return b.ReadCloser.Read(p)
}

type cancelOnClose struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (b *cancelOnClose) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}
