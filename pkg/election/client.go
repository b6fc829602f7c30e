// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

const (
	// The elector's own rate limit. An idle leader makes one request per retry period, which is at
	// least 100 ms; the limit only contains a bug.
	clientQPS   = 20
	clientBurst = 40
)

// ClientConfig returns the configuration of a client for the elector alone, derived from that of
// the process. It keeps the controllers' traffic and dead connections from costing the term:
//
//   - It has a rate limiter and connections of its own.
//   - It uses HTTP/1.1, so that a request that times out closes its connection and the next one
//     dials again. An HTTP/2 connection would be kept until its ping fails, 45 s by default.
//   - The client does not retry after Retry-After. The elector does, since only it knows how much of
//     the term is left. client-go still repeats a read whose connection broke, a second later.
//
// It sets no timeout, which would end watches too: the elector bounds every request by its context.
func ClientConfig(base *rest.Config) *rest.Config {
	cfg := rest.CopyConfig(base)
	cfg.QPS, cfg.Burst, cfg.RateLimiter = clientQPS, clientBurst, nil
	cfg.Timeout = 0
	cfg.NextProtos = []string{"http/1.1"}
	// A dialer of its own also prevents client-go from sharing the transport.
	cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 5 * time.Second}).DialContext
	if base.Dial != nil {
		cfg.Dial = base.Dial
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return ownRetries{next} })
	return rest.AddUserAgent(cfg, "leader-election")
}

// ownRetries keeps client-go from retrying: it moves a Retry-After from the header, which client-go
// obeys, to the error that the caller gets. The API server's errors have it in both places, those
// from before its handlers, such as priority and fairness, only in the header.
type ownRetries struct {
	http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t ownRetries) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(req)
	if err != nil || resp.Header.Get("Retry-After") == "" {
		return resp, err
	}
	seconds, _ := strconv.ParseInt(resp.Header.Get("Retry-After"), 10, 32) // a date is not obeyed
	resp.Header.Del("Retry-After")
	if resp.StatusCode < http.StatusBadRequest || strings.HasPrefix(resp.Header.Get("Content-Type"), "application/") {
		return resp, nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1024))
	_ = resp.Body.Close() // it was read
	if err != nil {
		return nil, err
	}
	failed := apierrors.NewGenericServerResponse(resp.StatusCode, req.Method, coordinationv1.Resource("leases"), "",
		strings.TrimSpace(string(text)), int(seconds), true).Status()
	failed.Kind, failed.APIVersion = "Status", "v1"
	body, err := json.Marshal(failed)
	if err != nil {
		return nil, err
	}
	resp.Header.Set("Content-Type", "application/json")
	resp.ContentLength = int64(len(body))
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, nil
}

// WrappedRoundTripper lets client-go find the transport underneath.
func (t ownRetries) WrappedRoundTripper() http.RoundTripper {
	return t.RoundTripper
}
