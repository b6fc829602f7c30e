// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Connection is what a client of a cluster is made of, without the token.
type Connection struct {
	Endpoint *url.URL
	// Roots are the trusted CAs; nil for the CAs of the system.
	Roots *x509.CertPool
	// Proxy is nil for none.
	Proxy *url.URL
	// NoTLSChecks, NoNameCheck and NoTimeCheck are what disabledTLSValidations switches off.
	NoTLSChecks, NoNameCheck, NoTimeCheck bool
}

// Insecure reports whether any check of the certificate is off.
func (c Connection) Insecure() bool { return c.NoTLSChecks || c.NoNameCheck || c.NoTimeCheck }

// Connection returns what the spec says, or why no client can be made of it. With unsafe, http and
// any address are allowed.
func (s ClusterSpec) Connection(unsafe bool) (c Connection, err error) {
	if s.SecretRef.Name == "" {
		return c, errors.New("secretRef.name: must be set")
	}
	if c.Endpoint, err = parseEndpoint(s.APIEndpoint, unsafe); err != nil {
		return c, fmt.Errorf("apiEndpoint: %w", err)
	}
	if len(bytes.TrimSpace(s.CABundle)) > 0 {
		c.Roots = x509.NewCertPool()
		if !c.Roots.AppendCertsFromPEM(s.CABundle) {
			return c, errors.New("caBundle: must have a certificate")
		}
	}
	if s.ProxyURL != "" {
		if c.Proxy, err = url.Parse(s.ProxyURL); err != nil || c.Proxy.Host == "" {
			return c, errors.New("proxyURL: must be a URL") // the parser's error may have a password in it
		}
		if !slices.Contains([]string{"http", "https", "socks5"}, c.Proxy.Scheme) {
			return c, errors.New("proxyURL: the scheme must be http, https or socks5")
		}
		if err := checkHost(c.Proxy, unsafe); err != nil {
			return c, fmt.Errorf("proxyURL: %w", err)
		}
	}
	for _, name := range s.DisabledTLSValidations {
		switch {
		case name == "*" && len(s.DisabledTLSValidations) == 1:
			c.NoTLSChecks = true
		case name == "SubjectName":
			c.NoNameCheck = true
		case name == "ValidityPeriod":
			c.NoTimeCheck = true
		default:
			return c, errors.New("disabledTLSValidations: must be SubjectName and ValidityPeriod, or * alone")
		}
	}
	return c, nil
}

func parseEndpoint(s string, unsafe bool) (*url.URL, error) {
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Hostname() == "":
		return nil, errors.New("must be a URL with a host")
	case u.Scheme != "https" && (u.Scheme != "http" || !unsafe):
		return nil, errors.New("the scheme must be https")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("must have no more than a scheme, a host, a port and a path")
	}
	return u, checkHost(u, unsafe)
}

// checkHost checks a host that is an address. A host name is checked when it is dialled, by its address.
func checkHost(u *url.URL, unsafe bool) error {
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil {
		return CheckAddress(ip, unsafe)
	}
	return nil
}

// CheckAddress returns an error if an address must not be dialled: the authors of KubeFedClusters could reach
// what only the manager's host or Node may reach.
func CheckAddress(ip netip.Addr, unsafe bool) error {
	ip = ip.Unmap()
	if !unsafe && (ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsLinkLocalMulticast() || ip.IsUnspecified()) {
		return errors.New("the address is loopback, link-local or unspecified")
	}
	return nil
}

// Verify checks the certificates that a server sent, leaf first, as far as checks are on.
func (c Connection) Verify(chain []*x509.Certificate, name string, now time.Time) error {
	if c.NoTLSChecks {
		return nil
	}
	if len(chain) == 0 {
		return errors.New("the server sent no certificate")
	}
	options := x509.VerifyOptions{Roots: c.Roots, CurrentTime: now, DNSName: name, Intermediates: x509.NewCertPool()}
	if c.NoNameCheck {
		options.DNSName = ""
	}
	if c.NoTimeCheck {
		options.CurrentTime = chain[0].NotBefore.Add(time.Second)
	}
	for _, intermediate := range chain[1:] {
		options.Intermediates.AddCert(intermediate)
	}
	_, err := chain[0].Verify(options)
	return err
}

// maxToken limits a token, in bytes: each request sends it in a header.
const maxToken = 16 << 10

// ParseToken returns the bearer token of a Secret. The error does not repeat it.
func ParseToken(secret map[string][]byte) (string, error) {
	token := bytes.TrimSpace(secret["token"])
	switch {
	case len(token) == 0:
		return "", errors.New("the Secret has no token")
	case len(token) > maxToken:
		return "", errors.New("the token has over 16 KiB")
	case bytes.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", errors.New("the token has characters that no header can hold")
	}
	return string(token), nil
}
