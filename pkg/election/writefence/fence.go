// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package writefence refuses the writes of a replica that does not lead, in its clients. Comments
// cite the rules of docs/adr/0003-leader-election.md by their numbers.
package writefence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
)

// ErrNotLeading is the error of a write that was not executed, since this replica does not lead: the
// fence did not send it, or the API server's fence refused it. Test for it with errors.Is.
var ErrNotLeading error = notLeading{}

// ErrTermEnded is the error of a write that was in flight when the term ended, whose outcome is unknown.
// It is an ErrNotLeading too.
var ErrTermEnded error = notLeading{inFlight: true}

// notLeading lets controllers recognise the refusal without importing this package.
type notLeading struct{ inFlight bool }

func (e notLeading) Error() string {
	if e.inFlight {
		return "the term ended, not leading any more"
	}
	return "not leading"
}
func (notLeading) NotLeading() bool       { return true }
func (e notLeading) OutcomeUnknown() bool { return e.inFlight }
func (e notLeading) Is(target error) bool { return target == ErrNotLeading || target == error(e) }

// endedError is ErrTermEnded of one write, with the error of its connection. The two errors have one cause,
// so they are not joined.
type endedError struct {
	notLeading
	method, path string
	err          error
}

func (e endedError) Error() string {
	return fmt.Sprintf("the outcome of %s %s is unknown: %s: %v", e.method, e.path, e.notLeading.Error(), e.err)
}
func (e endedError) Unwrap() error { return e.err }

// Clock returns the time since some fixed moment. It must neither stop nor go back.
type Clock interface {
	Now() time.Duration
}

// serverTimeout is how long the API server may still execute a write after the client has stopped waiting for
// it. It is the default of kube-apiserver's --request-timeout, which bounds requests that it has begun to
// read, but not exec, attach, portforward and proxy; the client has closed the stream or connection before.
// A write that waits in a proxy has no bound.
const serverTimeout = time.Minute

// state says what the fence does with a write.
type state int

const (
	closed   state = iota // refuse it, and cancel those in flight
	open                  // admit it while the term is valid
	draining              // refuse it, and let those in flight finish while the term is valid
	off                   // admit it: leader election is off
)

// Fence admits writes while a term is valid by its clock.
type Fence struct {
	clock     Clock
	onRefused func()

	mu       sync.Mutex
	state    state
	deadline time.Duration // of the term, on clock
	inFlight map[*admission]struct{}
	idle     chan struct{} // made by Drain, closed when inFlight is empty
	quietAt  time.Duration // when no write that got no answer can be executed any more
}

// admission is one write between the check and its response.
type admission struct {
	cancel    context.CancelCauseFunc
	ended     bool // the term ended while it was in flight
	elsewhere bool // in another cluster
}

// New returns a fence that refuses every write. It calls onRefused for each refusal.
func New(clock Clock, onRefused func()) *Fence {
	return &Fence{clock: clock, onRefused: onRefused, inFlight: map[*admission]struct{}{}}
}

// TurnOff admits every write from now on.
func (f *Fence) TurnOff() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state = off
}

// OpenUntil begins a term. At the deadline, unless it is extended before, no write is admitted any more;
// Close then cancels those in flight.
func (f *Fence) OpenUntil(deadline time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state, f.deadline = open, deadline
}

// Extend moves the deadline and reports whether the term was still valid. A term that has ended is
// not extended.
func (f *Fence) Extend(deadline time.Duration) bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.isValid(now) {
		return false
	}
	f.deadline = deadline
	return true
}

// Close ends the term: from now on every write is refused, and those in flight are cancelled.
func (f *Fence) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state = closed
	for a := range f.inFlight {
		f.endWrite(a)
	}
}

// Drain refuses every write from now on but lets those in flight finish, except for those to other
// clusters, which it cancels: these must not hold up the release of the Lease. The returned channel is
// closed when the last write has finished.
func (f *Fence) Drain() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	for a := range f.inFlight {
		if a.elsewhere {
			f.endWrite(a)
		}
	}
	f.idle = make(chan struct{})
	if !f.isBusy() {
		close(f.idle)
	}
	f.state = draining
	return f.idle
}

// endWrite cancels a write.
func (f *Fence) endWrite(a *admission) {
	a.ended = true
	a.cancel(ErrTermEnded)
}

// isBusy reports whether a write to the cluster of the Lease is in flight.
func (f *Fence) isBusy() bool {
	for a := range f.inFlight {
		if !a.elsewhere {
			return true
		}
	}
	return false
}

// QuietAt returns when no write that was admitted can be executed any more, if none is in flight.
func (f *Fence) QuietAt() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.quietAt
}

// Admits reports whether a write would pass at that time.
func (f *Fence) Admits(now time.Duration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.admits(now)
}

func (f *Fence) admits(now time.Duration) bool {
	return f.state == off || f.state == open && f.isValid(now)
}

// isValid reports whether the term is valid, so that the writes in flight may continue.
func (f *Fence) isValid(now time.Duration) bool {
	return (f.state == open || f.state == draining) && now < f.deadline
}

// admit returns nil if the write must not be sent.
func (f *Fence) admit(cancel context.CancelCauseFunc, elsewhere bool) *admission {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.admits(now) {
		return nil
	}
	a := &admission{cancel: cancel, elsewhere: elsewhere}
	f.inFlight[a] = struct{}{}
	return a
}

// isSendable reports whether an admitted write may still be sent.
func (f *Fence) isSendable(a *admission) bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	a.ended = a.ended || f.state != off && !f.isValid(now)
	return !a.ended
}

