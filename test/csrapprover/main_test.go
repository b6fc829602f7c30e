// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package csrapprover tests the controller csr-approver in managers as processes on a real control plane, in
// which kube-controller-manager signs. Requests are sent as the users of kubelets. The audit log shows who
// approved what.
package csrapprover

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// All tests of the package share a control plane.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Components: []string{"csr-approver"}}, permitKubelets))
}

// permitKubelets lets kubelets send requests, as every cluster does.
func permitKubelets(ctx context.Context) error {
	_, err := shared.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubelets"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-bootstrapper"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
	}, metav1.CreateOptions{})
	return err
}

// rangesFlag are the addresses that the tests' nodes may have. The cluster IP of the API server is among
// them.
const rangesFlag = "--csr-approver-ip-ranges=10.0.0.0/8"

func args(flags ...string) []string {
	return append([]string{"--controllers=-config-reload", rangesFlag, "--insecure-metrics"}, flags...)
}

var key = func() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
}()

var fixtures atomic.Int32 // so far

// fixture is a group of nodes.
type fixture struct {
	*testing.T
	ctx   context.Context
	id    string
	begin time.Time
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return &fixture{T: t, ctx: fleet.Context(t), id: fmt.Sprintf("g%d", fixtures.Add(1)), begin: time.Now()}
}

// createNode creates a Node with its name as its host name and an address, and returns its name.
func (f *fixture) createNode(name string, addresses ...string) string {
	f.Helper()
	name = f.id + "-" + name
	if _, err := shared.Admin.CoreV1().Nodes().Create(f.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = shared.Admin.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
	f.setAddresses(name, append([]string{name}, addresses...)...)
	return name
}

// setAddresses writes names and addresses into the status of a Node, as its kubelet does.
func (f *fixture) setAddresses(node string, names ...string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		n, err := shared.Admin.CoreV1().Nodes().Get(f.ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.Status.Addresses = nil
		for _, name := range names {
			kind := corev1.NodeInternalIP
			if net.ParseIP(name) == nil {
				kind = corev1.NodeHostName
			}
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: kind, Address: name})
		}
		_, err = shared.Admin.CoreV1().Nodes().UpdateStatus(f.ctx, n, metav1.UpdateOptions{})
		return err
	})
}

// kubelet returns a client that is a node's kubelet.
func kubelet(t testing.TB, node string) kubernetes.Interface {
	t.Helper()
	config := shared.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + node, Groups: []string{"system:nodes", "system:authenticated"}}
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	return client
}

// newRequest returns a request of a node's kubelet.
func newRequest(node string, hosts ...string) *certificatesv1.CertificateSigningRequest {
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		panic(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}
}

// createRequest sends a request as a node's kubelet, and returns its name.
func (f *fixture) createRequest(node string, hosts ...string) string {
	f.Helper()
	return f.create(node, newRequest(node, hosts...))
}

func (f *fixture) create(node string, request *certificatesv1.CertificateSigningRequest) string {
	f.Helper()
	created, err := kubelet(f, node).CertificatesV1().CertificateSigningRequests().Create(f.ctx, request, metav1.CreateOptions{})
	assert.NoError(f, err)
	f.Cleanup(func() { f.deleteRequest(created.Name) })
	return created.Name
}

func (f *fixture) deleteRequest(request string) {
	err := shared.Admin.CertificatesV1().CertificateSigningRequests().Delete(context.Background(), request, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		f.Error(err)
	}
}

// state returns the conditions of a request by their types, and whether it is signed.
func (f *fixture) state(request string) (state string, signed bool) {
	f.Helper()
	r, err := shared.Admin.CertificatesV1().CertificateSigningRequests().Get(f.ctx, request, metav1.GetOptions{})
	assert.NoError(f, err)
	var types []string
	for _, c := range r.Status.Conditions {
		types = append(types, string(c.Type))
	}
	return strings.Join(types, " "), len(r.Status.Certificate) > 0
}

// waitUntilSigned waits until a request is signed.
func (f *fixture) waitUntilSigned(request string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		if state, signed := f.state(request); state != "Approved" || !signed {
			return fmt.Errorf("request %s is %q, signed: %t", request, state, signed)
		}
		return nil
	})
}

// decide approves or denies a request by hand.
func (f *fixture) decide(request string, condition certificatesv1.RequestConditionType) {
	f.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"True","reason":"kubelet-serving-cert-approver","message":"x"}]}}`, condition)
	if _, err := shared.Admin.CertificatesV1().CertificateSigningRequests().Patch(f.ctx, request, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "approval"); err != nil {
		f.Fatal(err)
	}
}

// expectWaiting waits for an Event on a Node that says that a request waits for a check.
func (f *fixture) expectWaiting(node, request, text string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		events, err := shared.Admin.CoreV1().Events(metav1.NamespaceDefault).List(f.ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + node + ",reason=ServingCertificateNotApproved"})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, request) && strings.Contains(e.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("no Event on %s names %s and %q", node, request, text)
	})
	if state, _ := f.state(request); state != "" {
		f.Errorf("request %s is %q", request, state)
	}
}

// approvals returns how often managers have approved or denied each request since the beginning.
func (f *fixture) approvals() map[string]int {
	f.Helper()
	all := map[string]int{}
	for _, e := range shared.AuditSince(f, f.begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) != "" && cluster.AuditWrite(e) }) {
		if ref := e.ObjectRef; ref != nil && ref.Resource == "certificatesigningrequests" {
			if e.Verb != "update" || ref.Subresource != "approval" {
				f.Errorf("%s %s", e.Verb, e.RequestURI)
			}
			all[ref.Name]++
		}
	}
	return all
}

var errNotYet = errors.New("not yet")
