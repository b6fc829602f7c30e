// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

var key = func() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
}()

// fixture is what a row changes: a request of the kubelet of node n1, and the cluster.
type fixture struct {
	template   x509.CertificateRequest
	key        crypto.Signer
	encode     func(der []byte) []byte
	csr        certificatesv1.CertificateSigningRequest
	options    Options
	node       corev1.Node
	otherNodes []corev1.Node
	apiServer  []string // the API server's
}

func newFixture() *fixture {
	f := &fixture{
		key:    key,
		encode: toPEM,
		template: x509.CertificateRequest{
			Subject:  pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}},
			DNSNames: []string{"n1"}, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)},
		},
		options:   Options{IPRanges: []string{"10.0.0.0/24"}, DNSRegex: "{node}", MaxDuration: LongestDuration},
		node:      nodeWith("n1", "n1", "10.0.0.1"),
		apiServer: []string{"10.96.0.1", "10.0.0.250"},
	}
	f.csr.Spec = certificatesv1.CertificateSigningRequestSpec{
		SignerName: certificatesv1.KubeletServingSignerName, Username: "system:node:n1", Groups: []string{"system:nodes", "system:authenticated"},
		Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
	}
	return f
}

func toPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der})
}

// nodeWith returns a Node with a host name and internal addresses.
func nodeWith(name, host string, addresses ...string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: host}}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// failedChecks returns the checks that fail, such as "9 11", or "" for an approval.
func (f *fixture) failedChecks(t *testing.T) string {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &f.template, f.key)
	assert.NoError(t, err)
	f.csr.Spec.Request = f.encode(der)
	if NodeName(&f.csr) == "" {
		return "1"
	}
	requested, problems := f.options.ParseRequest(&f.csr)
	if len(problems) == 0 {
		problems = f.options.Judge(&requested, &f.node, func(name string) bool {
			return slices.ContainsFunc(f.otherNodes, func(other corev1.Node) bool {
				return other.Name == name || slices.Contains(NodeNames(&other), name)
			})
		})
		if !IsControlPlane(&f.node) {
			apiServer := map[string]bool{}
			for _, a := range f.apiServer {
				name, _ := Canonical(a)
				apiServer[name] = true
			}
			problems = append(problems, JudgeAPIServer(&requested, apiServer)...)
		}
	}
	var checks []string
	for _, p := range problems {
		checks = append(checks, fmt.Sprint(int(p.Check)))
		if text := p.String(); len(text) > 400 || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("text %q", text)
		}
	}
	return strings.Join(checks, " ")
}

func withExtensions(extensions ...pkix.Extension) func(*fixture) {
	return func(f *fixture) { f.template.ExtraExtensions = extensions }
}

// generalNames returns an extension with general names, each with the tag of its kind.
func generalNames(kinds ...byte) pkix.Extension {
	var all []asn1.RawValue
	for _, kind := range kinds {
		value := map[byte][]byte{2: []byte("n1"), 7: {10, 0, 0, 1}}[kind]
		all = append(all, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: int(kind), Bytes: value})
	}
	der, err := asn1.Marshal(all)
	if err != nil {
		panic(err)
	}
	return pkix.Extension{Id: subjectAltName, Value: der}
}

func requests(dns []string, ips ...string) func(*fixture) {
	return func(f *fixture) {
		f.template.DNSNames, f.template.IPAddresses = dns, nil
		for _, ip := range ips {
			f.template.IPAddresses = append(f.template.IPAddresses, net.ParseIP(ip))
		}
	}
}

func usages(list ...certificatesv1.KeyUsage) func(*fixture) {
	return func(f *fixture) { f.csr.Spec.Usages = list }
}

func seconds(s int32) func(*fixture) {
	return func(f *fixture) { f.csr.Spec.ExpirationSeconds = &s }
}

func nodeAddresses(list ...corev1.NodeAddress) func(*fixture) {
	return func(f *fixture) { f.node.Status.Addresses = list }
}

func allOf(changes ...func(*fixture)) func(*fixture) {
	return func(f *fixture) {
		for _, change := range changes {
			change(f)
		}
	}
}

