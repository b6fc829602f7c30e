// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"fmt"
	"net/http"
	"sync/atomic"
)

// Gate goes around a transport with the fence of the Lock, for what works on every replica. It refuses
// writes until lead begins. The fence alone opens when the Lease is won, and then lead may have to wait
// until the leader before cannot write any more; what only works within lead waits with it.
type Gate struct {
	open    atomic.Bool
	refused func(method string)
}

// NewGate returns a gate that is closed. The metrics of the lock count what it refuses.
func NewGate(lock *Lock) *Gate { return &Gate{refused: lock.shown.metrics.refused} }

// Open opens the gate for good, when lead begins. The fence refuses what comes after the term.
func (g *Gate) Open() { g.open.Store(true) }

// Fence puts the gate in front of a transport.
func (g *Gate) Fence(next http.RoundTripper) http.RoundTripper {
	return &gatedTransport{g, next}
}

type gatedTransport struct {
	gate *Gate
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *gatedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.gate.open.Load() || !isWrite(req) {
		return t.next.RoundTrip(req)
	}
	if req.Body != nil {
		_ = req.Body.Close() // a RoundTripper must close it; the error does not matter
	}
	t.gate.refused(req.Method)
	return nil, fmt.Errorf("%s %s was not sent: %w", req.Method, req.URL.Path, ErrNotLeading)
}

// WrappedRoundTripper lets client-go find the transport underneath.
func (t *gatedTransport) WrappedRoundTripper() http.RoundTripper { return t.next }
