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
	// The elector's own rate limit. An idle leader makes one request per retry period, which is at
	// least 100 ms; the limit only contains a bug.
	clientQPS   = 20
	clientBurst = 40
)

// ClientConfig returns the configuration of a client for the elector alone, derived from the
// configuration of the process. It keeps the controllers' traffic and dead connections from costing the term:
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

// ownRetries keeps client-go from retrying: it hides the header that client-go obeys. The API server's
// errors have the delay in their body too, except for those from before its handlers, such as priority
// and fairness.
type ownRetries struct {
	http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t ownRetries) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(req)
	if err == nil {
		resp.Header.Del("Retry-After")
	}
	return resp, err
}

// WrappedRoundTripper implements net.RoundTripperWrapper.
func (t ownRetries) WrappedRoundTripper() http.RoundTripper {
	return t.RoundTripper
}
