// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
)

func TestServerEndsRequestsWithoutTheirBody(t *testing.T) {
	server := httptest.NewServer(withBodyTimeout(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), time.Millisecond))
	defer server.Close()
	for name, header := range map[string]string{
		"a body of a known length": "Content-Length: 1000",
		"a body in chunks":         "Transfer-Encoding: chunked",
	} {
		t.Run(name, func(t *testing.T) {
			connection, err := net.Dial("tcp", server.Listener.Addr().String())
			assert.NoError(t, err)
			defer connection.Close()
			_ = connection.SetReadDeadline(time.Now().Add(30 * time.Second))
			_, err = fmt.Fprintf(connection, "POST /healthz HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", header)
			assert.NoError(t, err)
			if _, err := io.ReadAll(connection); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the server keeps the connection open")
			}
		})
	}
}

func TestServerWaitsForPermittedCallers(t *testing.T) {
	var ended error
	server := httptest.NewServer(withBodyTimeout(withoutBodyTimeout(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if ended = r.Context().Err(); err == nil {
			_, err = w.Write(body)
		}
		if err != nil {
			t.Error(err)
		}
	})), -time.Second)) // the deadline has passed
	defer server.Close()
	resp, err := http.Post(server.URL, "text/plain", io.MultiReader(strings.NewReader("a"), strings.NewReader("b")))
	assert.NoError(t, err)
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "ab" || ended != nil {
		t.Errorf("%q, error %v, context %v", body, err, ended)
	}
}

func TestReviewsHaveTheirOwnLimit(t *testing.T) {
	config := withOwnLimit(&rest.Config{Host: "https://b", QPS: -1, RateLimiter: flowcontrol.NewTokenBucketRateLimiter(1, 1)})
	assert.Equal(t, "limit", []any{float32(200), 400, nil}, []any{config.QPS, config.Burst, config.RateLimiter})
}

func TestReviewErrorsHideTheAPIServer(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	auth, err := NewReviewer(AuthenticationConfig{SkipLookup: true}, func(string) *rest.Config { return &rest.Config{Host: gone.URL} })
	assert.NoError(t, err)
	for name, tc := range map[string]struct {
		token string
		code  int
	}{
		"a caller without credentials":  {"", http.StatusInternalServerError},
		"a caller that nobody can know": {"Bearer x", http.StatusUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
			r.Header.Set("Authorization", tc.token)
			w := httptest.NewRecorder()
			auth.protect(http.NotFoundHandler()).ServeHTTP(w, r)
			if address := gone.Listener.Addr().String(); w.Code != tc.code || strings.Contains(w.Body.String(), address) {
				t.Errorf("code %d, want %d; the API server is %s: %s", w.Code, tc.code, address, w.Body)
			}
		})
	}
}

// TestRequestsDoNotHoldUpTheExit stops the servers while a request waits for its review and a standby
// watches.
func TestRequestsDoNotHoldUpTheExit(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	address := freeAddress(t)
	reviewing, ended, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	defer close(over)
	auth := &Reviewer{
		authenticator: authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
			return &authenticator.Response{User: &user.DefaultInfo{Name: user.Anonymous}}, true, nil
		}),
		authorizer: authorizer.AuthorizerFunc(func(ctx context.Context, _ authorizer.Attributes) (authorizer.Decision, string, error) {
			close(reviewing)
			select {
			case <-ctx.Done():
				close(ended)
			case <-over:
			}
			return authorizer.DecisionNoOpinion, "", ctx.Err()
		}),
	}
	secure := SecureConfig{BindAddress: address.IP, BindPort: address.Port}
	own := witness.New(address.AddrPort(), "leader_1")
	s, err := Start(ctx, InsecureConfig{}, secure, auth, pages(http.NotFoundHandler(), map[string]http.Handler{witness.Path: own}))
	assert.NoError(t, err)
	insecure := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	client := &http.Client{Transport: insecure, Timeout: time.Minute}
	go func() {
		if response, err := client.Get("https://" + address.String() + "/metrics"); err == nil {
			_ = response.Body.Close()
		}
	}()
	<-reviewing
	watched, err := client.Get("https://" + address.String() + witness.Path + "?leader_1") // without credentials
	assert.NoError(t, err)
	defer watched.Body.Close()
	s.Stop()
	if beats, err := io.ReadAll(watched.Body); err != nil || watched.StatusCode != http.StatusOK {
		t.Errorf("status %d, the standby got %q, with the error %v", watched.StatusCode, beats, err)
	}
	select {
	case <-ended:
	default:
		t.Error("the servers stopped while the review went on")
	}
}

