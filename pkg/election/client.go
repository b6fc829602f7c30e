// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"net"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// The elector's own limiter. An idle leader makes one request per retry
	// period, which is never less than 100 ms; this is to stop a bug, not to pace.
	clientQPS   = 20
	clientBurst = 40
)

// ClientConfig returns the configuration of a client for the elector alone, made
// from that of the process. It differs in what would let the controllers' traffic
// or a dead connection cost the term:
//
//   - its own rate limiter and its own connections;
//   - HTTP/1.1, so that a request that times out takes its connection along and
//     the next one dials anew. An HTTP/2 connection would be kept until its ping
//     fails, 45 s by default;
//   - no waiting for Retry-After inside the client: the elector decides when to
//     try again, since only it knows how much of the term is left.
//
// It sets no timeout, for that would end watches too: the elector bounds every
// request by its context.
func ClientConfig(base *rest.Config) *rest.Config {
	cfg := rest.CopyConfig(base)
	cfg.QPS, cfg.Burst, cfg.RateLimiter = clientQPS, clientBurst, nil
	cfg.Timeout = 0
	cfg.NextProtos = []string{"http/1.1"}
	// A dialer of its own also keeps client-go from sharing the transport.
	cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 5 * time.Second}).DialContext
	if base.Dial != nil {
		cfg.Dial = base.Dial
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return noRetryAfter{next} })
	return rest.AddUserAgent(cfg, "leader-election")
}

// noRetryAfter takes the header Retry-After from responses.
type noRetryAfter struct {
	http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t noRetryAfter) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(req)
	if resp != nil {
		resp.Header.Del("Retry-After")
	}
	return resp, err
}

// WrappedRoundTripper lets client-go find the transport underneath.
func (t noRetryAfter) WrappedRoundTripper() http.RoundTripper {
	return t.RoundTripper
}
