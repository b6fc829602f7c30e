// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"crypto/tls"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
)

// writeCert writes a certificate for host and its key into dir.
func writeCert(t *testing.T, dir, host string) (cert, key string) {
	t.Helper()
	certPEM, keyPEM, err := certutil.GenerateSelfSignedCertKey(host, nil, nil)
	must(t, err)
	cert, key = filepath.Join(dir, host+".crt"), filepath.Join(dir, host+".key")
	for path, content := range map[string][]byte{cert: certPEM, key: keyPEM} {
		must(t, os.WriteFile(path, content, 0o600))
	}
	return cert, key
}

// freeAddress returns an address of loopback at which nobody listens.
func freeAddress(t *testing.T) *net.TCPAddr {
	t.Helper()
	port, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, port.Close())
	return port.Addr().(*net.TCPAddr)
}

func TestTLSIsAsConfigured(t *testing.T) {
	for name, tc := range map[string]struct {
		config  SecureConfig
		client  *tls.Config
		refused bool
	}{
		"without a certificate one is made for loopback": {
			config: SecureConfig{}},
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
			s, err := startServers(ctx, &Options{Secure: tc.config}, testHealth(), &auth{}, everything, nil, nil)
			must(t, err)
			defer s.stop()

			client := &tls.Config{}
			if tc.client != nil {
				client = tc.client
			}
			client.InsecureSkipVerify, client.NextProtos = true, []string{"h2", "http/1.1"}
			conn, err := tls.Dial("tcp", address.String(), client)
			if tc.refused {
				if err == nil {
					t.Fatalf("accepted: %+v", conn.ConnectionState())
				}
				return
			}
			must(t, err)
			defer func() { _ = conn.Close() }()
			state := conn.ConnectionState()
			must(t, state.PeerCertificates[0].VerifyHostname("localhost"))
			same(t, "protocol", "h2", state.NegotiatedProtocol)
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

// TestServersStop checks that stop frees the ports, and that the error about a port in use names
// the flag.
func TestServersStop(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	o := &Options{Secure: SecureConfig{BindAddress: net.IPv4(127, 0, 0, 1), BindPort: taken.Addr().(*net.TCPAddr).Port}}
	if _, err := startServers(ctx, o, testHealth(), &auth{}, http.NotFoundHandler(), nil, nil); err == nil || !strings.Contains(err.Error(), "--secure-port") {
		t.Errorf("a port that is taken: %v, want an error about --secure-port", err)
	}
	must(t, taken.Close())
	for range 2 {
		s, err := startServers(ctx, o, testHealth(), &auth{}, http.NotFoundHandler(), nil, nil)
		must(t, err)
		s.stop()
	}
}

func testHealth() health {
	return health{healthz.NewHandler("/healthz"), healthz.NewHandler("/livez"), healthz.NewHandler("/readyz")}
}

func TestWitnessOf(t *testing.T) {
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
		"a process that is restricted to namespaces is not reached": {func(o *Options) { o.Generic.Namespaces = []string{"a"} }, "10.0.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("POD_IP", tc.podIP)
			o := newOptions(t)
			o.Secure.BindPort = 10357
			tc.change(o)
			w := newWitness(o, "pod_1")
			if (w == nil) != (tc.address == "") || w != nil && w.Address() != tc.address {
				t.Errorf("got %+v", w)
			}
		})
	}
}
