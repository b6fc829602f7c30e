// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
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
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	requestmetrics "k8s.io/client-go/tools/metrics"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/klog/v2/textlogger"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
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

type brokenCollector struct{ prometheus.Collector }

func (brokenCollector) Collect(ch chan<- prometheus.Metric) { ch <- nil; panic("no reason") }

func TestMetricsThatCannotBeServedHideNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := controllerMetrics{metrics.NewKubeRegistry(), metrics.NewKubeRegistry()}
		for name, in := range map[string]metrics.KubeRegistry{"rest_client_requests_total": all, "widgets_total": all, "host_total": all.host} { // the first is a library's
			counter := metrics.NewCounter(&metrics.CounterOpts{Name: name, Help: "A controller's own."})
			in.MustRegister(counter)
			counter.Inc()
		}
		requestmetrics.RequestResult.Increment(t.Context(), "200", http.MethodGet, "api")
		serves := func(others ...string) {
			t.Helper()
			w := httptest.NewRecorder()
			metricsHandler(all).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
			for _, want := range append(others, "\nhost_total 1\n", "\nrest_client_requests_total{") {
				if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
					t.Errorf("status %d, want %q in the metrics\n%s", w.Code, want, w.Body)
				}
			}
		}
		function := func(name string, f func() float64) prometheus.Collector {
			return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name}, f)
		}
		all.RawMustRegister(function("fine", func() float64 { return 3 }), function("bad", func() float64 { panic("no reason") }), brokenCollector{function("worse", nil)})
		serves("\nwidgets_total 1\n", "\nfine 3\n")
		all.RawMustRegister(function("slow", func() float64 { <-t.Context().Done(); return 0 }))
		serves()
	})
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

func TestVerbosityRequestIsChecked(t *testing.T) {
	handler := introspectionHandler(&Options{}, metricsHandler(controllerMetrics{metrics.NewKubeRegistry(), metrics.NewKubeRegistry()}), nil)
	for name, tc := range map[string]struct {
		body string
		code int
	}{
		"a number is taken":      {"0", http.StatusOK},
		"a long body is cut off": {strings.Repeat("0", 2<<10), http.StatusBadRequest},
		"a level at which client-go logs the values of Secrets is refused": {"8", http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/debug/flags/v", strings.NewReader(tc.body)))
			assert.Equal(t, "code of "+w.Body.String(), tc.code, w.Code)
		})
	}
}

// TestVerbosityHighestShowsNoSecret also fails when client-go logs bodies at a lower level than today.
func TestVerbosityHighestShowsNoSecret(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Secret","stringData":{"read":"opensesame"}}`))
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	assert.NoError(t, err)
	secret := &corev1.Secret{StringData: map[string]string{"written": "opensesame"}}
	for level, logged := range map[int]bool{maxVerbosity: false, maxVerbosity + 1: true} {
		var log bytes.Buffer
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(level), textlogger.Output(&log)))
		ctx := klog.NewContext(t.Context(), logger)
		_, err := client.CoreV1().Secrets("shop").Create(ctx, secret, metav1.CreateOptions{})
		assert.NoError(t, err)
		if got := strings.Contains(log.String(), "opensesame"); got != logged {
			t.Errorf("level %d logs the value: %t, want %t:\n%s", level, got, logged, log.String())
		}
	}
}

func TestReviewsHaveTheirOwnLimit(t *testing.T) {
	process := clientConfigs{base: &rest.Config{Host: "https://b", QPS: -1, RateLimiter: flowcontrol.NewTokenBucketRateLimiter(1, 1)}}
	config := reviewConfig(process, "authorization")
	client, err := process.typed(config)
	assert.NoError(t, err)
	limiter := client.AuthenticationV1().RESTClient().GetRateLimiter()
	if limiter == nil || limiter.QPS() != 200 || config.Burst != 400 {
		t.Errorf("limiter %v, burst %d", limiter, config.Burst)
	}
}

func TestNoSecurePortNeedsNoAuthorities(t *testing.T) {
	o := newOptions(t, With())
	o.Client.Master, o.Authentication.ClientCAFile = newAPIServer(t).URL, filepath.Join(t.TempDir(), "none")
	_, err := builtProcess(t, o)
	assert.NoError(t, err)
}

func TestReviewErrorsHideTheAPIServer(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	o := newOptions(t, With(builtin.Entries()...))
	o.Authentication.SkipLookup = true
	o.Client.Master = gone.URL
	configs, err := newClientConfigs(o.Client)
	assert.NoError(t, err)
	auth, err := newReviewer(o, configs)
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
	auth := &reviewer{
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
	o := &Options{Secure: SecureConfig{BindAddress: address.IP, BindPort: address.Port}}
	own := witness.New(address.AddrPort(), "leader_1")
	s, err := startServers(ctx, o, testHealth(), auth, http.NotFoundHandler(), nil, own)
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
	s.stop()
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
			s, err := startServers(ctx, &Options{Secure: tc.config}, testHealth(), &reviewer{}, everything, nil, nil)
			assert.NoError(t, err)
			defer s.stop()

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
	o := &Options{Secure: SecureConfig{BindAddress: net.IPv4(127, 0, 0, 1), BindPort: taken.Addr().(*net.TCPAddr).Port}}
	if _, err := startServers(ctx, o, testHealth(), &reviewer{}, http.NotFoundHandler(), nil, nil); err == nil || !strings.Contains(err.Error(), "--secure-port") {
		t.Errorf("a port that is taken: %v, want an error about --secure-port", err)
	}
	assert.NoError(t, taken.Close())
	for range 2 {
		s, err := startServers(ctx, o, testHealth(), &reviewer{}, http.NotFoundHandler(), nil, nil)
		assert.NoError(t, err)
		s.stop()
	}
}

func testHealth() health {
	return health{healthz.NewHandler("/healthz"), healthz.NewHandler("/livez"), healthz.NewHandler("/readyz")}
}

func TestWitnessAddressFollowsTheFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*Options)
		podIP   string
		address string // empty: there is none
	}{
		"a Pod that listens everywhere is reached at its IP":        {func(*Options) {}, "10.0.0.1", "10.0.0.1:10357"},
		"a Pod with an IPv6 address is reached at it":               {func(*Options) {}, "fd00::1", "[fd00::1]:10357"},
		"a process that listens at one address is reached there":    {func(o *Options) { o.Secure.BindAddress = net.IPv4(127, 0, 0, 1) }, "10.0.0.1", "127.0.0.1:10357"},
		"a process that does not know its IP is not reached":        {func(*Options) {}, "", ""},
		"a process without a secure port is not reached":            {func(o *Options) { o.Secure.BindPort = 0 }, "10.0.0.1", ""},
		"a process without an election is not reached":              {func(o *Options) { o.Election.LeaderElect = false }, "10.0.0.1", ""},
		"a process that is restricted to namespaces is not reached": {func(o *Options) { o.Informers.Namespaces = []string{"a"} }, "10.0.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("POD_IP", tc.podIP)
			o := newOptions(t, With(builtin.Entries()...))
			o.Secure.BindPort = 10357
			tc.change(o)
			w := newWitness(o, "pod_1")
			if (w == nil) != (tc.address == "") || w != nil && w.Address() != tc.address {
				t.Errorf("got %+v", w)
			}
		})
	}
}
