// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"net/netip"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	maxRequest = 16 << 10
	maxNames   = 32
	pemType    = "CERTIFICATE REQUEST"
)

// NodeName returns the name of the node whose kubelet has sent a request for a serving certificate. It
// returns "" if check 1 fails.
func NodeName(csr *certificatesv1.CertificateSigningRequest) string {
	node, ofNode := strings.CutPrefix(csr.Spec.Username, "system:node:")
	if !ofNode || !slices.Contains(csr.Spec.Groups, "system:nodes") || csr.Spec.SignerName != certificatesv1.KubeletServingSignerName {
		return ""
	}
	return node
}

// Decided reports whether somebody has decided on the request.
func Decided(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0
}

// Requested has the names and addresses that a certificate is asked for. Names are in lower case, and
// an IPv4 address in an IPv6 address is an IPv4 address.
type Requested struct {
	DNS []string
	IPs []netip.Addr
}

// All returns names and addresses in the form that [Canonical] returns.
func (r *Requested) All() []string {
	all := slices.Clone(r.DNS)
	for _, ip := range r.IPs {
		all = append(all, ip.String())
	}
	return all
}

// ParseRequest returns what a kubelet's request asks for, and the final checks that it fails.
func (o *Options) ParseRequest(csr *certificatesv1.CertificateSigningRequest) (asked Requested, problems []Problem) {
	fail := func(c Check, names ...string) { problems = append(problems, Problem{c, names}) }
	request := decode(csr.Spec.Request)
	switch {
	case request == nil:
		fail(CheckEncoding)
	case !isSubject(request, csr.Spec.Username):
		fail(CheckSubject)
	}
	if !areServers(csr.Spec.Usages) {
		fail(CheckUsages)
	}
	if request != nil {
		var wrong []string
		var ok bool
		if asked, wrong, ok = read(request); !ok {
			fail(CheckNames, wrong...)
		}
	}
	if seconds := csr.Spec.ExpirationSeconds; seconds != nil && time.Duration(*seconds)*time.Second > o.MaxDuration {
		fail(CheckDuration)
	}
	if reserved := asked.reserved(); len(reserved) > 0 {
		fail(CheckReserved, reserved...)
	}
	return asked, problems
}

// decode returns a request whose signature is its key's, otherwise nil.
func decode(text []byte) *x509.CertificateRequest {
	text = bytes.TrimSpace(text)
	if len(text) > maxRequest || !bytes.HasPrefix(text, []byte("-----BEGIN "+pemType+"-----")) {
		return nil
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != pemType || len(rest) > 0 {
		return nil
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || request.CheckSignature() != nil {
		return nil
	}
	return request
}

// isSubject reports whether the subject has the user as its common name, the group of nodes as its
// organisation, and nothing else. A second common name would be the first for another reader.
func isSubject(request *x509.CertificateRequest, user string) bool {
	s := &request.Subject
	return s.CommonName == user && slices.Equal(s.Organization, []string{"system:nodes"}) && len(s.Names) == 2
}

func areServers(usages []certificatesv1.KeyUsage) bool {
	return slices.Contains(usages, certificatesv1.UsageDigitalSignature) && slices.Contains(usages, certificatesv1.UsageServerAuth) &&
		!slices.ContainsFunc(usages, func(u certificatesv1.KeyUsage) bool {
			return u != certificatesv1.UsageDigitalSignature && u != certificatesv1.UsageServerAuth && u != certificatesv1.UsageKeyEncipherment
		})
}

var (
	subjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}
	keyUsage       = asn1.ObjectIdentifier{2, 5, 29, 15}
)

// read returns what the request asks for. If it must not ask for that, ok is false and wrong has the names.
func read(request *x509.CertificateRequest) (asked Requested, wrong []string, ok bool) {
	count := len(request.DNSNames) + len(request.IPAddresses)
	if count == 0 || count > maxNames {
		return asked, nil, false
	}
	ok = len(request.EmailAddresses)+len(request.URIs) == 0
	for _, extension := range request.Extensions {
		switch {
		case extension.Id.Equal(keyUsage):
		case extension.Id.Equal(subjectAltName):
			// Package x509 skips names of kinds that it does not know.
			var names []asn1.RawValue
			_, err := asn1.Unmarshal(extension.Value, &names)
			ok = ok && err == nil && len(names) == count
		default:
			ok = false
		}
	}
	for _, name := range request.DNSNames {
		asked.DNS = append(asked.DNS, strings.ToLower(name))
		if canonical, isAddress := Canonical(name); canonical == "" || isAddress {
			wrong, ok = append(wrong, name), false
		}
	}
	for _, ip := range request.IPAddresses {
		address, _ := netip.AddrFromSlice(ip) // package x509 accepts no other length
		asked.IPs = append(asked.IPs, address.Unmap())
	}
	return asked, wrong, ok
}

// reserved returns the names and addresses that mean the cluster itself, or no host in particular.
func (r *Requested) reserved() (list []string) {
	for _, name := range r.DNS {
		if strings.Contains(name, "*") || name == "localhost" || name == "kubernetes" || strings.HasPrefix(name, "kubernetes.default") ||
			strings.HasSuffix(name, ".svc") || strings.HasSuffix(name, ".cluster.local") {
			list = append(list, name)
		}
	}
	for _, ip := range r.IPs {
		if ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip.IsUnspecified() {
			list = append(list, ip.String())
		}
	}
	return list
}

// Canonical returns the one form in which names and addresses are compared, and whether text is an
// address. It returns "" for what is neither a DNS name nor an address.
func Canonical(text string) (canonical string, isAddress bool) {
	if address, err := netip.ParseAddr(text); err == nil {
		return address.Unmap().String(), true
	}
	text = strings.ToLower(text)
	if len(validation.IsDNS1123Subdomain(text)) > 0 {
		return "", false
	}
	return text, false
}
