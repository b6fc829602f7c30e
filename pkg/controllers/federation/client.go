// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const (
	// tokenRetryInterval is how long to wait before a token that the cluster refuses is read again.
	tokenRetryInterval = 10 * time.Second
	// maxHeader, maxHealth and maxBody limit how many bytes of the answer to a probe the manager holds.
	maxHeader = 64 << 10
	maxHealth = 1 << 10
	maxBody   = 64 << 10
	// maxObject limits every other answer, maxList a page of a list. An API server stores objects of up to 1.5
	// MiB, so a page of a few objects that somebody in the cluster has made that large is still read.
	maxObject = 4 << 20
	maxList   = 32 << 20
)

// client is how a cluster is reached: the http.RoundTripper of all its clients, and the token. A changed
// spec of the KubeFedCluster makes another client, a changed token does not.
type client struct {
	connection policy.Connection
	transport  *http.Transport
	readSecret func(context.Context) (map[string][]byte, error)
	clock      clock.PassiveClock
	// cluster is what the host has opened with this client.
	cluster *controllers.Cluster

	mu     sync.Mutex
	token  string
	readAt time.Time
}

// newClient returns a client, or the error that the KubeFedCluster gives none. The token must be read
// before the first request.
func newClient(spec policy.ClusterSpec, unsafe bool, readSecret func(context.Context) (map[string][]byte, error), c clock.PassiveClock) (*client, error) {
	connection, err := spec.Connection(unsafe)
	if err != nil {
		return nil, err
	}
	return &client{connection: connection, transport: newTransport(connection, unsafe), readSecret: readSecret, clock: c}, nil
}

// newTransport returns the connections to a cluster. The environment's proxy does not count.
func newTransport(c policy.Connection, unsafe bool) *http.Transport {
	dialer := &net.Dialer{Timeout: 30 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		// The address that the name has been resolved to: a name can lead anywhere, and change.
		ip, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return policy.CheckAddress(ip.Addr(), unsafe)
	}}
	t := &http.Transport{
		DialContext: dialer.DialContext, Proxy: func(*http.Request) (*url.URL, error) { return c.Proxy, nil },
		// Pings close a connection that leads nowhere, which would otherwise be used for ever.
		ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second}, TLSHandshakeTimeout: 10 * time.Second, IdleConnTimeout: 90 * time.Second, MaxResponseHeaderBytes: maxHeader,
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS12,
			// VerifyConnection makes the checks that this switches off, except those that the KubeFedCluster disables.
			InsecureSkipVerify: true,
			VerifyConnection: func(s tls.ConnectionState) error {
				return c.Verify(s.PeerCertificates, c.Endpoint.Hostname(), time.Now())
			},
		},
	}
	if c.Proxy != nil && c.Proxy.Scheme == "https" {
		// The proxy's own certificate is checked as usual. TLSClientConfig is for the API server behind it.
		proxyDialer := &tls.Dialer{NetDialer: dialer, Config: &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.Proxy.Hostname()}}
		t.DialTLSContext = proxyDialer.DialContext
	}
	return t
}

// renewToken reads the token again. A Secret without a token is a *malformedError; the old token stays then.
func (c *client) renewToken(ctx context.Context) error {
	secret, err := c.readSecret(ctx)
	if err != nil {
		return err
	}
	token, err := policy.ParseToken(secret)
	if err != nil {
		return &malformedError{err}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.token, c.readAt = token, c.clock.Now()
	return nil
}

// malformedError is an error that only a change of the KubeFedCluster or its Secret mends.
type malformedError struct{ error }

func (m *malformedError) Unwrap() error { return m.error }

// RoundTrip sends a request with the token. After a 401 it reads the token again, for the next request.
// A redirect is not followed, since it could lead the token anywhere.
func (c *client) RoundTrip(r *http.Request) (*http.Response, error) { return c.send(c.transport, r) }

func (c *client) send(t *http.Transport, r *http.Request) (*http.Response, error) {
	c.mu.Lock()
	token := c.token
	c.mu.Unlock()
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	response, err := t.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	// A longer body is an error, so that a cluster cannot make the manager hold it.
	response.Body = http.MaxBytesReader(nil, response.Body, responseLimit(r))
	if response.StatusCode/100 == 3 {
		response.Header.Del("Location")
	}
	if response.StatusCode == http.StatusUnauthorized && c.mayRenewToken() {
		_ = c.renewToken(r.Context()) // the caller gets the 401; a Secret without a token is reported when it changes
	}
	return response, nil
}

// responseLimit returns how long the answer to a request may be. A watch has no end.
func responseLimit(r *http.Request) int64 {
	switch query := r.URL.Query(); {
	case query.Has("watch"):
		return math.MaxInt64
	case query.Has("labelSelector"):
		return maxList
	}
	return maxObject
}

// mayRenewToken reports whether the token may be read again because of a 401, and counts that as done.
func (c *client) mayRenewToken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.clock.Since(c.readAt) < tokenRetryInterval {
		return false
	}
	c.readAt = c.clock.Now()
	return true
}

// config is for Host.Cluster. It has no token, which each request gets here.
func (c *client) config(qps int) *rest.Config {
	return &rest.Config{Host: c.connection.Endpoint.String(), Transport: c, QPS: float32(qps), Burst: 2 * qps, Timeout: clusterTimeout}
}

// SetDial makes connections in another way, such as in the network of a test.
func (c *client) SetDial(dial func(ctx context.Context, network, address string) (net.Conn, error)) {
	c.transport.DialContext = dial
}

// close ends the connections that are idle. Connections in use end with their requests.
func (c *client) close() {
	if c.cluster != nil {
		c.cluster.Close()
	}
	c.CloseIdleConnections()
}

// CloseIdleConnections is what net/http looks for.
func (c *client) CloseIdleConnections() { c.transport.CloseIdleConnections() }

// newTransport returns a transport for new connections to the cluster.
func (c *client) newTransport() *http.Transport {
	t := c.transport.Clone()
	t.HTTP2 = nil // the timer of a ping keeps a closed connection in memory for 30 s
	return t
}

// probe asks /healthz on a new connection, and /version if that is well. Each has the timeout, from
// the name's resolution to the end of the body. problem is why there is no answer.
func (c *client) probe(ctx context.Context, timeout time.Duration) (result policy.ProbeResult, version, problem string) {
	t := c.newTransport()
	defer t.CloseIdleConnections()
	code, body, err := c.get(ctx, t, "/healthz", timeout, maxHealth)
	if err != nil {
		return policy.NoAnswer, "", err.Error()
	}
	if result = policy.ReadHealthz(code, string(body)); result != policy.Healthy {
		return result, "", ""
	}
	var info struct{ GitVersion string }
	code, body, err = c.get(ctx, t, "/version", timeout, maxBody)
	if err != nil || code != http.StatusOK || json.Unmarshal(body, &info) != nil || len(info.GitVersion) > 64 {
		return result, "", ""
	}
	return result, info.GitVersion, ""
}

// get returns the status and the beginning of the body of a GET.
func (c *client) get(ctx context.Context, t *http.Transport, path string, timeout time.Duration, limit int64) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	endpoint := *c.connection.Endpoint
	endpoint.Path = strings.TrimSuffix(endpoint.Path, "/") + path
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, endpoint.String(), nil)
	if err != nil {
		return 0, nil, err
	}
	response, err := c.send(t, r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, limit))
	return response.StatusCode, body, err
}
