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
	// maxRequest limits the PEM text of a request, in bytes, maxNames the names and addresses in a request.
	maxRequest = 16 << 10
	maxNames   = 32
	pemType    = "CERTIFICATE REQUEST"
)

// NodeName returns the name of the node whose kubelet has sent a request for a serving certificate. It
// returns "" if check 1 fails.
func NodeName(csr *certificatesv1.CertificateSigningRequest) string {
	node, isNode := strings.CutPrefix(csr.Spec.Username, "system:node:")
	if !isNode || !slices.Contains(csr.Spec.Groups, "system:nodes") || csr.Spec.SignerName != certificatesv1.KubeletServingSignerName {
		return ""
	}
	return node
}

// Decided reports whether somebody has decided on the request.
func Decided(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0
}

// CertificateNames has the names and addresses that a certificate is asked for. Names are in lower case, and
// an IPv4 address in an IPv6 address is an IPv4 address.
type CertificateNames struct {
	DNS []string
	IPs []netip.Addr
}

// All returns names and addresses in the form that [Canonical] returns.
func (n *CertificateNames) All() []string {
	all := slices.Clone(n.DNS)
	for _, ip := range n.IPs {
		all = append(all, ip.String())
	}
	return all
}

// ParseRequest returns what a kubelet's request asks for, and the final checks that it fails.
func (o *Options) ParseRequest(csr *certificatesv1.CertificateSigningRequest) (requested CertificateNames, problems []Problem) {
	addProblem := func(c Check, names ...string) { problems = append(problems, Problem{c, names}) }
	request := decodePEM(csr.Spec.Request)
	switch {
	case request == nil:
		addProblem(CheckEncoding)
	case !isSubject(request, csr.Spec.Username):
		addProblem(CheckSubject)
	}
	if !areServerUsages(csr.Spec.Usages) {
		addProblem(CheckUsages)
	}
	if request != nil {
		var wrong []string
		var ok bool
		if requested, wrong, ok = readNames(request); !ok {
			addProblem(CheckNames, wrong...)
		}
	}
	if seconds := csr.Spec.ExpirationSeconds; seconds != nil && time.Duration(*seconds)*time.Second > o.MaxDuration {
		addProblem(CheckDuration)
	}
	if reserved := requested.reservedNames(); len(reserved) > 0 {
		addProblem(CheckReserved, reserved...)
	}
	return requested, problems
}

// decodePEM returns a request whose signature is its key's, otherwise nil.
func decodePEM(text []byte) *x509.CertificateRequest {
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
// organisation, and nothing else. A second common name is forbidden: another parser may take it for the only
// one.
func isSubject(request *x509.CertificateRequest, user string) bool {
	s := &request.Subject
	return s.CommonName == user && slices.Equal(s.Organization, []string{"system:nodes"}) && len(s.Names) == 2
}

func areServerUsages(usages []certificatesv1.KeyUsage) bool {
	return slices.Contains(usages, certificatesv1.UsageDigitalSignature) && slices.Contains(usages, certificatesv1.UsageServerAuth) &&
		!slices.ContainsFunc(usages, func(u certificatesv1.KeyUsage) bool {
			return u != certificatesv1.UsageDigitalSignature && u != certificatesv1.UsageServerAuth && u != certificatesv1.UsageKeyEncipherment
		})
}

var (
	subjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}
	keyUsage       = asn1.ObjectIdentifier{2, 5, 29, 15}
)

// readNames returns what the request asks for. If some of the names are forbidden, ok is false and wrong has
// them.
func readNames(request *x509.CertificateRequest) (requested CertificateNames, wrong []string, ok bool) {
	count := len(request.DNSNames) + len(request.IPAddresses)
	if count == 0 || count > maxNames {
		return requested, nil, false
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
		requested.DNS = append(requested.DNS, strings.ToLower(name))
		if canonical, isAddress := Canonical(name); canonical == "" || isAddress {
			wrong, ok = append(wrong, name), false
		}
	}
	for _, ip := range request.IPAddresses {
		address, _ := netip.AddrFromSlice(ip) // package x509 accepts no other length
		requested.IPs = append(requested.IPs, address.Unmap())
	}
	return requested, wrong, ok
}

// reservedNames returns the names and addresses that mean the cluster itself, or no host in particular.
func (n *CertificateNames) reservedNames() (list []string) {
	for _, name := range n.DNS {
		if strings.Contains(name, "*") || name == "localhost" || name == "kubernetes" || strings.HasPrefix(name, "kubernetes.default") ||
			strings.HasSuffix(name, ".svc") || strings.HasSuffix(name, ".cluster.local") {
			list = append(list, name)
		}
	}
	for _, ip := range n.IPs {
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
