// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

func TestTheContentClientFollowsACertificateAuthorityThatChangesOnDisk(t *testing.T) {
	server := httptest.NewTLSServer(&apiServer{secrets: newCluster(named("a", "1"))})
	defer server.Close()
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	file := filepath.Join(t.TempDir(), "ca.crt")
	write := func(certificate []byte) {
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAFile: file, ServerName: "wrong.test"}}
	write(server.Certificate().Raw)
	get := func(c Clients) error {
		return c.Content.Get().Resource("secrets").Do(t.Context()).Error()
	}
	if get(clientsOf(t, config)) == nil {
		t.Error("a certificate of another name was accepted")
	}
	config.ServerName = "example.com"
	write(selfSigned(t))
	clients := clientsOf(t, config)
	if get(clients) == nil {
		t.Error("a certificate of an unknown authority was accepted")
	}
	write(server.Certificate().Raw)
	if err := get(clients); err != nil {
		t.Errorf("the new authority is not known: %v", err)
	}
	server.CloseClientConnections()
}

func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestAConfigWithATransportKeepsIt(t *testing.T) {
	api := &apiServer{secrets: newCluster(named("a", "1"))}
	server := httptest.NewServer(api)
	defer server.Close()
	var seen []string
	transport := &http.Transport{DisableKeepAlives: true}
	config := &rest.Config{Host: server.URL, Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		seen = append(seen, r.URL.Path)
		return transport.RoundTrip(r)
	})}
	if err := clientsOf(t, config).Content.Get().Resource("secrets").Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(seen, []string{"/api/v1/secrets"}) {
		t.Errorf("requests through the given transport: %v", seen)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
