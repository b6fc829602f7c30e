// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

// Server is an API server, as far as probes go, and the Secret with which it is reached.
type Server struct {
	*httptest.Server
	clock *clocktesting.FakePassiveClock

	mu     sync.Mutex
	health http.HandlerFunc
	secret map[string][]byte
	reads  int      // of the Secret
	tokens []string // that came
}

// NewServer starts one.
func NewServer(t *testing.T) *Server {
	t.Helper()
	s := &Server{clock: clocktesting.NewFakePassiveClock(start), secret: map[string][]byte{"token": []byte("good")}}
	s.health = func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		health := s.health
		s.tokens = append(s.tokens, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
		s.mu.Unlock()
		switch r.URL.Path {
		case "/healthz", "/c1/healthz":
			health(w, r)
		case "/version", "/c1/version":
			fmt.Fprint(w, `{"major":"1","gitVersion":"v1.36.3"}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *Server) readSecret(context.Context) (map[string][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	if s.secret == nil {
		return nil, errors.New("the API server does not answer")
	}
	return s.secret, nil
}

// Spec is what a KubeFedCluster says of it.
func (s *Server) Spec() policy.ClusterSpec {
	spec := policy.ClusterSpec{APIEndpoint: s.URL, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})}
	spec.SecretRef.Name = "s"
	return spec
}

// newClient returns a client that has read the token.
func (s *Server) newClient(t *testing.T, change func(*policy.ClusterSpec)) *client {
	t.Helper()
	spec := s.Spec()
	if change != nil {
		change(&spec)
	}
	c, err := newClient(spec, true, s.readSecret, s.clock)
	assert.NoError(t, err)
	assert.NoError(t, c.renewToken(t.Context()))
	t.Cleanup(c.close)
	return c
}

func TestProbeTellsHowAClusterAnswers(t *testing.T) {
	answer := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, body) }
	}
	tests := map[string]struct {
		health  http.HandlerFunc
		spec    func(*policy.ClusterSpec)
		closed  bool
		want    policy.ProbeResult
		problem string
	}{
		"ok is well":                      {want: policy.Healthy},
		"OK in upper case is well":        {health: answer(200, "OK"), want: policy.Healthy},
		"another word than ok is unwell":  {health: answer(200, "failing"), want: policy.Unhealthy},
		"another code than 200 is unwell": {health: answer(500, "ok"), want: policy.Unhealthy},
		"an answer 401 is unwell":         {health: answer(401, "ok"), want: policy.Unhealthy},
		"a body without end is unwell":    {health: func(w http.ResponseWriter, r *http.Request) { writeForever(r, w, "ok") }, want: policy.Unhealthy},
		"a redirect is unwell": {health: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/version", http.StatusFound)
		}, want: policy.Unhealthy},
		"an answer that comes too late is no answer": {health: func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			panic(http.ErrAbortHandler) // an answer could still arrive before the connection is closed
		}, want: policy.NoAnswer, problem: "deadline exceeded"},
		"half an answer is no answer": {health: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "2")
			fmt.Fprint(w, "o")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, want: policy.NoAnswer, problem: "deadline exceeded"},
		"headers without end are no answer": {health: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 2*maxHeader))
			fmt.Fprint(w, "ok")
		}, want: policy.NoAnswer, problem: "header"},
		"an endpoint at which nobody listens is no answer":   {closed: true, want: policy.NoAnswer, problem: "refused"},
		"an endpoint with a path is asked below it":          {spec: func(s *policy.ClusterSpec) { s.APIEndpoint += "/c1/" }, want: policy.Healthy},
		"a certificate of another CA is no answer":           {spec: func(s *policy.ClusterSpec) { s.CABundle = nil }, want: policy.NoAnswer, problem: "certificate"},
		"a certificate of another CA is well without checks": {spec: func(s *policy.ClusterSpec) { s.CABundle, s.DisabledTLSValidations = nil, []string{"*"} }, want: policy.Healthy},
		"a certificate for another name is no answer": {spec: func(s *policy.ClusterSpec) {
			s.APIEndpoint = strings.Replace(s.APIEndpoint, "127.0.0.1", "localhost", 1)
		}, want: policy.NoAnswer, problem: "certificate"},
		"a certificate for another name is well without a check of the name": {spec: func(s *policy.ClusterSpec) {
			s.APIEndpoint, s.DisabledTLSValidations = strings.Replace(s.APIEndpoint, "127.0.0.1", "localhost", 1), []string{"SubjectName"}
		}, want: policy.Healthy},
		"http to a server with TLS": {spec: func(s *policy.ClusterSpec) { s.APIEndpoint = strings.Replace(s.APIEndpoint, "https", "http", 1) }, want: policy.Unhealthy},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			server := NewServer(t)
			if tc.health != nil {
				server.health = tc.health
			}
			c := server.newClient(t, tc.spec)
			if tc.closed {
				server.Close()
			}
			timeout := 10 * time.Second // nothing depends on it but what must not answer
			if tc.problem == "deadline exceeded" {
				timeout = 50 * time.Millisecond
			}
			result, version, problem := c.probe(t.Context(), timeout)
			if result != tc.want || (problem == "") != (tc.problem == "") || !strings.Contains(problem, tc.problem) || strings.Contains(problem, "good") {
				t.Errorf("%v, %q, want %v, %q", result, problem, tc.want, tc.problem)
			}
			if (version == "v1.36.3") != (result == policy.Healthy) {
				t.Errorf("version %q", version)
			}
		})
	}
}

// writeForever sends the word again and again, until the reader has had enough.
func writeForever(r *http.Request, w io.Writer, word string) {
	for r.Context().Err() == nil {
		if _, err := fmt.Fprint(w, word); err != nil {
			return
		}
	}
}

// TestAnswerIsBounded has a server that never ends an answer.
func TestAnswerIsBounded(t *testing.T) {
	server := NewServer(t)
	server.health = func(w http.ResponseWriter, r *http.Request) { writeForever(r, w, strings.Repeat("x", 64<<10)) }
	c := server.newClient(t, nil)
	for query, want := range map[string]int64{"": maxObject, "?labelSelector=a": maxList, "?labelSelector=a&watch=true": maxList + 1} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/healthz"+query, nil)
		assert.NoError(t, err)
		response, err := c.RoundTrip(r)
		assert.NoError(t, err)
		n, err := io.Copy(io.Discard, io.LimitReader(response.Body, maxList+1))
		_ = response.Body.Close()
		if n != want || (want > maxList) != (err == nil) || err != nil && !errors.As(err, new(*http.MaxBytesError)) {
			t.Errorf("%q: %d bytes, want %d: %v", query, n, want, err)
		}
	}
}

// TestCertificateHasToNameTheAddress has an address, for which TLS names no server.
func TestCertificateHasToNameTheAddress(t *testing.T) {
	server := NewServer(t)
	for address, want := range map[string]bool{"127.0.0.1": true, "127.0.0.2": false} {
		spec := server.Spec()
		spec.APIEndpoint = "https://" + address
		c, err := newClient(spec, true, server.readSecret, server.clock)
		assert.NoError(t, err)
		verify := c.transport.TLSClientConfig.VerifyConnection
		if err := verify(tls.ConnectionState{PeerCertificates: []*x509.Certificate{server.Certificate()}}); (err == nil) != want {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestDialChecksAddress(t *testing.T) {
	server := NewServer(t)
	spec := server.Spec()
	spec.APIEndpoint = strings.Replace(spec.APIEndpoint, "127.0.0.1", "localhost", 1)
	c, err := newClient(spec, false, server.readSecret, server.clock)
	assert.NoError(t, err)
	if result, _, problem := c.probe(t.Context(), 10*time.Second); result != policy.NoAnswer || !strings.Contains(problem, "loopback") {
		t.Errorf("%v, %q", result, problem)
	}
	if len(server.tokens) > 0 {
		t.Error("it was asked nevertheless")
	}
}

// TestTokenIsReadAgainWhenItIsRefused follows the tokens of requests through rotations.
func TestTokenIsReadAgainWhenItIsRefused(t *testing.T) {
	server := NewServer(t)
	validToken := "good"
	server.health = func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+validToken {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
	c := server.newClient(t, nil)
	get := func(after time.Duration) {
		t.Helper()
		server.clock.SetTime(server.clock.Now().Add(after))
		response, err := (&http.Client{Transport: c}).Get(server.URL + "/healthz")
		assert.NoError(t, err)
		response.Body.Close()
		if response.ProtoMajor != 1 { // the server of the test has no HTTP/2
			t.Error(response.Proto)
		}
	}
	get(0)
	validToken, server.secret = "new", map[string][]byte{"token": []byte("new")}
	get(tokenRetryInterval - time.Second)
	get(0) // read a moment ago
	get(time.Second)
	get(0)
	validToken, server.secret = "newer", nil
	get(tokenRetryInterval)
	server.secret = map[string][]byte{"token": []byte("newer")}
	get(tokenRetryInterval - time.Second)
	get(time.Second)
	get(0)
	if want := []string{"good", "good", "good", "good", "new", "new", "new", "new", "newer"}; !slices.Equal(server.tokens, want) {
		t.Errorf("tokens %v, want %v", server.tokens, want)
	}
	if server.reads != 4 {
		t.Errorf("the Secret was read %d times", server.reads)
	}
	server.secret = map[string][]byte{"token": []byte(" ")}
	var malformed *malformedError
	if err := c.renewToken(t.Context()); !errors.As(err, &malformed) {
		t.Errorf("a Secret without a token: %v", err)
	}
	server.secret = nil
	if err := c.renewToken(t.Context()); err == nil || errors.As(err, &malformed) {
		t.Errorf("a Secret that cannot be read: %v", err)
	}
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	server, other := NewServer(t), NewServer(t)
	server.health = func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.URL+"/healthz", http.StatusTemporaryRedirect)
	}
	response, err := (&http.Client{Transport: server.newClient(t, nil)}).Get(server.URL + "/healthz")
	assert.NoError(t, err)
	response.Body.Close()
	if response.StatusCode != http.StatusTemporaryRedirect || len(other.tokens) > 0 {
		t.Errorf("%d, and tokens %v elsewhere", response.StatusCode, other.tokens)
	}
}

// TestProxyOfTheClusterIsUsedAndNoOther reaches a cluster through a proxy that the KubeFedCluster names, and
// not through that of the environment.
func TestProxyOfTheClusterIsUsedAndNoOther(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	server := NewServer(t)
	if result, _, problem := server.newClient(t, nil).probe(t.Context(), 10*time.Second); result != policy.Healthy {
		t.Errorf("the proxy of the environment counts: %s", problem)
	}
	var requests []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests = append(requests, r.Method+" "+r.Host)
		if r.Header.Get("Authorization") != "" {
			t.Error("the proxy has seen the token")
		}
		server, err := net.Dial("tcp", r.Host)
		if err != nil {
			t.Error(err)
			return
		}
		defer server.Close()
		caller, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer caller.Close()
		fmt.Fprint(caller, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(server, bufio.NewReader(buffered)) }()
		_, _ = io.Copy(caller, server)
	}))
	t.Cleanup(proxy.Close)
	c := server.newClient(t, func(s *policy.ClusterSpec) { s.ProxyURL = proxy.URL })
	result, _, problem := c.probe(t.Context(), 10*time.Second)
	// A proxy with TLS is checked by the system's roots, whatever the KubeFedCluster says of the API server.
	proxy.Close()
	secured := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(secured.Close)
	c = server.newClient(t, func(s *policy.ClusterSpec) { s.ProxyURL, s.DisabledTLSValidations = secured.URL, []string{"*"} })
	if result, _, problem := c.probe(t.Context(), 10*time.Second); result != policy.NoAnswer || !strings.Contains(problem, "certificate") {
		t.Errorf("a proxy with a certificate of its own: %v %s", result, problem)
	}
	if want := []string{"CONNECT " + strings.TrimPrefix(server.URL, "https://")}; result != policy.Healthy || !slices.Equal(requests, want) {
		t.Errorf("%v %s, asked %v, want %v", result, problem, requests, want)
	}
}

// SetAnswer sets the answer to probes from now on.
func (s *Server) SetAnswer(code int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.health = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, "ok") }
}

// Tokens returns the tokens that came.
func (s *Server) Tokens() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.tokens)
}

// Probes counts the requests.
func (s *Server) Probes() int { return len(s.Tokens()) }
