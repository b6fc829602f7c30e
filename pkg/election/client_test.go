// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func newTestServer(t *testing.T, handler http.HandlerFunc) *rest.Config {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

func TestClientConfigSharesNothing(t *testing.T) {
	base := &rest.Config{Host: "https://api", QPS: 1, Burst: 1, Timeout: time.Minute, RateLimiter: flowcontrol.NewFakeNeverRateLimiter()}
	first := ClientConfig(base)
	if first.RateLimiter != nil || first.QPS != clientQPS || first.Burst != clientBurst || first.Timeout != 0 {
		t.Errorf("got limiter %v, %v/%v, timeout %s", first.RateLimiter, first.QPS, first.Burst, first.Timeout)
	}
	if base.Timeout != time.Minute || base.WrapTransport != nil || base.NextProtos != nil {
		t.Error("the base was changed")
	}
	transports := map[http.RoundTripper]bool{}
	for _, config := range []*rest.Config{base, first, ClientConfig(base)} {
		config = rest.CopyConfig(config)
		config.WrapTransport = nil
		transport, err := rest.TransportFor(config)
		assert.NoError(t, err)
		transports[transport] = true
	}
	if len(transports) != 3 {
		t.Errorf("%d transports for 3 configurations", len(transports))
	}
}

// TestClientDialsAnewAfterATimeout checks that after a request on a dead connection has timed out,
// the next request does not hang too.
func TestClientDialsAnewAfterATimeout(t *testing.T) {
	var mu sync.Mutex
	connections := map[int32]string{} // request -> remote address
	var requests atomic.Int32
	config := newTestServer(t, func(w http.ResponseWriter, req *http.Request) {
		n := requests.Add(1)
		mu.Lock()
		connections[n] = req.RemoteAddr
		mu.Unlock()
		if req.ProtoMajor != 1 {
			t.Errorf("got %s", req.Proto)
		}
		if n == 2 {
			<-req.Context().Done() // until the client gives up
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kind":"Lease","apiVersion":"coordination.k8s.io/v1"}`))
	})
	client, err := kubernetes.NewForConfig(ClientConfig(config))
	assert.NoError(t, err)
	get := func(timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		_, err := client.CoordinationV1().Leases("ns").Get(ctx, "lease", metav1.GetOptions{})
		return err
	}
	assert.NoError(t, get(time.Minute))
	if err := get(50 * time.Millisecond); err == nil {
		t.Fatal("the request that hangs has succeeded")
	}
	assert.NoError(t, get(time.Minute))
	mu.Lock()
	defer mu.Unlock()
	if connections[1] != connections[2] || connections[2] == connections[3] {
		t.Errorf("the requests came from %v", connections)
	}
}

// TestClientLeavesRetryAfterToItsCaller checks that the client returns every 429 at once: the elector,
// which knows how much of its term is left, decides when to retry.
func TestClientLeavesRetryAfterToItsCaller(t *testing.T) {
	for name, tc := range map[string]struct {
		answer func(http.ResponseWriter)
		after  time.Duration
	}{
		"a refusal of priority and fairness, as text": {func(w http.ResponseWriter) {
			http.Error(w, "Too many requests, please try again later.", http.StatusTooManyRequests)
		}, 0},
		"a refusal of a handler, as JSON": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"TooManyRequests",` +
				`"details":{"retryAfterSeconds":3600},"code":429}`))
		}, time.Hour},
		"without a body": {func(w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var requests atomic.Int32
			config := newTestServer(t, func(w http.ResponseWriter, _ *http.Request) {
				requests.Add(1)
				w.Header().Set("Retry-After", "3600")
				tc.answer(w)
			})
			client, err := kubernetes.NewForConfig(ClientConfig(config))
			assert.NoError(t, err)
			_, err = client.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{})
			if f := failureOf(err); f.Kind != protocol.FailRefused || f.After != tc.after || requests.Load() != 1 {
				t.Errorf("%d requests, error %v, which means %+v", requests.Load(), err, f)
			}
		})
	}
}

func TestClientConfigKeepsADialer(t *testing.T) {
	dialed := false
	config := ClientConfig(&rest.Config{Host: "http://api", Dial: func(context.Context, string, string) (net.Conn, error) {
		dialed = true
		return nil, context.Canceled
	}})
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	if _, err := client.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{}); err == nil || !dialed {
		t.Errorf("dialed %t, error %v", dialed, err)
	}
}