func manyIPs(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("10.0.0.%d", i+1))
	}
	return list
}

// TestEachCheckFailsWhatItForbids has requests, also of a node that was broken into, and the checks that they
// fail.
func TestEachCheckFailsWhatItForbids(t *testing.T) {
	inControlPlane := func(f *fixture) { f.node.Labels = map[string]string{controlPlane: ""} }
	for name, tc := range map[string]struct {
		change func(*fixture)
		failed string
	}{
		"a DNS name and an address of the Node pass":            {},
		"an address alone passes":                               {requests(nil, "10.0.0.1"), ""},
		"a DNS name alone passes":                               {requests([]string{"n1"}), ""},
		"another signer fails check 1":                          {func(f *fixture) { f.csr.Spec.SignerName = "kubernetes.io/kube-apiserver-client" }, "1"},
		"a ServiceAccount fails check 1":                        {func(f *fixture) { f.csr.Spec.Username = "system:serviceaccount:a:b" }, "1"},
		"a node without the group system:nodes fails check 1":   {func(f *fixture) { f.csr.Spec.Groups = []string{"system:authenticated"} }, "1"},
		"a user that only begins like a node":                   {func(f *fixture) { f.csr.Spec.Username = "system:node:" }, "1"},
		"another node's common name fails check 3":              {func(f *fixture) { f.template.Subject.CommonName = "system:node:n2" }, "3"},
		"a second organisation fails check 3":                   {func(f *fixture) { f.template.Subject.Organization = []string{"system:nodes", "system:masters"} }, "3"},
		"a subject without an organisation fails check 3":       {func(f *fixture) { f.template.Subject.Organization = nil }, "3"},
		"an organisational unit fails check 3":                  {func(f *fixture) { f.template.Subject.OrganizationalUnit = []string{"x"} }, "3"},
		"a second common name fails check 3":                    {secondCommonName, "3"},
		"the usage client auth fails check 4":                   {usages("client auth"), "4"},
		"client auth beside server auth fails check 4":          {usages("digital signature", "server auth", "client auth"), "4"},
		"digital signature alone fails check 4":                 {usages("digital signature"), "4"},
		"a request without usages fails check 4":                {usages(), "4"},
		"key encipherment beside server auth passes":            {usages("key encipherment", "server auth", "digital signature"), ""},
		"an e-mail address fails check 5":                       {func(f *fixture) { f.template.EmailAddresses = []string{"a@example.com"} }, "5"},
		"a URI fails check 5":                                   {func(f *fixture) { f.template.URIs = []*url.URL{{Scheme: "spiffe", Host: "a"}} }, "5"},
		"a request without names and addresses fails check 5":   {requests(nil), "5"},
		"33 addresses fail check 5":                             {requests(nil, manyIPs(33)...), "5"},
		"32 addresses pass":                                     {allOf(requests(nil, manyIPs(32)...), func(f *fixture) { f.node = nodeWith("n1", "n1", manyIPs(32)...) }), ""},
		"a CA certificate fails check 5":                        {withExtensions(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Value: []byte{0x30, 3, 1, 1, 0xff}}), "5"},
		"the extension key usage passes":                        {withExtensions(pkix.Extension{Id: keyUsage, Value: []byte{3, 2, 5, 0xa0}}), ""},
		"a name of a kind that Go skips fails check 5":          {withExtensions(generalNames(2, 7, 8)), "5"},
		"the encoded names pass without the kind that Go skips": {withExtensions(generalNames(2, 7)), ""},
		"an address as a DNS name fails check 5":                {requests([]string{"10.0.0.1"}), "5"},
		"a DNS name with a zero byte fails check 5":             {requests([]string{"n1\x00.evil.example"}), "5"},
		"a DNS name with a blank fails check 5":                 {requests([]string{"n1 "}), "5"},
		"a DNS name with a dot at its end fails check 5":        {requests([]string{"n1."}), "5"},
		"an empty DNS name fails check 5":                       {requests([]string{""}), "5"},
		"a DNS name of 300 bytes fails check 5":                 {requests([]string{strings.Repeat("a.", 149) + "aa"}), "5"},
		"a request that is not PEM fails check 2":               {func(f *fixture) { f.encode = func(der []byte) []byte { return der } }, "2"},
		"an empty request fails check 2":                        {func(f *fixture) { f.encode = func([]byte) []byte { return nil } }, "2"},
		"two PEM blocks fail check 2":                           {func(f *fixture) { f.encode = func(der []byte) []byte { return bytes.Repeat(toPEM(der), 2) } }, "2"},
		"text before the PEM block fails check 2":               {func(f *fixture) { f.encode = func(der []byte) []byte { return append([]byte("x\n"), toPEM(der)...) } }, "2"},
		"blank lines around the PEM block pass": {func(f *fixture) {
			f.encode = func(der []byte) []byte { return []byte("\n" + string(toPEM(der)) + "\n\n") }
		}, ""},
		"a PEM block of another type fails check 2":                                                 {func(f *fixture) { f.encode = asCertificate }, "2"},
		"a broken signature fails check 2":                                                          {func(f *fixture) { f.encode = func(der []byte) []byte { der[len(der)-1] ^= 1; return toPEM(der) } }, "2"},
		"a name that was changed after signing fails check 2":                                       {func(f *fixture) { f.encode = renameNode }, "2"},
		"a request of 17 KiB fails check 2":                                                         {func(f *fixture) { f.template.Subject.Locality = []string{strings.Repeat("x", 12500)} }, "2"},
		"a DNS name that only begins with the node's name fails checks 9 and 10":                    {requests([]string{"n1.evil.example"}), "9 10"},
		"a DNS name that only begins with the node's name fails check 10 even if the Node lists it": {allOf(requests([]string{"n1.evil.example"}), func(f *fixture) { f.node = nodeWith("n1", "n1.evil.example") }), "10"},
		"the name of another node with the same prefix fails checks 9 and 10":                       {requests([]string{"n10"}), "9 10"},
		"a DNS name in upper case passes":                                                           {requests([]string{"N1"}), ""},
		"a Node that lists its name in upper case passes":                                           {func(f *fixture) { f.node = nodeWith("n1", "N1", "10.0.0.1") }, ""},
		"an address that the Node does not list fails check 9":                                      {requests(nil, "10.0.0.2"), "9"},
		"an address that the Node lists passes":                                                     {allOf(requests(nil, "10.0.0.2"), func(f *fixture) { f.node = nodeWith("n1", "n1", "10.0.0.2") }), ""},
		"an IPv4 address in the form of IPv6 passes":                                                {withMapped, ""},
		"an address that the Node lists as its host name fails check 9":                             {nodeAddresses(corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"}, corev1.NodeAddress{Type: corev1.NodeHostName, Address: "10.0.0.1"}), "9"},
		"a DNS name that the Node lists as an address fails check 9":                                {nodeAddresses(corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "n1"}, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}), "9"},
		"external and internal names and addresses of the Node pass": {allOf(requests([]string{"n1", "n1.example.com"}, "10.0.0.1", "10.0.0.2"), func(f *fixture) { f.options.DNSRegex = `{node}(\.example\.com)?` },
			nodeAddresses(corev1.NodeAddress{Type: corev1.NodeInternalDNS, Address: "n1"}, corev1.NodeAddress{Type: corev1.NodeExternalDNS, Address: "n1.example.com"},
				corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "10.0.0.2"})), ""},
		"the 65th address of the Node fails check 9":      {allOf(requests(nil, "10.0.0.65"), func(f *fixture) { f.node = nodeWith("n1", "n1", manyIPs(65)...) }), "9"},
		"an address outside of the ranges fails check 10": {allOf(requests(nil, "10.9.0.1"), func(f *fixture) { f.node = nodeWith("n1", "n1", "10.9.0.1") }), "10"},
		"ranges of all addresses let every address of the Node pass": {allOf(requests(nil, "10.9.0.1"), func(f *fixture) {
			f.node, f.options.IPRanges = nodeWith("n1", "n1", "10.9.0.1"), []string{"0.0.0.0/0", "::/0"}
		}), ""},
		"an expression that matches a part of the name fails check 10":             {func(f *fixture) { f.options.DNSRegex = "n" }, "10"},
		"an expression that matches the end of the name fails check 10":            {func(f *fixture) { f.options.DNSRegex = "1" }, "10"},
		"an expression whose alternatives match a part of the name fails check 10": {func(f *fixture) { f.options.DNSRegex = "x|n" }, "10"},
		"a dot in the node's name matches a dot only": {allOf(requests([]string{"nx1"}), func(f *fixture) {
			f.csr.Spec.Username, f.template.Subject.CommonName, f.node = "system:node:n.1", "system:node:n.1", nodeWith("n.1", "nx1")
		}), "10"},
		"an address that another Node lists fails check 11":                     {func(f *fixture) { f.otherNodes = []corev1.Node{nodeWith("n2", "n2", "10.0.0.1")} }, "11"},
		"an address that is another Node's host name fails check 11":            {func(f *fixture) { f.otherNodes = []corev1.Node{nodeWith("n2", "10.0.0.1")} }, "11"},
		"an address that another Node lists in the form of IPv6 fails check 11": {func(f *fixture) { f.otherNodes = []corev1.Node{nodeWith("n2", "n2", "::ffff:10.0.0.1")} }, "11"},
		"a DNS name that is another Node's name fails check 11": {allOf(requests([]string{"n2"}), func(f *fixture) {
			f.node, f.options.DNSRegex, f.otherNodes = nodeWith("n1", "n2"), ".*", []corev1.Node{nodeWith("n2", "host2")}
		}), "11"},
		"another Node with other addresses does not matter":    {func(f *fixture) { f.otherNodes = []corev1.Node{nodeWith("n2", "n2", "10.0.0.2")} }, ""},
		"kubernetes.default.svc fails check 7":                 {allOf(requests([]string{"kubernetes.default.svc"}), func(f *fixture) { f.node, f.options.DNSRegex = nodeWith("n1", "kubernetes.default.svc"), ".*" }), "7"},
		"kubernetes fails check 7 in upper case too":           {requests([]string{"Kubernetes"}), "7"},
		"kubernetes.default with another domain fails check 7": {requests([]string{"kubernetes.default.example"}), "7"},
		"the name of a Service fails check 7":                  {requests([]string{"registry.kube-system.svc"}), "7"},
		"the long name of a Service fails check 7":             {requests([]string{"a.b.svc.Cluster.Local"}), "7"},
		"localhost fails check 7":                              {requests([]string{"localhost"}), "7"},
		"a wildcard fails checks 5 and 7":                      {requests([]string{"*.n1"}), "5 7"},
		"127.0.0.1 fails check 7":                              {requests(nil, "127.0.0.1"), "7"},
		"127.0.0.1 in the form of IPv6 fails check 7":          {func(f *fixture) { f.template.IPAddresses = []net.IP{net.ParseIP("::ffff:127.0.0.1").To16()} }, "7"},
		"the loopback address of IPv6 fails check 7":           {requests(nil, "::1"), "7"},
		"a link-local address fails check 7":                   {requests(nil, "169.254.169.254"), "7"},
		"a multicast address fails check 7":                    {requests(nil, "224.0.0.1", "ff02::1"), "7"},
		"the unspecified address fails check 7":                {requests(nil, "0.0.0.0", "::"), "7"},
		"an endpoint of the API server fails check 12":         {allOf(requests(nil, "10.0.0.250"), func(f *fixture) { f.node = nodeWith("n1", "n1", "10.0.0.250") }), "12"},
		"the cluster IP of the API server fails check 12": {allOf(requests(nil, "10.96.0.1"), func(f *fixture) {
			f.node, f.options.IPRanges = nodeWith("n1", "n1", "10.96.0.1"), []string{"10.0.0.0/8"}
		}), "12"},
		"an endpoint of the API server passes for a control plane node": {allOf(requests(nil, "10.0.0.250"), func(f *fixture) { f.node = nodeWith("n1", "n1", "10.0.0.250"); inControlPlane(f) }), ""},
		"a Node that is being deleted fails check 8":                    {func(f *fixture) { f.node.DeletionTimestamp = &metav1.Time{} }, "8"},
		"a certificate for 600 s passes":                                {seconds(600), ""},
		"a certificate for 366 days passes":                             {seconds(366 * 86400), ""},
		"a certificate for 368 days fails check 6":                      {seconds(368 * 86400), "6"},
		"the longest possible duration fails check 6":                   {seconds(1<<31 - 1), "6"},
		"a duration above --csr-approver-max-duration fails check 6":    {allOf(seconds(7200), func(f *fixture) { f.options.MaxDuration = time.Hour }), "6"},
		"a key of RSA":                                 {func(f *fixture) { f.key = rsaKey() }, ""},
		"a key on P-256":                               {func(f *fixture) { f.key = ecdsaKey() }, ""},
		"everything is wrong":                          {allOf(usages("client auth"), seconds(1<<30), requests([]string{"*"}), func(f *fixture) { f.template.Subject.CommonName = "x" }), "3 4 5 6 7"},
		"the Node has thousands of addresses":          {func(f *fixture) { f.node = nodeWith("n1", "n1", slices.Repeat([]string{"10.0.0.1"}, 10_000)...) }, ""},
		"the Node has addresses that are no addresses": {nodeAddresses(corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: strings.Repeat("x", 1<<20)}, corev1.NodeAddress{Type: corev1.NodeInternalIP}), "9"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture()
			if tc.change != nil {
				tc.change(f)
			}
			if got := f.failedChecks(t); got != tc.failed {
				t.Errorf("checks %q fail, want %q", got, tc.failed)
			}
		})
	}
}

func asCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func renameNode(der []byte) []byte {
	return toPEM(bytes.ReplaceAll(der, []byte("\x82\x02n1"), []byte("\x82\x02n2")))
}

// secondCommonName puts a common name first that x509 does not show.
func secondCommonName(f *fixture) {
	commonName := asn1.ObjectIdentifier{2, 5, 4, 3}
	subject, err := asn1.Marshal(pkix.RDNSequence{
		{{Type: commonName, Value: "auth.example.com"}}, {{Type: asn1.ObjectIdentifier{2, 5, 4, 10}, Value: "system:nodes"}}, {{Type: commonName, Value: "system:node:n1"}},
	})
	if err != nil {
		panic(err)
	}
	f.template.RawSubject = subject
}

// withMapped asks for 10.0.0.1 in the 16 bytes of ::ffff:10.0.0.1.
func withMapped(f *fixture) {
	der, err := asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 7, Bytes: net.ParseIP("10.0.0.1").To16()}})
	if err != nil {
		panic(err)
	}
	f.template.ExtraExtensions = []pkix.Extension{{Id: subjectAltName, Value: der}}
}

func rsaKey() crypto.Signer {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return key
}

func ecdsaKey() crypto.Signer {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
}

func TestDecidedRequestsAreRecognised(t *testing.T) {
	for name, tc := range map[string]struct {
		status certificatesv1.CertificateSigningRequestStatus
		want   bool
	}{
		"nobody has decided":         {},
		"approved":                   {withCondition(certificatesv1.CertificateApproved), true},
		"denied":                     {withCondition(certificatesv1.CertificateDenied), true},
		"failed":                     {withCondition(certificatesv1.CertificateFailed), true},
		"signed without a condition": {certificatesv1.CertificateSigningRequestStatus{Certificate: []byte("x")}, true},
	} {
		if got := Decided(&certificatesv1.CertificateSigningRequest{Status: tc.status}); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func withCondition(condition certificatesv1.RequestConditionType) certificatesv1.CertificateSigningRequestStatus {
	return certificatesv1.CertificateSigningRequestStatus{Conditions: []certificatesv1.CertificateSigningRequestCondition{{Type: condition}}}
}

func TestTextsNameWhatFailed(t *testing.T) {
	for want, problem := range map[string]Problem{
		`check 9: not among the addresses of the Node "10.0.0.2"`:                                      {CheckNodeAddresses, []string{"10.0.0.2"}},
		`check 9: not among the addresses of the Node "a" "b" "c" and 2 more`:                          {CheckNodeAddresses, []string{"a", "b", "c", "d", "e"}},
		`check 8: the Node does not exist, or is being deleted`:                                        {Check: CheckNodeExists},
		`check 7: no node may have such a name or address "` + strings.Repeat("x", 60) + `"`:           {CheckReserved, []string{strings.Repeat("x", 100)}},
		`check 5: it must ask for 1 to 32 DNS names and IP addresses, and for nothing else "\u00e4\n"`: {CheckNames, []string{"ä\n"}},
	} {
		if got := problem.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for check := CheckEncoding; check <= CheckRate; check++ {
		if checkTexts[check] == "" {
			t.Errorf("check %d has no text", check)
		}
	}
}

func TestWrongOptionsNameTheirFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Options)
		flags  []string
	}{
		"the defaults":                                    {func(*Options) {}, nil},
		"every range":                                     {func(o *Options) { o.IPRanges = []string{"0.0.0.0/0", "::/0"} }, nil},
		"an address in place of a range":                  {func(o *Options) { o.IPRanges = []string{"10.0.0.1"} }, []string{"ip-ranges"}},
		"two ranges that are none":                        {func(o *Options) { o.IPRanges = []string{"x", "10.0.0.0/33", "10.0.0.0/8"} }, []string{"ip-ranges", "ip-ranges"}},
		"a range of IPv4 in the form of IPv6":             {func(o *Options) { o.IPRanges = []string{"::ffff:10.0.0.0/104"} }, []string{"ip-ranges"}},
		"a broken expression":                             {func(o *Options) { o.DNSRegex = "(" }, []string{"dns-regex"}},
		"an expression that closes the anchors' group":    {func(o *Options) { o.DNSRegex = "a)|(?:b" }, []string{"dns-regex"}},
		"an expression that is too large with long names": {func(o *Options) { o.DNSRegex = "((({node}){100}){100}){100}" }, []string{"dns-regex"}},
		"no expression":                                   {func(o *Options) { o.DNSRegex = "" }, []string{"dns-regex"}},
		"a year and three days":                           {func(o *Options) { o.MaxDuration = 368 * 24 * time.Hour }, []string{"max-duration"}},
		"a minute":                                        {func(o *Options) { o.MaxDuration = time.Minute }, []string{"max-duration"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newFixture().options
			tc.change(&o)
			var flags []string
			o.Validate(func(flag, _ string, _ ...any) { flags = append(flags, flag) })
			assert.Equal(t, "flags", tc.flags, flags)
		})
	}
}

