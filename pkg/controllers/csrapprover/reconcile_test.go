// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

const (
	approvedEvent    = "Normal ServingCertificateApproved n1: request "
	notApprovedEvent = "Warning ServingCertificateNotApproved n1: request "
	forbiddenEvent   = "Warning ServingCertificateForbidden"
)

// TestReconcileApprovesOnlyWhatPasses has what depends on more than one object or moment. The checks of one
// request are tested in package policy.
func TestReconcileApprovesOnlyWhatPasses(t *testing.T) {
	r1 := request("r1", "n1", "n1", "10.0.0.1")
	for name, tc := range map[string]struct {
		flags   []string
		objects []runtime.Object
		run     func(f *fixture)
	}{
		"a name with an address, and an address alone, are approved": {
			objects: []runtime.Object{r1},
			run: func(f *fixture) {
				f.expect(approvalWrites("r1"), approvedEvent+`r1 is approved`)
				f.put(request("r2", "n1", "10.0.0.1"))
				f.expect(approvalWrites("r2"), approvedEvent+"r2")
				if got := f.conditions("r1"); got != "Approved QuartermasterApproved" {
					f.Error(got)
				}
				f.expectMetric(2, "requests_total", "result", "approved")
				f.expectMetric(2, "lag_seconds")
			},
		},
		"what no kubelet has sent is ignored": {
			run: func(f *fixture) {
				other, account, group := request("other", "n1", "n1"), request("account", "n1", "n1"), request("group", "n1", "n1")
				other.Spec.SignerName = certificatesv1.KubeAPIServerClientKubeletSignerName
				account.Spec.Username = "system:serviceaccount:a:b"
				group.Spec.Groups = []string{"system:authenticated"}
				f.put(other, account, group)
				f.expect(nil)
				f.expectMetric(2, "requests_total", "result", "ignored") // the cache does not even have the other signer's
				f.expectNoReads()
			},
		},
		"another common name waits, and is read once": {
			run: func(f *fixture) {
				stranger := request("r1", "n2", "n1", "10.0.0.1")
				stranger.Spec.Username = "system:node:n1"
				f.put(stranger)
				f.expect(nil, notApprovedEvent+"r1 is not approved: check 3: ")
				f.expectMetric(1, "waiting_requests", "check", "3")
				f.takeReads()
				f.put(node("n1", "10.0.0.1", "10.0.0.2"))
				f.Sleep(24 * time.Hour)
				f.expectNoReads()
				f.Delete(stranger)
				f.Settle()
				f.expectMetric(0, "waiting_requests", "check", "3")
				f.expect(nil)
			},
		},
		"a request is approved when the Node lists its address": {
			run: func(f *fixture) {
				f.put(request("r1", "n1", "10.0.0.2"))
				f.expect(nil, notApprovedEvent+`r1 is not approved: check 9: |"10.0.0.2"`)
				f.put(node("n1", "10.0.0.1", "10.0.0.2"))
				f.expect(approvalWrites("r1"), approvedEvent+"r1")
				f.expectMetric(0, "waiting_requests", "check", "9")
			},
		},
		"a request is approved when the other Node with its address is deleted": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), r1},
			run: func(f *fixture) {
				f.expect(nil, notApprovedEvent+`r1 is not approved: check 11: |"10.0.0.1"`)
				f.Delete(node("n2"))
				f.Settle()
				f.expect(approvalWrites("r1"), approvedEvent+"r1")
			},
		},
		"a request is approved when the other Node loses its address": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), r1},
			run: func(f *fixture) {
				f.expect(nil, notApprovedEvent)
				f.put(node("n2", "10.0.0.3"))
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
		"nodes that claim each other's addresses get nothing, and who has its own alone does": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), node("n3", "10.0.0.3")},
			run: func(f *fixture) {
				for _, r := range []runtime.Object{r1, request("r2", "n2", "10.0.0.1"), request("r3", "n3", "10.0.0.3")} {
					f.put(r)
				}
				f.expect(approvalWrites("r3"), notApprovedEvent, "Warning ServingCertificateNotApproved n2", "Normal ServingCertificateApproved n3")
			},
		},
		"an endpoint of the API server is approved once the Node is one of the control plane": {
			objects: []runtime.Object{node("n1", "10.0.0.250"), request("r1", "n1", "10.0.0.250")},
			run: func(f *fixture) {
				f.expect(nil, notApprovedEvent+"r1 is not approved: check 12: ")
				labelled := node("n1", "10.0.0.250")
				labelled.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
				f.put(labelled)
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
		"an endpoint in another form of its address counts": {
			flags:   []string{"--csr-approver-ip-ranges=fd00::/64"},
			objects: []runtime.Object{node("n1", "fd00::1"), endpoints("FD00:0::01"), request("r1", "n1", "fd00::1")},
			run:     func(f *fixture) { f.expect(nil, notApprovedEvent+"r1 is not approved: check 12: ") },
		},
		"an endpoint that goes is noticed within minutes": {
			objects: []runtime.Object{node("n1", "10.0.0.250"), request("r1", "n1", "10.0.0.250")},
			run: func(f *fixture) {
				f.expect(nil, notApprovedEvent)
				f.Delete(endpoints("10.0.0.250"))
				f.Sleep(4 * time.Minute)
				f.expect(nil)
				f.Sleep(2 * time.Minute)
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
		"a request waits for its Node to be created": {
			run: func(f *fixture) {
				f.put(request("r1", "n9", "n9", "10.0.0.9"))
				f.expectNoReads()
				f.Sleep(10 * time.Second)
				f.expect(nil)
				f.expectMetric(1, "waiting_requests", "check", "8")
				f.put(node("n9", "10.0.0.9"))
				f.expect(approvalWrites("r1"), "Normal ServingCertificateApproved n9")
			},
		},
		"20 of 21 requests within a minute are approved, and the last when they are gone": {
			run: func(f *fixture) {
				many := numberedObjects("r%02d", 21, func(name string) runtime.Object { return request(name, "n1", "n1") })
				f.put(many...)
				f.Sleep(time.Minute)
				if n := f.countApproved(); n != 20 {
					f.Errorf("%d are approved", n)
				}
				f.expectMetric(1, "waiting_requests", "check", "13")
				f.Delete(many[:1]...)
				f.Sleep(5 * time.Minute)
				if n := f.countApproved(); n != 20 {
					f.Errorf("%d are approved, and one is gone", n)
				}
			},
		},
		"the limit counts approvals of the last hour only": {
			flags: []string{"--csr-approver-max-approvals-per-node-per-hour=1"},
			run: func(f *fixture) {
				before := withCondition(request("before", "n1", "n1"), certificatesv1.CertificateApproved)
				before.Status.Conditions[0].LastUpdateTime = metav1.NewTime(time.Now().Add(-58 * time.Minute))
				f.put(before)
				f.put(r1)
				f.takeReads()
				f.expect(nil, notApprovedEvent+"r1 is not approved: check 13: ")
				f.Sleep(4 * time.Minute)
				f.expectNoReads()
				f.Sleep(2 * time.Minute)
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
		"200 nodes, more than an index has values, do not count for each other": {
			flags: []string{"--csr-approver-max-approvals-per-node-per-hour=1"},
			run: func(f *fixture) {
				var nodes, requests []runtime.Object
				for i := range 200 {
					name, address := fmt.Sprintf("m%d", i), fmt.Sprintf("10.0.0.%d", 2+i)
					nodes, requests = append(nodes, node(name, address)), append(requests, request("r-"+name, name, name, address))
				}
				f.put(nodes...)
				f.put(requests[:100]...)
				f.put(requests[100:]...)
				if n := f.countApproved(); n != 200 {
					f.Errorf("%d are approved", n)
				}
				for _, e := range f.Events() {
					var nodeName, request string
					if _, err := fmt.Sscanf(e, "Normal ServingCertificateApproved %s request %s", &nodeName, &request); err != nil || "r-"+nodeName != request+":" {
						f.Errorf("Event %q", e)
					}
				}
			},
		},
		"an approval that failed does not count once its request waits": {
			flags: []string{"--csr-approver-max-approvals-per-node-per-hour=1"},
			run: func(f *fixture) {
				f.OnWrite(func(controllertest.Request) error {
					f.OnWrite(nil)
					f.Put(node("n1", "10.0.0.9")) // so that r1, which has failed, waits when it is tried again
					return apierrors.NewInternalError(errors.New("x"))
				})
				f.put(r1)
				f.Sleep(3 * time.Second)
				f.put(request("r2", "n1", "n1"))
				f.expect([]string{approvalWrites("r1")[0] + ": InternalError", approvalWrites("r2")[0]}, notApprovedEvent+"r1", approvedEvent+"r2")
			},
		},
		"a limit of 0 approves everything": {
			flags: []string{"--csr-approver-max-approvals-per-node-per-hour=0"},
			run: func(f *fixture) {
				f.put(numberedObjects("r%02d", 30, func(name string) runtime.Object { return request(name, "n1", "n1") })...)
				if n := f.countApproved(); n != 30 {
					f.Errorf("%d are approved", n)
				}
			},
		},
		"approvals that the cache does not show yet count": {
			run: func(f *fixture) {
				f.Lag(10 * time.Second)
				f.put(numberedObjects("r%02d", 40, func(name string) runtime.Object { return request(name, "n1", "n1") })...)
				if n := f.countApproved(); n != 20 {
					f.Errorf("%d are approved", n)
				}
			},
		},
		"a new leader counts the approvals of its predecessor": {
			run: func(f *fixture) {
				newObject := func(name string) runtime.Object { return request(name, "n1", "n1") }
				f.put(numberedObjects("a%02d", 10, newObject)...)
				f.Restart(func() { f.Put(numberedObjects("b%02d", 20, newObject)...) })
				f.Sleep(time.Minute)
				if n := f.countApproved(); n != 20 {
					f.Errorf("%d are approved", n)
				}
			},
		},
		"deny-final denies what is final, and nothing else": {
			flags: []string{"--csr-approver-deny-final"},
			run: func(f *fixture) {
				final := request("final", "n2", "n1")
				final.Spec.Username = "system:node:n1"
				f.put(final)
				f.put(request("waits", "n1", "10.0.0.2"))
				f.expect(approvalWrites("final"), notApprovedEvent+"final is denied: check 3: ", notApprovedEvent+"waits is not approved: check 9")
				if got := f.conditions("final"); got != "Denied QuartermasterDenied" {
					f.Error(got)
				}
				f.expectMetric(1, "requests_total", "result", "denied")
			},
		},
		"what is decided already is ignored": {
			run: func(f *fixture) {
				signed := request("signed", "n1", "n1")
				signed.Status.Certificate = []byte("x")
				f.put(withCondition(request("approved", "n1", "n1"), certificatesv1.CertificateApproved),
					withCondition(request("denied", "n1", "n1"), certificatesv1.CertificateDenied),
					withCondition(request("failed", "n1", "n1"), certificatesv1.CertificateFailed), signed)
				f.Restart()
				f.expect(nil)
				f.expectNoReads()
				if n := f.Controller("csr-approver").Status().Reconciles; n > 0 {
					f.Errorf("%d reconciles", n)
				}
			},
		},
		"a request that somebody approves meanwhile is left as it is": {
			run: func(f *fixture) {
				f.beforeFirstWrite(func() { f.Put(withCondition(r1, certificatesv1.CertificateApproved)) })
				f.put(r1)
				f.expect([]string{approvalWrites("r1")[0] + ": Conflict"})
				if got := f.conditions("r1"); got != "Approved Other" {
					f.Error(got)
				}
			},
		},
		"a request that somebody denies meanwhile is left as it is": {
			run: func(f *fixture) {
				f.beforeFirstWrite(func() { f.Put(withCondition(r1, certificatesv1.CertificateDenied)) })
				f.put(r1)
				f.expect([]string{approvalWrites("r1")[0] + ": Conflict"})
				if got := f.conditions("r1"); got != "Denied Other" {
					f.Error(got)
				}
			},
		},
		"a request that somebody deletes meanwhile is forgotten": {
			run: func(f *fixture) {
				f.beforeFirstWrite(func() { f.Delete(r1) })
				f.put(r1)
				f.expect([]string{approvalWrites("r1")[0] + ": NotFound"})
				if n := f.Controller("csr-approver").Status().Errors; n > 0 {
					f.Errorf("%d errors", n)
				}
			},
		},
		"a request whose label changes meanwhile is decided on again": {
			flags: []string{"--csr-approver-max-approvals-per-node-per-hour=1"},
			run: func(f *fixture) {
				labelled := r1.DeepCopy()
				labelled.Labels = map[string]string{"a": "b"}
				f.beforeFirstWrite(func() { f.Put(labelled) })
				f.put(r1)
				f.expect([]string{approvalWrites("r1")[0] + ": Conflict", approvalWrites("r1")[0]}, approvedEvent)
				if got := strings.Count(strings.Join(f.takeReads(), "\n"), "certificatesigningrequests"); got != 2 {
					f.Errorf("%d reads of the request", got)
				}
			},
		},
		"a request whose label changes all the time is retried with back-off": {
			run: func(f *fixture) {
				f.OnWrite(func(controllertest.Request) error { return conflict() })
				f.put(r1)
				f.Sleep(time.Minute / 2) // at once, twice; after 0.1, 0.3, 0.7, 1.7, 3.7, 7.7 and 15.7 s, twice each
				if n := len(f.Writes()); n != 16 {
					f.Errorf("%d writes", n)
				}
			},
		},
		"--csr-approver-dry-run approves nothing": {
			flags: []string{"--csr-approver-dry-run", "--csr-approver-deny-final"},
			run: func(f *fixture) {
				stranger := request("r2", "n2", "n1")
				stranger.Spec.Username = "system:node:n1"
				f.put(r1)
				f.put(stranger)
				f.put(node("n1", "10.0.0.1", "10.0.0.2"))
				f.expect(nil, notApprovedEvent+"r2")
				f.expectMetric(1, "requests_total", "result", "dry_run")
			},
		},
		"--dry-run approves nothing": {
			flags: []string{"--dry-run"},
			run: func(f *fixture) {
				f.put(r1)
				f.expect(nil)
				f.expectMetric(1, "requests_total", "result", "dry_run")
			},
		},
		"nothing is looked up by DNS": {
			run: func(f *fixture) {
				resolver := net.DefaultResolver
				f.Cleanup(func() { net.DefaultResolver = resolver })
				net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
					f.Error("a name is looked up")
					return nil, errors.New("no DNS")
				}}
				f.put(r1)
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
		"hundreds of requests that fail delay no other node's, and write few Events": {
			objects: []runtime.Object{node("n2", "10.0.0.2")},
			run: func(f *fixture) {
				f.Put(numberedObjects("r%03d", 500, func(name string) runtime.Object { return request(name, "n1", "n1.evil.example") })...)
				f.put(request("good", "n2", "n2"))
				assert.Equal(f, "writes", approvalWrites("good"), f.Writes())
				var events int32 // those that client-go combines are written again
				for _, e := range controllertest.List[corev1.Event](f.Host) {
					events += e.Count
				}
				if events < 10 || events > 30 {
					f.Errorf("%d writes of Events", events)
				}
				f.expectMetric(500, "waiting_requests", "check", "9")
				f.expectMetric(500, "waiting_requests", "check", "10")
			},
		},
		"the requests of an approval are few": {
			run: func(f *fixture) {
				f.put(r1)
				want := "get certificatesigningrequests.certificates.k8s.io r1\nget nodes n1\nget services default/kubernetes\nlist endpointslices.discovery.k8s.io default"
				if got := strings.Join(f.takeReads(), "\n"); got != want {
					f.Errorf("reads:\n%s", got)
				}
				f.put(request("r2", "n1", "n1"))
				if got := f.takeReads(); len(got) != 2 {
					f.Errorf("reads: %q", got)
				}
			},
		},
		"a request that waits costs nothing, whatever a kubelet reports": {
			run: func(f *fixture) {
				f.put(request("r1", "n1", "10.0.0.2"))
				f.takeReads()
				for i := range 10 {
					n := node("n1", "10.0.0.1")
					n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.NewTime(time.Now().Add(time.Duration(i) * time.Second))}}
					f.put(n)
				}
				f.Sleep(24 * time.Hour)
				f.expectNoReads()
				f.expect(nil, notApprovedEvent)
			},
		},
		"the cache has a Node that is gone": {
			run: func(f *fixture) {
				f.Lag(time.Minute, "nodes")
				f.Delete(node("n1"))
				f.put(r1)
				f.Writes()
				f.Sleep(2 * time.Minute)
				f.expect(nil)
				f.expectMetric(1, "waiting_requests", "check", "8")
			},
		},
		"the cache does not know yet that the Node has lost an address": {
			run: func(f *fixture) {
				f.Lag(time.Minute, "nodes")
				f.Put(node("n1", "10.0.0.3"))
				f.put(r1)
				f.expect(nil, notApprovedEvent+"r1 is not approved: check 9")
			},
		},
		"the request is another one of the same name, of another signer, when it is read": {
			run: func(f *fixture) {
				f.Lag(time.Second, "nodes")
				other := r1.DeepCopy()
				other.Spec.SignerName = certificatesv1.KubeAPIServerClientKubeletSignerName
				f.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" && strings.HasPrefix(r.Resource, "certificates") {
						f.Put(other)
					}
					return nil
				})
				f.put(r1)
				f.expect(nil)
			},
		},
		"the request is another node's of the same name when it is read": {
			objects: []runtime.Object{node("n2", "10.0.0.2")},
			run: func(f *fixture) {
				other := request("r1", "n2", "n2")
				f.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" && strings.HasPrefix(r.Resource, "certificates") {
						f.OnRead(nil)
						f.Lag(time.Second, "certificatesigningrequests")
						f.Put(other)
					}
					return nil
				})
				f.put(r1)
				f.expect(nil)
				f.Sleep(2 * time.Second)
				f.expect(approvalWrites("r1"), "Normal ServingCertificateApproved n2")
			},
		},
		"a refusal is tried again after minutes, told once, and a problem until then": {
			run: func(f *fixture) {
				f.OnWrite(func(controllertest.Request) error { return forbidden() })
				f.put(r1)
				f.put(request("r2", "n1", "n1"))
				f.expect([]string{approvalWrites("r1")[0] + ": Forbidden", approvalWrites("r2")[0] + ": Forbidden"}, forbiddenEvent+" kube-system/manager-0")
				if p := f.Controller("csr-approver").Status().Problem; !strings.Contains(p, "refuses what 2 requests need") {
					f.Errorf("problem %q", p)
				}
				f.Sleep(4 * time.Minute)
				f.expect(nil)
				f.Sleep(2 * time.Minute)
				f.Writes()
				f.Sleep(8 * time.Minute)
				f.expect(nil)
				f.OnWrite(nil)
				f.Sleep(2 * time.Minute)
				f.expect(approvalWrites("r1", "r2"), approvedEvent, approvedEvent)
				if p := f.Controller("csr-approver").Status().Problem; p != "" {
					f.Errorf("problem %q", p)
				}
			},
		},
		"an error is tried again soon": {
			run: func(f *fixture) {
				f.OnRead(func(r controllertest.Request) error {
					if strings.HasPrefix(r.Resource, "services") {
						return apierrors.NewInternalError(errors.New("x"))
					}
					return nil
				})
				f.put(r1)
				f.expect(nil)
				f.OnRead(nil)
				f.Sleep(3 * time.Second)
				f.expect(approvalWrites("r1"), approvedEvent)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { tc.run(newFixture(t, tc.flags, tc.objects...)) })
		})
	}
}

func (f *fixture) expectNoReads() {
	f.Helper()
	if got := f.takeReads(); len(got) > 0 {
		f.Errorf("requests %q", got)
	}
}

// beforeFirstWrite calls hook before the first write.
func (f *fixture) beforeFirstWrite(hook func()) {
	f.OnWrite(func(controllertest.Request) error {
		f.OnWrite(nil)
		hook()
		return nil
	})
}

var requests = schema.GroupResource{Group: "certificates.k8s.io", Resource: "certificatesigningrequests"}

func conflict() error { return apierrors.NewConflict(requests, "r1", errors.New("changed")) }

func forbidden() error { return apierrors.NewForbidden(requests, "r1", errors.New("no")) }
