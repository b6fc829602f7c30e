// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestLeaderApprovesWhatTheNodeOwns has what the API server and the signer decide, in one leader.
func TestLeaderApprovesWhatTheNodeOwns(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 5*time.Minute)
	m := shared.RunLeader(ctx, t, args("--csr-approver-dns-regex={node}(\\..*)?", "--v=4")...)
	for name, run := range map[string]func(f *fixture){
		"a kubelet gets a certificate that servers can use": func(f *fixture) {
			n := f.createNode("n", "10.1.0.1")
			name := f.createRequest(n, n, "10.1.0.1")
			f.waitUntilSigned(name)
			r, err := shared.Admin.CertificatesV1().CertificateSigningRequests().Get(f.ctx, name, metav1.GetOptions{})
			assert.NoError(f, err)
			block, _ := pem.Decode(r.Status.Certificate)
			crt, err := x509.ParseCertificate(block.Bytes)
			assert.NoError(f, err)
			for _, host := range []string{n, "10.1.0.1"} {
				if err := crt.VerifyHostname(host); err != nil {
					f.Error(err)
				}
			}
			if c := r.Status.Conditions[0]; c.Reason != "QuartermasterApproved" || c.LastUpdateTime.IsZero() {
				f.Errorf("condition %+v", c)
			}
		},
		"a node asks for a name that begins with its own": func(f *fixture) {
			n := f.createNode("n", "10.1.0.2")
			f.expectWaiting(n, f.createRequest(n, n+".evil.example"), "check 9")
			// With the wide expression of this test, only other checks are left once the Node claims it.
			f.setAddresses(n, n, "auth.example.com")
			f.expectWaiting(n, f.createRequest(n, "auth.example.com"), "check 10")
		},
		"a request is approved when the Node reports its address": func(f *fixture) {
			n := f.createNode("n", "10.1.0.3")
			name := f.createRequest(n, "10.1.0.4")
			f.expectWaiting(n, name, "check 9")
			f.setAddresses(n, n, "10.1.0.3", "10.1.0.4")
			f.waitUntilSigned(name)
		},
		"a node claims another's address": func(f *fixture) {
			victim, evil := f.createNode("victim", "10.1.0.5"), f.createNode("evil", "10.1.0.6")
			f.waitUntilSigned(f.createRequest(victim, victim, "10.1.0.5"))
			f.setAddresses(evil, evil, "10.1.0.6", "10.1.0.5")
			f.expectWaiting(evil, f.createRequest(evil, evil, "10.1.0.5"), "check 11")
			f.expectWaiting(evil, f.createRequest(evil, "::ffff:10.1.0.5"), "check 11")
			f.waitUntilSigned(f.createRequest(evil, evil, "10.1.0.6")) // its own it gets
			waiting := f.createRequest(victim, "10.1.0.5")
			f.expectWaiting(victim, waiting, "check 11") // so the victim waits too
			f.setAddresses(evil, evil, "10.1.0.6")
			f.waitUntilSigned(waiting)
		},
		"a node claims another's name": func(f *fixture) {
			victim, evil := f.createNode("victim", "10.1.0.7"), f.createNode("evil", "10.1.0.8")
			f.setAddresses(evil, victim, "10.1.0.8")
			f.expectWaiting(evil, f.createRequest(evil, victim), "check 10")
		},
		"a node claims the names of the API server": func(f *fixture) {
			n := f.createNode("n", "10.1.0.9")
			f.setAddresses(n, n, "kubernetes.default.svc", "127.0.0.1")
			f.expectWaiting(n, f.createRequest(n, "kubernetes.default.svc"), "check 7")
			f.expectWaiting(n, f.createRequest(n, "127.0.0.1"), "check 7")
		},
		"a node claims the cluster IP of the API server": func(f *fixture) {
			service, err := shared.Admin.CoreV1().Services(metav1.NamespaceDefault).Get(f.ctx, "kubernetes", metav1.GetOptions{})
			assert.NoError(f, err)
			n := f.createNode("n", "10.1.0.10", service.Spec.ClusterIP)
			f.expectWaiting(n, f.createRequest(n, service.Spec.ClusterIP), "check 12")
		},
		"a node claims an endpoint of the API server, and is of the control plane later": func(f *fixture) {
			slices, err := shared.Admin.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(f.ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=kubernetes"})
			if err != nil || len(slices.Items) == 0 {
				f.Skip("the API server has published no address here", err)
			}
			address := slices.Items[0].Endpoints[0].Addresses[0]
			n := f.createNode("n", address)
			name := f.createRequest(n, address)
			f.label(n, "node-role.kubernetes.io/control-plane", "")
			if address[:3] != "10." {
				f.expectWaiting(n, name, "check 10") // it is outside of the ranges
				return
			}
			f.waitUntilSigned(name)
		},
		"a request is approved when its Node is created": func(f *fixture) {
			n := f.id + "-late"
			name := f.createRequest(n, n, "10.1.0.11")
			f.settle()
			if state, _ := f.state(name); state != "" {
				f.Errorf("it is %q", state)
			}
			f.createNode("late", "10.1.0.11")
			f.waitUntilSigned(name)
		},
		"a request waits when its Node is deleted": func(f *fixture) {
			n := f.createNode("n", "10.1.0.12")
			assert.NoError(f, shared.Admin.CoreV1().Nodes().Delete(f.ctx, n, metav1.DeleteOptions{}))
			name := f.createRequest(n, n, "10.1.0.12")
			f.settle()
			if state, _ := f.state(name); state != "" {
				f.Errorf("it is %q", state)
			}
		},
		"other signers and users are ignored": func(f *fixture) {
			n := f.createNode("n", "10.1.0.13")
			client := newRequest(n)
			client.Spec.SignerName = certificatesv1.KubeAPIServerClientSignerName
			client.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
			names := []string{f.create(n, client)}
			adminRequest, err := shared.Admin.CertificatesV1().CertificateSigningRequests().Create(f.ctx, newRequest(n, n), metav1.CreateOptions{})
			assert.NoError(f, err)
			f.Cleanup(func() { f.deleteRequest(adminRequest.Name) })
			f.settle()
			for _, name := range append(names, adminRequest.Name) {
				if state, _ := f.state(name); state != "" {
					f.Errorf("%s is %q", name, state)
				}
			}
		},
		"20 of 25 requests at once are approved": func(f *fixture) {
			n := f.createNode("n", "10.1.0.14")
			for range 25 {
				f.createRequest(n, n)
			}
			fleet.Eventually(f.ctx, f, func() error {
				if len(f.approvedRequests(n)) < 20 {
					return errNotYet
				}
				return nil
			})
			f.settle()
			if approved := f.approvedRequests(n); len(approved) != 20 {
				f.Errorf("%d are approved", len(approved))
			}
		},
		"a certificate may be for 600 s": func(f *fixture) {
			n := f.createNode("n", "10.1.0.15")
			r := newRequest(n, n)
			r.Spec.ExpirationSeconds = new(int32)
			*r.Spec.ExpirationSeconds = 600
			f.waitUntilSigned(f.create(n, r))
		},
	} {
		t.Run(name, func(t *testing.T) { run(newFixture(t)) })
	}
	if err := fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_csr_approver_requests_total{result="approved"}`,
		`quartermaster_csr_approver_requests_total{result="denied"} 0`, `quartermaster_csr_approver_waiting_requests{check="9"}`); err != nil {
		t.Error(err)
	}
}

// settle waits until the controller has decided on everything that happened before.
func (f *fixture) settle() {
	f.Helper()
	n := f.createNode(fmt.Sprintf("canary-%d", time.Now().UnixNano()))
	f.waitUntilSigned(f.createRequest(n, n))
}

// approvedRequests returns the approved requests of a node.
func (f *fixture) approvedRequests(node string) (names []string) {
	f.Helper()
	list, err := shared.Admin.CertificatesV1().CertificateSigningRequests().List(f.ctx, metav1.ListOptions{})
	assert.NoError(f, err)
	for _, r := range list.Items {
		if r.Spec.Username == "system:node:"+node && slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Type == certificatesv1.CertificateApproved
		}) {
			names = append(names, r.Name)
		}
	}
	return names
}

func (f *fixture) label(node, label, value string) {
	f.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, label, value)
	if _, err := shared.Admin.CoreV1().Nodes().Patch(f.ctx, node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		f.Fatal(err)
	}
}

// TestMigrationWritesNothing has requests as the original leaves them: approved, denied and waiting. A dry
// run beside the original writes nothing; without it, what waits is approved, and nothing else is written.
func TestMigrationWritesNothing(t *testing.T) {
	f := newFixture(t)
	n := f.createNode("n", "10.2.0.1")
	approved, denied, waiting := f.createRequest(n, n), f.createRequest(n, n), f.createRequest(n, n, "10.2.0.1")
	f.decide(approved, certificatesv1.CertificateApproved)
	f.decide(denied, certificatesv1.CertificateDenied)
	dry := shared.RunLeader(f.ctx, t, args("--csr-approver-dry-run")...)
	if _, err := dry.WaitForLine(f.ctx, "Dry run: would approve"); err != nil {
		t.Fatal(err)
	}
	if err := dry.Stop(f.ctx, fleet.Patience); err != nil {
		t.Error(err)
	}
	if writes := f.approvals(); len(writes) > 0 {
		t.Errorf("the dry run has written %v", writes)
	}
	shared.RunLeader(f.ctx, t, args()...)
	f.waitUntilSigned(waiting)
	f.settle()
	if state, _ := f.state(denied); state != "Denied" {
		t.Errorf("what was denied is %q", state)
	}
	if writes := f.approvals(); writes[approved]+writes[denied] > 0 || writes[waiting] != 1 {
		t.Errorf("writes %v", writes)
	}
}

// TestStartNamesTheFlagThatIsWrong has what a manager refuses, and the flag that it names.
func TestStartNamesTheFlagThatIsWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"a manager without ranges does not start":               {[]string{"--controllers=csr-approver"}, "--csr-approver-ip-ranges"},
		"a manager with a broken expression does not start":     {args("--csr-approver-dns-regex=("), "--csr-approver-dns-regex"},
		"a manager with a range that is no CIDR does not start": {args("--csr-approver-ip-ranges=x"), "--csr-approver-ip-ranges"},
		"a manager with --namespaces does not start":            {args("--namespaces=a"), "--namespaces"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			m := shared.RunReplica(ctx, t, tc.args...)
			if err := m.Wait(ctx); err == nil || m.ExitCode() == 0 {
				t.Errorf("it ended with %d, %v", m.ExitCode(), err)
			}
			if tail := m.Tail(20); !strings.Contains(tail, tc.want) {
				t.Errorf("it does not name %s:\n%s", tc.want, tail)
			}
		})
	}
}