// FuzzRequest reads arbitrary requests. What passes must be what check 5 promises.
func FuzzRequest(f *testing.F) {
	fixture := newFixture()
	der, err := x509.CreateCertificateRequest(rand.Reader, &fixture.template, key)
	assert.NoError(f, err)
	f.Add(toPEM(der), false)
	f.Add(der, true)
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----"), false)
	f.Fuzz(func(t *testing.T, text []byte, isDER bool) {
		if isDER {
			text = toPEM(text)
		}
		csr := fixture.csr
		csr.Spec.Request, csr.Spec.ExpirationSeconds = text, ptr.To[int32](600)
		requested, problems := fixture.options.ParseRequest(&csr)
		// Few inputs have a valid signature, so what comes after it is read as well.
		if block, _ := pem.Decode(text); block != nil {
			if request, err := x509.ParseCertificateRequest(block.Bytes); err == nil {
				readNames(request)
			}
		}
		all := requested.All()
		if len(problems) == 0 && (len(all) == 0 || len(all) > maxNames) {
			t.Errorf("%d names pass", len(all))
		}
		for _, name := range all {
			if canonical, _ := Canonical(name); len(problems) == 0 && canonical != name {
				t.Errorf("%q passes", name)
			}
		}
		if len(problems) == 0 {
			fixture.options.Judge(&requested, &fixture.node, func(string) bool { return false })
		}
	})
}
