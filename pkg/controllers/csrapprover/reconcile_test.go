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

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

const (
	told    = "Normal ServingCertificateApproved n1: request "
	notTold = "Warning ServingCertificateNotApproved n1: request "
	refusal = "Warning ServingCertificateForbidden"
)

// TestReconcile has what depends on more than one object or moment. The checks of one request are tested in
// package policy.
func TestReconcile(t *testing.T) {
	r1 := request("r1", "n1", "n1", "10.0.0.1")
	for name, tc := range map[string]struct {
		flags   []string
		objects []runtime.Object
		do      func(w *fixture)
	}{
		"a name with an address, and an address alone, are approved": {
			objects: []runtime.Object{r1},
			do: func(w *fixture) {
				w.expect(approval("r1"), told+`r1 is approved`)
				w.put(request("r2", "n1", "10.0.0.1"))
				w.expect(approval("r2"), told+"r2")
				if got := w.conditions("r1"); got != "Approved QuartermasterApproved" {
					w.Error(got)
				}
				w.metric(2, "requests_total", "result", "approved")
				w.metric(2, "approval_seconds")
			},
		},
		"what no kubelet has sent is ignored": {
			do: func(w *fixture) {
				other, account, group := request("other", "n1", "n1"), request("account", "n1", "n1"), request("group", "n1", "n1")
				other.Spec.SignerName = certificatesv1.KubeAPIServerClientKubeletSignerName
				account.Spec.Username = "system:serviceaccount:a:b"
				group.Spec.Groups = []string{"system:authenticated"}
				w.put(other, account, group)
				w.expect(nil)
				w.metric(2, "requests_total", "result", "ignored") // the cache does not even have the other signer's
				w.noRequests()
			},
		},
		"another common name waits, and is read once": {
			do: func(w *fixture) {
				stranger := request("r1", "n2", "n1", "10.0.0.1")
				stranger.Spec.Username = "system:node:n1"
				w.put(stranger)
				w.expect(nil, notTold+"r1 is not approved: check 3: ")
				w.metric(1, "waiting_requests", "check", "3")
				w.requests()
				w.put(node("n1", "10.0.0.1", "10.0.0.2"))
				w.Sleep(24 * time.Hour)
				w.noRequests()
				w.Delete(stranger)
				w.Settle()
				w.metric(0, "waiting_requests", "check", "3")
				w.expect(nil)
			},
		},
		"a request is approved when the Node lists its address": {
			do: func(w *fixture) {
				w.put(request("r1", "n1", "10.0.0.2"))
				w.expect(nil, notTold+`r1 is not approved: check 9: |"10.0.0.2"`)
				w.put(node("n1", "10.0.0.1", "10.0.0.2"))
				w.expect(approval("r1"), told+"r1")
				w.metric(0, "waiting_requests", "check", "9")
			},
		},
		"a request is approved when the other Node with its address is deleted": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), r1},
			do: func(w *fixture) {
				w.expect(nil, notTold+`r1 is not approved: check 11: |"10.0.0.1"`)
				w.Delete(node("n2"))
				w.Settle()
				w.expect(approval("r1"), told+"r1")
			},
		},
		"a request is approved when the other Node loses its address": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), r1},
			do: func(w *fixture) {
				w.expect(nil, notTold)
				w.put(node("n2", "10.0.0.3"))
				w.expect(approval("r1"), told)
			},
		},
		"nodes that claim each other's addresses get nothing, and who has its own alone does": {
			objects: []runtime.Object{node("n2", "10.0.0.1"), node("n3", "10.0.0.3")},
			do: func(w *fixture) {
				for _, r := range []runtime.Object{r1, request("r2", "n2", "10.0.0.1"), request("r3", "n3", "10.0.0.3")} {
					w.put(r)
				}
				w.expect(approval("r3"), notTold, "Warning ServingCertificateNotApproved n2", "Normal ServingCertificateApproved n3")
			},
		},
		"an endpoint of the API server is approved once the Node is one of the control plane": {
			objects: []runtime.Object{node("n1", "10.0.0.250"), request("r1", "n1", "10.0.0.250")},
			do: func(w *fixture) {
				w.expect(nil, notTold+"r1 is not approved: check 12: ")
				labelled := node("n1", "10.0.0.250")
				labelled.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
				w.put(labelled)
				w.expect(approval("r1"), told)
			},
		},
		"an endpoint in another form of its address counts": {
			flags:   []string{"--csr-approver-ip-ranges=fd00::/64"},
			objects: []runtime.Object{node("n1", "fd00::1"), endpoints("FD00:0::01"), request("r1", "n1", "fd00::1")},
			do:      func(w *fixture) { w.expect(nil, notTold+"r1 is not approved: check 12: ") },
		},
		"an endpoint that goes is noticed within minutes": {
			objects: []runtime.Object{node("n1", "10.0.0.250"), request("r1", "n1", "10.0.0.250")},
			do: func(w *fixture) {
				w.expect(nil, notTold)
				w.Delete(endpoints("10.0.0.250"))
				w.Sleep(4 * time.Minute)
				w.expect(nil)
				w.Sleep(2 * time.Minute)
				w.expect(approval("r1"), told)
			},
		},
		"a request waits for its Node to be created": {
			do: func(w *fixture) {
				w.put(request("r1", "n9", "n9", "10.0.0.9"))
				w.noRequests()
				w.Sleep(10 * time.Second)
				w.expect(nil)
				w.metric(1, "waiting_requests", "check", "8")
				w.put(node("n9", "10.0.0.9"))
				w.expect(approval("r1"), "Normal ServingCertificateApproved n9")
			},
		},
		"of 21 requests within a minute 20 are approved, and the last when they are gone": {
			do: func(w *fixture) {
				many := numbered("r%02d", 21, func(name string) runtime.Object { return request(name, "n1", "n1") })
				w.put(many...)
				w.Sleep(time.Minute)
				if n := w.approved(); n != 20 {
					w.Errorf("%d are approved", n)
				}
				w.metric(1, "waiting_requests", "check", "13")
				w.Delete(many[:1]...)
				w.Sleep(5 * time.Minute)
				if n := w.approved(); n != 20 {
					w.Errorf("%d are approved, and one is gone", n)
				}
			},
		},
		"the limit counts approvals of the last hour only": {
			flags: []string{"--csr-approver-per-node=1"},
			do: func(w *fixture) {
				before := decided(request("before", "n1", "n1"), certificatesv1.CertificateApproved)
				before.Status.Conditions[0].LastUpdateTime = metav1.NewTime(time.Now().Add(-58 * time.Minute))
				w.put(before)
				w.put(r1)
				w.requests()
				w.expect(nil, notTold+"r1 is not approved: check 13: ")
				w.Sleep(4 * time.Minute)
				w.noRequests()
				w.Sleep(2 * time.Minute)
				w.expect(approval("r1"), told)
			},
		},
		"200 nodes, more than an index has values, do not count for each other": {
			flags: []string{"--csr-approver-per-node=1"},
			do: func(w *fixture) {
				var nodes, requests []runtime.Object
				for i := range 200 {
					name, address := fmt.Sprintf("m%d", i), fmt.Sprintf("10.0.0.%d", 2+i)
					nodes, requests = append(nodes, node(name, address)), append(requests, request("r-"+name, name, name, address))
				}
				w.put(nodes...)
				w.put(requests[:100]...)
				w.put(requests[100:]...)
				if n := w.approved(); n != 200 {
					w.Errorf("%d are approved", n)
				}
				for _, e := range w.Events() {
					var of, request string
					if _, err := fmt.Sscanf(e, "Normal ServingCertificateApproved %s request %s", &of, &request); err != nil || "r-"+of != request+":" {
						w.Errorf("Event %q", e)
					}
				}
			},
		},
		"an approval that failed does not count once its request waits": {
			flags: []string{"--csr-approver-per-node=1"},
			do: func(w *fixture) {
				w.OnWrite(func(controllertest.Request) error {
					w.OnWrite(nil)
					w.Put(node("n1", "10.0.0.9")) // so that r1, which has failed, waits when it is tried again
					return apierrors.NewInternalError(errors.New("x"))
				})
				w.put(r1)
				w.Sleep(3 * time.Second)
				w.put(request("r2", "n1", "n1"))
				w.expect([]string{approval("r1")[0] + ": InternalError", approval("r2")[0]}, notTold+"r1", told+"r2")
			},
		},
		"a limit of 0 approves everything": {
			flags: []string{"--csr-approver-per-node=0"},
			do: func(w *fixture) {
				w.put(numbered("r%02d", 30, func(name string) runtime.Object { return request(name, "n1", "n1") })...)
				if n := w.approved(); n != 30 {
					w.Errorf("%d are approved", n)
				}
			},
		},
		"approvals that the cache does not show yet count": {
			do: func(w *fixture) {
				w.Lag(10 * time.Second)
				w.put(numbered("r%02d", 40, func(name string) runtime.Object { return request(name, "n1", "n1") })...)
				if n := w.approved(); n != 20 {
					w.Errorf("%d are approved", n)
				}
			},
		},
		"a new leader counts the approvals of its predecessor": {
			do: func(w *fixture) {
				make := func(name string) runtime.Object { return request(name, "n1", "n1") }
				w.put(numbered("a%02d", 10, make)...)
				w.Restart(func() { w.Put(numbered("b%02d", 20, make)...) })
				w.Sleep(time.Minute)
				if n := w.approved(); n != 20 {
					w.Errorf("%d are approved", n)
				}
			},
		},
		"deny-final denies what is final, and nothing else": {
			flags: []string{"--csr-approver-deny-final"},
			do: func(w *fixture) {
				final := request("final", "n2", "n1")
				final.Spec.Username = "system:node:n1"
				w.put(final)
				w.put(request("waits", "n1", "10.0.0.2"))
				w.expect(approval("final"), notTold+"final is denied: check 3: ", notTold+"waits is not approved: check 9")
				if got := w.conditions("final"); got != "Denied QuartermasterDenied" {
					w.Error(got)
				}
				w.metric(1, "requests_total", "result", "denied")
			},
		},
		"what is decided already is ignored": {
			do: func(w *fixture) {
				signed := request("signed", "n1", "n1")
				signed.Status.Certificate = []byte("x")
				w.put(decided(request("approved", "n1", "n1"), certificatesv1.CertificateApproved),
					decided(request("denied", "n1", "n1"), certificatesv1.CertificateDenied),
					decided(request("failed", "n1", "n1"), certificatesv1.CertificateFailed), signed)
				w.Restart()
				w.expect(nil)
				w.noRequests()
				if n := w.Controller("csr-approver").Status().Reconciles; n > 0 {
					w.Errorf("%d reconciles", n)
				}
			},
		},
		"a request that somebody approves meanwhile is left as it is": {
			do: func(w *fixture) {
				w.onceBeforeWrite(func() { w.Put(decided(r1, certificatesv1.CertificateApproved)) })
				w.put(r1)
				w.expect([]string{approval("r1")[0] + ": Conflict"})
				if got := w.conditions("r1"); got != "Approved Other" {
					w.Error(got)
				}
			},
		},
		"a request that somebody denies meanwhile is left as it is": {
			do: func(w *fixture) {
				w.onceBeforeWrite(func() { w.Put(decided(r1, certificatesv1.CertificateDenied)) })
				w.put(r1)
				w.expect([]string{approval("r1")[0] + ": Conflict"})
				if got := w.conditions("r1"); got != "Denied Other" {
					w.Error(got)
				}
			},
		},
		"a request that somebody deletes meanwhile is forgotten": {
			do: func(w *fixture) {
				w.onceBeforeWrite(func() { w.Delete(r1) })
				w.put(r1)
				w.expect([]string{approval("r1")[0] + ": NotFound"})
				if n := w.Controller("csr-approver").Status().Errors; n > 0 {
					w.Errorf("%d errors", n)
				}
			},
		},
		"a request whose label changes meanwhile is decided on again": {
			flags: []string{"--csr-approver-per-node=1"},
			do: func(w *fixture) {
				labelled := r1.DeepCopy()
				labelled.Labels = map[string]string{"a": "b"}
				w.onceBeforeWrite(func() { w.Put(labelled) })
				w.put(r1)
				w.expect([]string{approval("r1")[0] + ": Conflict", approval("r1")[0]}, told)
				if got := strings.Count(strings.Join(w.requests(), "\n"), "certificatesigningrequests"); got != 2 {
					w.Errorf("%d reads of the request", got)
				}
			},
		},
		"a request whose label changes all the time is retried with back-off": {
			do: func(w *fixture) {
				w.OnWrite(func(controllertest.Request) error { return conflict() })
				w.put(r1)
				w.Sleep(time.Minute / 2) // at once, twice; after 1, 3, 7 and 15 s, twice each
				if n := len(w.Writes()); n != 10 {
					w.Errorf("%d writes", n)
				}
			},
		},
		"--csr-approver-dry-run approves nothing": {
			flags: []string{"--csr-approver-dry-run", "--csr-approver-deny-final"},
			do: func(w *fixture) {
				stranger := request("r2", "n2", "n1")
				stranger.Spec.Username = "system:node:n1"
				w.put(r1)
				w.put(stranger)
				w.put(node("n1", "10.0.0.1", "10.0.0.2"))
				w.expect(nil, notTold+"r2")
				w.metric(1, "requests_total", "result", "dry_run")
			},
		},
		"--dry-run approves nothing": {
			flags: []string{"--dry-run"},
			do: func(w *fixture) {
				w.put(r1)
				w.expect(nil)
				w.metric(1, "requests_total", "result", "dry_run")
			},
		},
		"nothing is looked up by DNS": {
			do: func(w *fixture) {
				was := net.DefaultResolver
				w.Cleanup(func() { net.DefaultResolver = was })
				net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
					w.Error("a name is looked up")
					return nil, errors.New("no DNS")
				}}
				w.put(r1)
				w.expect(approval("r1"), told)
			},
		},
		"hundreds of requests that fail delay no other node's, and write few Events": {
			objects: []runtime.Object{node("n2", "10.0.0.2")},
			do: func(w *fixture) {
				w.Put(numbered("r%03d", 500, func(name string) runtime.Object { return request(name, "n1", "n1.evil.example") })...)
				w.put(request("good", "n2", "n2"))
				if diff := cmp.Diff(approval("good"), w.Writes()); diff != "" {
					w.Error(diff)
				}
				var events int32 // those that client-go combines are written again
				for _, e := range controllertest.List[corev1.Event](w.Host) {
					events += e.Count
				}
				if events < 10 || events > 30 {
					w.Errorf("%d writes of Events", events)
				}
				w.metric(500, "waiting_requests", "check", "9")
				w.metric(500, "waiting_requests", "check", "10")
			},
		},
		"the requests of an approval are few": {
			do: func(w *fixture) {
				w.put(r1)
				want := "get certificatesigningrequests.certificates.k8s.io r1\nget nodes n1\nget services default/kubernetes\nlist endpointslices.discovery.k8s.io default"
				if got := strings.Join(w.requests(), "\n"); got != want {
					w.Errorf("reads:\n%s", got)
				}
				w.put(request("r2", "n1", "n1"))
				if got := w.requests(); len(got) != 2 {
					w.Errorf("reads: %q", got)
				}
			},
		},
		"a request that waits costs nothing, whatever a kubelet reports": {
			do: func(w *fixture) {
				w.put(request("r1", "n1", "10.0.0.2"))
				w.requests()
				for i := range 10 {
					n := node("n1", "10.0.0.1")
					n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.NewTime(time.Now().Add(time.Duration(i) * time.Second))}}
					w.put(n)
				}
				w.Sleep(24 * time.Hour)
				w.noRequests()
				w.expect(nil, notTold)
			},
		},
		"the cache has a Node that is gone": {
			do: func(w *fixture) {
				w.Lag(time.Minute, "nodes")
				w.Delete(node("n1"))
				w.put(r1)
				w.Writes()
				w.Sleep(2 * time.Minute)
				w.expect(nil)
				w.metric(1, "waiting_requests", "check", "8")
			},
		},
		"the cache does not know yet that the Node has lost an address": {
			do: func(w *fixture) {
				w.Lag(time.Minute, "nodes")
				w.Put(node("n1", "10.0.0.3"))
				w.put(r1)
				w.expect(nil, notTold+"r1 is not approved: check 9")
			},
		},
		"the request is another one of the same name, of another signer, when it is read": {
			do: func(w *fixture) {
				w.Lag(time.Second, "nodes")
				other := r1.DeepCopy()
				other.Spec.SignerName = certificatesv1.KubeAPIServerClientKubeletSignerName
				w.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" && strings.HasPrefix(r.Resource, "certificates") {
						w.Put(other)
					}
					return nil
				})
				w.put(r1)
				w.expect(nil)
			},
		},
		"the request is another node's of the same name when it is read": {
			objects: []runtime.Object{node("n2", "10.0.0.2")},
			do: func(w *fixture) {
				other := request("r1", "n2", "n2")
				w.OnRead(func(r controllertest.Request) error {
					if r.Verb == "get" && strings.HasPrefix(r.Resource, "certificates") {
						w.OnRead(nil)
						w.Lag(time.Second, "certificatesigningrequests")
						w.Put(other)
					}
					return nil
				})
				w.put(r1)
				w.expect(nil)
				w.Sleep(2 * time.Second)
				w.expect(approval("r1"), "Normal ServingCertificateApproved n2")
			},
		},
		"a refusal is tried again after minutes, told once, and a problem until then": {
			do: func(w *fixture) {
				w.OnWrite(func(controllertest.Request) error { return forbidden() })
				w.put(r1)
				w.put(request("r2", "n1", "n1"))
				w.expect([]string{approval("r1")[0] + ": Forbidden", approval("r2")[0] + ": Forbidden"}, refusal+" kube-system/manager-0")
				if p := w.Controller("csr-approver").Status().Problem; !strings.Contains(p, "refuses what 2 requests need") {
					w.Errorf("problem %q", p)
				}
				w.Sleep(4 * time.Minute)
				w.expect(nil)
				w.Sleep(2 * time.Minute)
				w.Writes()
				w.Sleep(8 * time.Minute)
				w.expect(nil)
				w.OnWrite(nil)
				w.Sleep(2 * time.Minute)
				w.expect(approval("r1", "r2"), told, told)
				if p := w.Controller("csr-approver").Status().Problem; p != "" {
					w.Errorf("problem %q", p)
				}
			},
		},
		"an error is tried again soon": {
			do: func(w *fixture) {
				w.OnRead(func(r controllertest.Request) error {
					if strings.HasPrefix(r.Resource, "services") {
						return apierrors.NewInternalError(errors.New("x"))
					}
					return nil
				})
				w.put(r1)
				w.expect(nil)
				w.OnRead(nil)
				w.Sleep(3 * time.Second)
				w.expect(approval("r1"), told)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { tc.do(newFixture(t, tc.flags, tc.objects...)) })
		})
	}
}

func (w *fixture) noRequests() {
	w.Helper()
	if got := w.requests(); len(got) > 0 {
		w.Errorf("requests %q", got)
	}
}

// onceBeforeWrite calls f before the first write.
func (w *fixture) onceBeforeWrite(f func()) {
	w.OnWrite(func(controllertest.Request) error {
		w.OnWrite(nil)
		f()
		return nil
	})
}

var requests = schema.GroupResource{Group: "certificates.k8s.io", Resource: "certificatesigningrequests"}

func conflict() error { return apierrors.NewConflict(requests, "r1", errors.New("changed")) }

func forbidden() error { return apierrors.NewForbidden(requests, "r1", errors.New("no")) }