// finish removes a write from those in flight and reports whether its term ended meanwhile. outcomeUnknown
// reports that the write may still be executed.
func (f *Fence) finish(a *admission, outcomeUnknown bool) bool {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.inFlight, a)
	if outcomeUnknown && !a.elsewhere { // rule 8: the release waits for it
		f.quietAt = now + serverTimeout
	}
	if f.idle != nil && !a.elsewhere && !f.isBusy() {
		close(f.idle) // at most once: after Drain, nothing is admitted
	}
	return a.ended
}

// Transport puts the fence in front of a transport. A write, see IsWrite, is refused with ErrNotLeading
// unless the term is valid at that instant, and is cancelled when the term ends.
func (f *Fence) Transport(next http.RoundTripper) http.RoundTripper {
	return &fencedTransport{fence: f, next: next}
}

// TransportElsewhere is Transport for the API server of another cluster. It keeps the same term, but no
// write there delays the release of the Lease, so such a write may be executed after the next leader began.
func (f *Fence) TransportElsewhere(next http.RoundTripper) http.RoundTripper {
	return &fencedTransport{fence: f, next: next, elsewhere: true}
}

type fencedTransport struct {
	fence     *Fence
	next      http.RoundTripper
	elsewhere bool
}

// RoundTrip implements http.RoundTripper. A write passes if the term is valid by the clock at this instant
// (rule 7); a timer would run late in a paused process. Even so, the API server may execute a write after
// the term if it is in a socket or a queue already. The fence in the API server refuses such writes.
func (t *fencedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if !IsWrite(req) {
		return t.next.RoundTrip(req)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	a := t.fence.admit(cancel, t.elsewhere)
	if a == nil {
		cancel(nil)
		if req.Body != nil {
			_ = req.Body.Close() // a RoundTripper must close it; the error does not matter
		}
		t.fence.onRefused()
		return nil, fmt.Errorf("%s %s was not sent: %w", req.Method, req.URL.Path, ErrNotLeading)
	}
	resp, err := t.next.RoundTrip(t.fencedRequest(ctx, req, a))
	ended := t.fence.finish(a, isOutcomeUnknown(resp, err))
	if err != nil {
		cancel(nil)
		if ended {
			return nil, endedError{notLeading{inFlight: true}, req.Method, req.URL.Path, err}
		}
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols { // then the caller writes to the body, and ends the stream
		// The context must outlive the body, which the caller has not read yet.
		resp.Body = &cancelOnClose{ReadCloser: resp.Body, cancel: cancel}
	}
	return resp, nil
}

// WrappedRoundTripper implements net.RoundTripperWrapper, by which client-go closes idle connections.
func (t *fencedTransport) WrappedRoundTripper() http.RoundTripper { return t.next }

// connectPattern matches the subresources that run commands in Pods or pass requests on to them, with any
// method: kubectl exec is a GET that upgrades to a WebSocket.
var connectPattern = regexp.MustCompile(`/(pods|services|nodes)/[^/]+/(exec|attach|portforward|proxy)(/|$)`)

// IsWrite reports whether a request may change something: every request but GET, HEAD and OPTIONS, and
// each that may open a connection in both directions. The fence cannot see whether a GET does, since
// client-go adds the headers later. So a subresource outside of the API groups of Kubernetes, such as the
// console of a virtual machine, counts as a write, except for status and scale.
func IsWrite(req *http.Request) bool {
	switch req.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, "":
		path := req.URL.Path
		return connectPattern.MatchString(path) || isForeignSubresource(path)
	}
	return true
}

// isForeignSubresource reports whether a path names a subresource in a group that is not Kubernetes': the
// group's name has a dot and does not end in .k8s.io.
func isForeignSubresource(path string) bool {
	_, path, _ = strings.Cut(path, "/apis/") // the API server may be behind another one
	parts := strings.Split(path, "/")        // group, version, [watch,] [namespaces, name,] resource, name, subresource
	if group := parts[0]; !strings.Contains(group, ".") || strings.HasSuffix(group, ".k8s.io") {
		return false
	}
	parts = parts[min(2, len(parts)):]
	if len(parts) > 0 && parts[0] == "watch" {
		parts = parts[1:]
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	return len(parts) > 2 && parts[2] != "" && parts[2] != "status" && parts[2] != "scale"
}

// isOutcomeUnknown reports whether a write may still be executed: without an answer, unless there was no
// connection; and after a 5xx, which a proxy, or an API server that lost its store, also answers.
func isOutcomeUnknown(resp *http.Response, err error) bool {
	if err == nil {
		return resp.StatusCode >= http.StatusInternalServerError
	}
	var opErr *net.OpError
	return !errors.As(err, &opErr) || opErr.Op != "dial"
}

// fencedRequest returns the request with the context of its admission and a body that checks the fence
// again at every read by the transport. Dialing and the handshake may take long, but the last read
// precedes the end of the request, and the API server does not execute an incomplete request.
func (t *fencedTransport) fencedRequest(ctx context.Context, req *http.Request, a *admission) *http.Request {
	out := req.WithContext(ctx)
	if req.Body == nil || req.Body == http.NoBody {
		return out
	}
	out.Body = &fencedBody{req.Body, t.fence, a}
	if req.GetBody != nil {
		out.GetBody = func() (io.ReadCloser, error) {
			body, err := req.GetBody()
			return &fencedBody{body, t.fence, a}, err
		}
	}
	return out
}

type fencedBody struct {
	io.ReadCloser
	fence     *Fence
	admission *admission
}

func (b *fencedBody) Read(p []byte) (int, error) {
	if !b.fence.isSendable(b.admission) {
		return 0, ErrTermEnded
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