// writeCert writes a certificate for host and its key into dir.
func writeCert(t *testing.T, dir, host string) (cert, key string) {
	t.Helper()
	certPEM, keyPEM, err := certutil.GenerateSelfSignedCertKey(host, nil, nil)
	assert.NoError(t, err)
	cert, key = filepath.Join(dir, host+".crt"), filepath.Join(dir, host+".key")
	for path, content := range map[string][]byte{cert: certPEM, key: keyPEM} {
		assert.NoError(t, os.WriteFile(path, content, 0o600))
	}
	return cert, key
}

// freeAddress returns an address of loopback at which nobody listens.
func freeAddress(t *testing.T) *net.TCPAddr {
	t.Helper()
	port, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NoError(t, err)
	assert.NoError(t, port.Close())
	return port.Addr().(*net.TCPAddr)
}

func TestSecurePortUsesTheConfiguredTLS(t *testing.T) {
	for name, tc := range map[string]struct {
		config  SecureConfig
		client  *tls.Config
		refused bool
	}{
		"without a certificate one is made for loopback": {config: SecureConfig{}},
		"a TLS version below the lowest is refused": {
			config: SecureConfig{MinVersion: "VersionTLS13"}, client: &tls.Config{MaxVersion: tls.VersionTLS12}, refused: true},
		"a cipher suite that is not in the list is refused": {
			config: SecureConfig{CipherSuites: []string{"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}},
			client: &tls.Config{MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384}}, refused: true},
		"a single cipher suite is enough": {
			config: SecureConfig{CipherSuites: []string{"TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"}},
			client: &tls.Config{MaxVersion: tls.VersionTLS12}},
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			address := freeAddress(t)
			tc.config.BindAddress, tc.config.BindPort = address.IP, address.Port
			everything := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
			s, err := Start(ctx, InsecureConfig{}, tc.config, &Reviewer{}, pages(everything, nil))
			assert.NoError(t, err)
			defer s.Stop()

			client := cmp.Or(tc.client, &tls.Config{})
			client.InsecureSkipVerify, client.NextProtos = true, []string{"h2", "http/1.1"}
			conn, err := tls.Dial("tcp", address.String(), client)
			if tc.refused {
				if err == nil {
					t.Fatalf("accepted: %+v", conn.ConnectionState())
				}
				return
			}
			assert.NoError(t, err)
			defer func() { _ = conn.Close() }()
			state := conn.ConnectionState()
			assert.NoError(t, state.PeerCertificates[0].VerifyHostname("localhost"))
			assert.Equal(t, "protocol", "h2", state.NegotiatedProtocol)
		})
	}
}

func TestCertificateMistakesAreErrors(t *testing.T) {
	dir := t.TempDir()
	cert, key := writeCert(t, dir, "main.example.com")
	_, otherKey := writeCert(t, dir, "other.example.com")
	for name, tc := range map[string]struct {
		config SecureConfig
		flag   string
	}{
		"a file that is not there":            {SecureConfig{CertFile: "/nothing", KeyFile: key}, "--tls-cert-file"},
		"a key of another certificate":        {SecureConfig{CertFile: cert, KeyFile: otherKey}, "--tls-private-key-file"},
		"a certificate without a private key": {SecureConfig{CertFile: cert, KeyFile: cert}, "--tls-private-key-file"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := tc.config.serve(t.Context(), nil); err == nil || !strings.Contains(err.Error(), tc.flag) {
				t.Errorf("got %v, want an error about %s", err, tc.flag)
			}
		})
	}
}

// TestServersFreeTheirPortsWhenTheyStop checks that stop frees the ports, and that the error about a port in
// use names the flag.
func TestServersFreeTheirPortsWhenTheyStop(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NoError(t, err)
	secure := SecureConfig{BindAddress: net.IPv4(127, 0, 0, 1), BindPort: taken.Addr().(*net.TCPAddr).Port}
	if _, err := Start(ctx, InsecureConfig{}, secure, &Reviewer{}, pages(http.NotFoundHandler(), nil)); err == nil || !strings.Contains(err.Error(), "--secure-port") {
		t.Errorf("a port that is taken: %v, want an error about --secure-port", err)
	}
	assert.NoError(t, taken.Close())
	for range 2 {
		s, err := Start(ctx, InsecureConfig{}, secure, &Reviewer{}, pages(http.NotFoundHandler(), nil))
		assert.NoError(t, err)
		s.Stop()
	}
}

func pages(protected http.Handler, open map[string]http.Handler) Pages {
	return Pages{Protected: protected, Open: open, Health: Health{
		Healthz: healthz.NewHandler("/healthz"), Livez: healthz.NewHandler("/livez"), Readyz: healthz.NewHandler("/readyz")}}
}
