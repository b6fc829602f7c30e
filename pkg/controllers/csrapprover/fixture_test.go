// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover"
)

var kubeletKey = func() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
}()

// request returns the request of a node's kubelet for names and addresses.
func request(name, node string, names ...string) *certificatesv1.CertificateSigningRequest {
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, kubeletKey)
	if err != nil {
		panic(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Username:   "system:node:" + node, Groups: []string{"system:nodes", "system:authenticated"},
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}
}

// withCondition returns the request with a condition.
func withCondition(r *certificatesv1.CertificateSigningRequest, condition certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
	r = r.DeepCopy()
	r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: condition, Status: corev1.ConditionTrue, Reason: "Other"})
	return r
}

// node returns a Node with its name as its host name.
func node(name string, addresses ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// fixture is a cluster with the Node n1 at 10.0.0.1 and an API server at 10.0.0.250 and 10.96.0.1, and a
// manager in a bubble of fake time.
type fixture struct {
	*testing.T
	*controllertest.Host
	comparedEvents int // how many Events expect has compared

	mu    sync.Mutex
	reads []string
}

func newFixture(t *testing.T, flags []string, objects ...runtime.Object) *fixture {
	t.Helper()
	t.Setenv("POD_NAME", "manager-0")
	f := &fixture{T: t}
	objects = append([]runtime.Object{
		node("n1", "10.0.0.1"),
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}}},
		endpoints("10.0.0.250"),
	}, objects...)
	f.Host = controllertest.Setup{
		Entries: []controllers.Entry{csrapprover.Entry()}, Flags: append([]string{"--csr-approver-ip-ranges=10.0.0.0/24"}, flags...),
		Prepare: func(h *controllertest.Host) { h.OnRead(f.recordRead) },
	}.NewHost(t, objects...)
	return f
}

// recordRead notes the reads of the controller.
func (f *fixture) recordRead(r controllertest.Request) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads = append(f.reads, r.String())
	return nil
}

func (f *fixture) put(objects ...runtime.Object) {
	f.Helper()
	f.Put(objects...)
	f.Settle()
}

// expect compares the writes since the last call, and the new Events: words that each contains.
func (f *fixture) expect(writes []string, events ...string) {
	f.Helper()
	assert.Equal(f, "writes", writes, f.Writes())
	all := f.Events()
	fresh := all[min(f.comparedEvents, len(all)):]
	f.comparedEvents = len(all)
	if len(fresh) != len(events) {
		f.Errorf("Events %q, want %q", fresh, events)
		return
	}
	for i, words := range events {
		for word := range strings.SplitSeq(words, "|") {
			if !strings.Contains(fresh[i], word) {
				f.Errorf("Event %q has no %q", fresh[i], word)
			}
		}
	}
}

// approvalWrites is the write for each of the requests.
func approvalWrites(names ...string) (writes []string) {
	for _, name := range names {
		writes = append(writes, "update certificatesigningrequests.certificates.k8s.io/approval "+name)
	}
	return writes
}

// conditions returns the types and reasons of a request's conditions.
func (f *fixture) conditions(name string) string {
	f.Helper()
	var all []string
	for _, c := range controllertest.Get[certificatesv1.CertificateSigningRequest](f.Host, "", name).Status.Conditions {
		all = append(all, string(c.Type)+" "+c.Reason)
	}
	return strings.Join(all, ", ")
}

// countApproved returns how many requests are approved.
func (f *fixture) countApproved() (n int) {
	f.Helper()
	for _, r := range controllertest.List[certificatesv1.CertificateSigningRequest](f.Host) {
		n += len(r.Status.Conditions)
	}
	return n
}

func (f *fixture) expectMetric(want float64, name string, labels ...string) {
	f.Helper()
	if got := f.Metric("quartermaster_csr_approver_"+name, labels...); got != want {
		f.Errorf("%s %v is %v, want %v", name, labels, got, want)
	}
}

// takeReads returns the reads since the last call, sorted, without those of the cache.
func (f *fixture) takeReads() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	reads := slices.Sorted(slices.Values(f.reads))
	f.reads = nil
	return reads
}

func numberedObjects(format string, n int, newObject func(name string) runtime.Object) (objects []runtime.Object) {
	for i := range n {
		objects = append(objects, newObject(fmt.Sprintf(format, i)))
	}
	return objects
}

// endpoints returns the EndpointSlice of the API server.
func endpoints(addresses ...string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: addresses}},
	}
}
