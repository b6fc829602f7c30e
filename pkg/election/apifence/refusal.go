// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"bytes"
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
	attempts     = 4
	attemptPause = 25 * time.Millisecond // before the second, then twice as long each time

	// refusalLimit is how much of a response is searched for the fence's words.
	refusalLimit = 64 << 10
)

// Transport goes around a transport with the client's fence. When the API server's fence has refused a
// write while leads returns true, it lets Keep ask, which names the replica again or ends its term, and
// sends the write again. A write that is refused for good fails with notLeading: the refusal says
// something about this replica and nothing about the object.
func (f *Fence) Transport(next http.RoundTripper, leads func() bool, notLeading error) http.RoundTripper {
	return &refusalTransport{fence: f, next: next, leads: leads, notLeading: notLeading}
}

type refusalTransport struct {
	fence      *Fence
	next       http.RoundTripper
	leads      func() bool
	notLeading error
}

// RoundTrip implements http.RoundTripper.
func (t *refusalTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	method, path := req.Method, req.URL.Path
	for attempt := 1; ; attempt++ {
		resp, err := t.next.RoundTrip(req)
		if err != nil || resp.StatusCode != http.StatusForbidden || !t.fence.Elected { // without an election nobody is ever admitted
			return resp, err
		}
		words, err := fenceRefusal(resp)
		if err != nil || words == "" {
			return resp, err
		}
		_ = resp.Body.Close() // its content is known
		select {
		case t.fence.again <- struct{}{}:
		default:
		}
		if attempt == attempts || !t.leads() || !pauseFor(req.Context(), attemptPause<<(attempt-1)) {
			return nil, fmt.Errorf("%s %s was refused by the API server, %s: %w", method, path, words, t.notLeading)
		}
		if req, err = again(req); err != nil {
			return nil, fmt.Errorf("%s %s was refused by the API server, %s: %w: %w", method, path, words, t.notLeading, err)
		}
	}
}

// WrappedRoundTripper lets client-go find the transport underneath.
func (t *refusalTransport) WrappedRoundTripper() http.RoundTripper {
	return t.next
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
var refusalPattern = regexp.MustCompile(`ValidatingAdmissionPolicy '` + PolicyName + `[^']*' with binding '[^']*' denied request: (` +
	refusal + `[^"\\\x00-\x1f]*)`)

type restoredBody struct {
	io.Reader
	io.Closer
}
