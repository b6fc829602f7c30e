// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"regexp"
)

// refusalLimit is how much of a response is searched for the fence's words.
const refusalLimit = 64 << 10

// Transport goes around a transport with the client's fence. A write that the API server's fence has
// refused fails with notLeading: the refusal says something about this replica and nothing about the
// object. KeepNamed then asks whether this replica is still named.
func (f *Fence) Transport(next http.RoundTripper, notLeading error) http.RoundTripper {
	return &refusalTransport{fence: f, next: next, notLeading: notLeading}
}

type refusalTransport struct {
	fence      *Fence
	next       http.RoundTripper
	notLeading error
}

// RoundTrip implements http.RoundTripper.
func (t *refusalTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusForbidden {
		return resp, err
	}
	words, err := fenceRefusal(resp)
	if err == nil && words == "" {
		return resp, nil
	}
	_ = resp.Body.Close()
	if err != nil {
		return nil, err
	}
	t.fence.refusedAt.Store(int64(t.fence.Clock.Now()))
	select {
	case t.fence.wake <- struct{}{}:
	default:
	}
	return nil, fmt.Errorf("%s %s was refused by the API server, %s: %w", req.Method, req.URL.Path, words, t.notLeading)
}

// WrappedRoundTripper implements net.RoundTripperWrapper.
func (t *refusalTransport) WrappedRoundTripper() http.RoundTripper {
	return t.next
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
