// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"time"
)

const (
	// A leader's write that the API server's fence refuses is sent this many times: another API
	// server may answer it than the one that was asked, and its watch may lag.
	serverFenceAttempts = 4
	serverFencePause    = 25 * time.Millisecond // before the second, then twice as long each time

	// refusalLimit is how much of a response is searched for the fence's words.
	refusalLimit = 64 << 10
)

// Retry goes around a transport with the fence of the Lock, see Lock.Fence. When the API server's
// fence has refused a write of the leader, Retry finds out whether this replica still leads, names
// it again if need be, and sends the write again when the API server admits it. A write that is
// refused for good fails with ErrNotLeading: the refusal says something about this replica and
// nothing about the object.
func (n *LeaderNamespace) Retry(next http.RoundTripper) http.RoundTripper {
	return &retryTransport{n: n, next: next}
}

type retryTransport struct {
	n    *LeaderNamespace
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *retryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	method, path := req.Method, req.URL.Path
	for attempt := 1; ; attempt++ {
		asked := t.n.asked.Load()
		resp, err := t.next.RoundTrip(req)
		if err != nil || resp.StatusCode != http.StatusForbidden {
			return resp, err
		}
		words, err := fenceRefusal(resp)
		if err != nil || words == "" || t.n.lock.fence.isOff() { // without an election nobody is ever admitted
			return resp, err
		}
		_ = resp.Body.Close() // its content is known
		if attempt == serverFenceAttempts || !t.n.readmitted(req.Context(), asked, serverFencePause<<(attempt-1)) {
			return nil, fmt.Errorf("%s %s was refused by the API server, %s: %w", method, path, words, ErrNotLeading)
		}
		if req, err = again(req); err != nil {
			return nil, fmt.Errorf("%s %s was refused by the API server, %s: %w: %w", method, path, words, ErrNotLeading, err)
		}
	}
}

// WrappedRoundTripper lets client-go find the transport underneath.
func (t *retryTransport) WrappedRoundTripper() http.RoundTripper {
	return t.next
}

// readmitted reports whether the API server admits this replica after it has refused a write that
// was sent after the given round of asking.
func (n *LeaderNamespace) readmitted(ctx context.Context, asked int64, pause time.Duration) bool {
	if !n.leads.Load() || !n.lock.fence.admits() {
		return false
	}
	select {
	case n.again <- struct{}{}: // keep ends the term if another leads
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, serverFencePatience)
	defer cancel()
	return n.raise(ctx, asked) == nil && pauseFor(ctx, pause)
}

// again returns a request that can be sent again.
func again(req *http.Request) (*http.Request, error) {
	next := req.Clone(req.Context())
	if req.Body == nil || req.Body == http.NoBody {
		return next, nil
	}
	if req.GetBody == nil {
		return nil, errors.New("the body of the request cannot be read again")
	}
	body, err := req.GetBody()
	next.Body = body
	return next, err
}

// fenceRefusal returns the words of the API server's fence in a response, or "" if they are not
// there. The response can still be read.
func fenceRefusal(resp *http.Response) (string, error) {
	head, err := io.ReadAll(io.LimitReader(resp.Body, refusalLimit))
	if err != nil {
		return "", err
	}
	resp.Body = &restoredBody{Reader: io.MultiReader(bytes.NewReader(head), resp.Body), Closer: resp.Body}
	if found := refusalPattern.FindSubmatch(head); found != nil {
		return string(found[1]), nil
	}
	return "", nil
}

// refusalPattern finds the fence's words after the names of its policy and binding, which the API server
// writes: another policy may repeat what its own user has written. The message is a string in JSON or in
// protobuf.
var refusalPattern = regexp.MustCompile(`ValidatingAdmissionPolicy '` + ServerFenceName + `[^']*' with binding '[^']*' denied request: (` +
	serverFenceRefusal + `[^"\\\x00-\x1f]*)`)

type restoredBody struct {
	io.Reader
	io.Closer
}
