// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/retry"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// ca is a certificate authority of a test.
type ca struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newCA(t *testing.T, name string) ca {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	assert.NoError(t, err)
	cert, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: name}, key)
	assert.NoError(t, err)
	return ca{cert, key}
}

func (c ca) certPEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.cert.Raw}))
}

// issueClientCert issues a client certificate.
func (c ca) issueClientCert(t *testing.T, subject pkix.Name) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	assert.NoError(t, err)
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: subject, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, key.Public(), c.key)
	assert.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// checkCode returns an error unless a manager's /debug/leader returns code to a client with the
// certificate.
func checkCode(url string, cert tls.Certificate, header http.Header, code int) error {
	config := &tls.Config{InsecureSkipVerify: true}
	// The certificate is sent even if the manager does not ask for certificates of its CA.
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: config}}
	request, err := http.NewRequest(http.MethodGet, url+"/debug/leader", nil)
	if err != nil {
		return err
	}
	request.Header = header
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != code {
		body, _ := io.ReadAll(response.Body)
		return fmt.Errorf("returned %d, want %d: %.300s", response.StatusCode, code, body)
	}
	return nil
}

// changeAuthentication changes what kube-apiserver publishes about client certificates.
func changeAuthentication(ctx context.Context, t *testing.T, change func(map[string]string)) {
	t.Helper()
	configMaps := shared.Admin.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		published, err := configMaps.Get(ctx, "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(published.Data)
		_, err = configMaps.Update(ctx, published, metav1.UpdateOptions{})
		return err
	})
	assert.NoError(t, err)
}

// TestClientCertificatesFollowTheClustersCAs checks that a CA counts exactly as long as the cluster
// publishes it. The same holds for front proxies, whose header counts only with their certificate.
func TestClientCertificatesFollowTheClustersCAs(t *testing.T) {
	ctx := fleet.Context(t)
	m := shared.RunReplica(ctx, t)
	admins := pkix.Name{CommonName: "root", Organization: []string{"system:masters"}}
	adminHeader := http.Header{"X-Remote-User": {"root"}, "X-Remote-Group": {"system:masters"}}

	config := shared.AdminConfig()
	published, err := tls.X509KeyPair(config.CertData, config.KeyData)
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error { return checkCode(m.SecureURL, published, nil, http.StatusOK) })

	for name, tc := range map[string]struct {
		key     string // in the ConfigMap
		subject pkix.Name
		header  http.Header
	}{
		"users":         {"client-ca-file", admins, nil},
		"front proxies": {"requestheader-client-ca-file", pkix.Name{CommonName: "front-proxy-client"}, adminHeader},
	} {
		t.Run(name, func(t *testing.T) {
			ca := newCA(t, "new-"+tc.key)
			cert := ca.issueClientCert(t, tc.subject)
			if err := checkCode(m.SecureURL, cert, tc.header, http.StatusUnauthorized); err != nil {
				t.Fatalf("before: %v", err)
			}
			withdraw := func(data map[string]string) { data[tc.key] = strings.Replace(data[tc.key], ca.certPEM(), "", 1) }
			t.Cleanup(func() { changeAuthentication(context.Background(), t, withdraw) })
			changeAuthentication(ctx, t, func(data map[string]string) { data[tc.key] += ca.certPEM() })
			fleet.Eventually(ctx, t, func() error { return checkCode(m.SecureURL, cert, tc.header, http.StatusOK) })
			if tc.header != nil {
				if err := checkCode(m.SecureURL, tls.Certificate{}, tc.header, http.StatusForbidden); err != nil {
					t.Errorf("the headers without the certificate: %v", err)
				}
			}
			changeAuthentication(ctx, t, withdraw)
			fleet.Eventually(ctx, t, func() error { return checkCode(m.SecureURL, cert, tc.header, http.StatusUnauthorized) })
		})
	}
	if m.ExitCode() != -1 {
		t.Errorf("the manager ended with %d", m.ExitCode())
	}
}

// TestLogLevelCanBeChanged uses refused requests, which are logged from level 4 on.
func TestLogLevelCanBeChanged(t *testing.T) {
	ctx := fleet.Context(t)
	m := shared.RunReplica(ctx, t, "--v=0")
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(m) })
	everything, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	putLevel := func(token, level string) (int, string) {
		t.Helper()
		request, err := http.NewRequestWithContext(ctx, http.MethodPut, m.SecureURL+"/debug/flags/v", strings.NewReader(level))
		assert.NoError(t, err)
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
		response, err := client.Do(request)
		assert.NoError(t, err)
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		assert.NoError(t, err)
		return response.StatusCode, string(body)
	}
	requestForbidden := func(path string) {
		t.Helper()
		assert.NoError(t, fleet.Answers(m.SecureURL+path, "", http.StatusForbidden))
	}

	if code, body := putLevel("", "4"); code != http.StatusForbidden {
		t.Errorf("without permission: %d %s", code, body)
	}
	requestForbidden("/debug/before")
	if code, body := putLevel(everything, "much"); code != http.StatusBadRequest {
		t.Errorf("a level that is none: %d %s", code, body)
	}
	if code, body := putLevel(everything, "4"); code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	requestForbidden("/debug/after")
	for line := range m.Lines(ctx) {
		if strings.Contains(line, "/debug/before") {
			t.Errorf("logged at level 0: %s", line)
		}
		if strings.Contains(line, "/debug/after") {
			return
		}
	}
	t.Error("nothing is logged at level 4")
}
