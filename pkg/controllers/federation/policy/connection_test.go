// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestConnectionFollowsTheClusterSpec(t *testing.T) {
	ca := newCertificate(t, nil, "ca", now, now.Add(time.Hour))
	tests := map[string]struct {
		spec     func(*ClusterSpec)
		unsafe   bool
		endpoint string
		problem  string
		insecure bool
	}{
		"a name":                            {endpoint: "https://c1.example"},
		"without a scheme it is https":      {spec: func(s *ClusterSpec) { s.APIEndpoint = "10.1.2.3:6443" }, endpoint: "https://10.1.2.3:6443"},
		"a path":                            {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://proxy.example/clusters/c1" }, endpoint: "https://proxy.example/clusters/c1"},
		"empty":                             {spec: func(s *ClusterSpec) { s.APIEndpoint = "" }, problem: "apiEndpoint"},
		"no host":                           {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://:443" }, problem: "apiEndpoint"},
		"no URL":                            {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://a b" }, problem: "apiEndpoint"},
		"http is refused":                   {spec: func(s *ClusterSpec) { s.APIEndpoint = "http://c1.example" }, problem: "must be https"},
		"http where unsafe is allowed":      {spec: func(s *ClusterSpec) { s.APIEndpoint = "http://127.0.0.1:8080" }, unsafe: true, endpoint: "http://127.0.0.1:8080"},
		"another scheme, even where unsafe": {spec: func(s *ClusterSpec) { s.APIEndpoint = "ftp://c1.example" }, unsafe: true, problem: "must be https"},
		"a password":                        {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://me:secret@c1.example" }, problem: "no more than"},
		"a query":                           {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://c1.example/?a=b" }, problem: "no more than"},
		"a link-local address is refused":   {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://169.254.169.254" }, problem: "link-local"},
		"a link-local address in the form of IPv6 is refused": {spec: func(s *ClusterSpec) { s.APIEndpoint = "https://[::ffff:169.254.169.254]" }, problem: "link-local"},
		"a proxy":                            {spec: func(s *ClusterSpec) { s.ProxyURL = "socks5://proxy.example:1080" }, endpoint: "https://c1.example"},
		"a proxy of another scheme":          {spec: func(s *ClusterSpec) { s.ProxyURL = "file:///etc/passwd" }, problem: "proxyURL"},
		"a proxy of an unknown scheme":       {spec: func(s *ClusterSpec) { s.ProxyURL = "gopher://proxy.example" }, problem: "proxyURL"},
		"a proxy on the manager's own host":  {spec: func(s *ClusterSpec) { s.ProxyURL = "http://127.0.0.1" }, problem: "loopback"},
		"a proxy that is no URL":             {spec: func(s *ClusterSpec) { s.ProxyURL = "http://me:secret@a b" }, problem: "proxyURL"},
		"no Secret":                          {spec: func(s *ClusterSpec) { s.SecretRef.Name = "" }, problem: "secretRef"},
		"a CA":                               {spec: func(s *ClusterSpec) { s.CABundle = ca.pem }, endpoint: "https://c1.example"},
		"a CA that is none":                  {spec: func(s *ClusterSpec) { s.CABundle = []byte("ca") }, problem: "caBundle"},
		"no check at all":                    {spec: func(s *ClusterSpec) { s.DisabledTLSValidations = []string{"*"} }, endpoint: "https://c1.example", insecure: true},
		"no check of the name and the times": {spec: func(s *ClusterSpec) { s.DisabledTLSValidations = []string{"SubjectName", "ValidityPeriod"} }, endpoint: "https://c1.example", insecure: true},
		"* and something else":               {spec: func(s *ClusterSpec) { s.DisabledTLSValidations = []string{"*", "SubjectName"} }, problem: "disabledTLS"},
		"an unknown check":                   {spec: func(s *ClusterSpec) { s.DisabledTLSValidations = []string{"Revocation"} }, problem: "disabledTLS"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			spec := ClusterSpec{APIEndpoint: "https://c1.example"}
			spec.SecretRef.Name = "s"
			if tc.spec != nil {
				tc.spec(&spec)
			}
			c, err := spec.Connection(tc.unsafe)
			if tc.problem != "" {
				if err == nil || !strings.Contains(err.Error(), tc.problem) || strings.Contains(err.Error(), "secret@") {
					t.Errorf("%v, want %q", err, tc.problem)
				}
				return
			}
			if err != nil || c.Endpoint.String() != tc.endpoint || c.Insecure() != tc.insecure {
				t.Errorf("%v, %v, insecure: %t", c.Endpoint, err, c.Insecure())
			}
			if (c.Proxy == nil) != (spec.ProxyURL == "") || (c.Roots == nil) != (spec.CABundle == nil) {
				t.Errorf("proxy %v, roots %v", c.Proxy, c.Roots)
			}
		})
	}
}

func TestCheckAddressRefusesLocalAddresses(t *testing.T) {
	for ip, allowed := range map[string]bool{"10.0.0.1": true, "192.0.2.1": true, "fd00::1": true, "2001:db8::1": true,
		"127.0.0.1": false, "127.8.0.1": false, "::1": false, "::ffff:127.0.0.1": false, "169.254.169.254": false, "fe80::1": false, "fe80::1%eth0": false,
		"224.0.0.1": false, "ff02::1": false, "0.0.0.0": false, "::": false, "::ffff:0.0.0.0": false} {
		if err := CheckAddress(netip.MustParseAddr(ip), false); (err == nil) != allowed {
			t.Errorf("%s: %v", ip, err)
		}
		if err := CheckAddress(netip.MustParseAddr(ip), true); err != nil {
			t.Errorf("%s where unsafe is allowed: %v", ip, err)
		}
	}
}

func TestTokenMustFitIntoAHeader(t *testing.T) {
	tests := map[string]struct {
		secret map[string][]byte
		want   string
	}{
		"a token":                          {map[string][]byte{"token": []byte("abc.def-_")}, "abc.def-_"},
		"a token with blanks around it":    {map[string][]byte{"token": []byte(" abc\n")}, "abc"},
		"a token of 16 KiB":                {map[string][]byte{"token": []byte(strings.Repeat("a", 16<<10))}, strings.Repeat("a", 16<<10)},
		"a token of more than 16 KiB":      {map[string][]byte{"token": []byte(strings.Repeat("a", 16<<10+1))}, ""},
		"a Secret without data":            {nil, ""},
		"a token of blanks":                {map[string][]byte{"token": []byte(" \n")}, ""},
		"a token with a line break within": {map[string][]byte{"token": []byte("abc\r\nHost: x")}, ""},
		"a token with a blank within":      {map[string][]byte{"token": []byte("abc def")}, ""},
		"a token with a NUL":               {map[string][]byte{"token": []byte("abc\x00d")}, ""},
		"a token that is not ASCII":        {map[string][]byte{"token": []byte("abc\u00e9")}, ""},
		"a Secret without the key token":   {map[string][]byte{"password": []byte("abc")}, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseToken(tc.secret)
			if got != tc.want || (err == nil) != (tc.want != "") || err != nil && strings.Contains(err.Error(), "abc") {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

type signedCertificate struct {
	*x509.Certificate
	pem []byte
	key *ecdsa.PrivateKey
}

func newCertificate(t *testing.T, issuer *signedCertificate, name string, notBefore, notAfter time.Time) *signedCertificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	assert.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: notBefore, NotAfter: notAfter, DNSNames: []string{name},
		BasicConstraintsValid: true, IsCA: issuer == nil, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	parent, parentKey := template, key
	if issuer != nil {
		parent, parentKey = issuer.Certificate, issuer.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	assert.NoError(t, err)
	c, err := x509.ParseCertificate(der)
	assert.NoError(t, err)
	return &signedCertificate{c, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key}
}

func TestConnectionVerifiesItsChain(t *testing.T) {
	ca := newCertificate(t, nil, "ca", now.Add(-time.Hour), now.Add(time.Hour))
	other := newCertificate(t, nil, "ca", now.Add(-time.Hour), now.Add(time.Hour))
	leaf := newCertificate(t, ca, "c1.example", now.Add(-2*time.Minute), now.Add(-time.Minute))
	roots := x509.NewCertPool()
	roots.AddCert(ca.Certificate)
	tests := map[string]struct {
		c     Connection
		chain []*x509.Certificate
		name  string
		after time.Duration
		want  bool
	}{
		"all is well":                 {chain: []*x509.Certificate{leaf.Certificate}, name: "c1.example", after: -90 * time.Second, want: true},
		"the certificate has expired": {chain: []*x509.Certificate{leaf.Certificate}, name: "c1.example"},
		"the certificate has expired, without a check of its time":         {c: Connection{NoTimeCheck: true}, chain: []*x509.Certificate{leaf.Certificate}, name: "c1.example", want: true},
		"a certificate that is not valid yet, without a check of its time": {c: Connection{NoTimeCheck: true}, chain: []*x509.Certificate{leaf.Certificate}, name: "c1.example", after: -time.Hour, want: true},
		"a certificate for another name":                                   {chain: []*x509.Certificate{leaf.Certificate}, name: "c2.example", after: -90 * time.Second},
		"a certificate for another name, without a check of the name":      {c: Connection{NoNameCheck: true}, chain: []*x509.Certificate{leaf.Certificate}, name: "c2.example", after: -90 * time.Second, want: true},
		"an unchecked name lets no CA pass":                                {c: Connection{NoNameCheck: true, NoTimeCheck: true}, chain: []*x509.Certificate{newCertificate(t, other, "c1.example", now, now.Add(time.Hour)).Certificate}, name: "c1.example"},
		"nothing is checked":                                               {c: Connection{NoTLSChecks: true}, name: "c2.example", want: true},
		"a server without a certificate":                                   {name: "c1.example"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tc.c.Roots = roots
			if err := tc.c.Verify(tc.chain, tc.name, now.Add(tc.after)); (err == nil) != tc.want {
				t.Error(err)
			}
		})
	}
}
