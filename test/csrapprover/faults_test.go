// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// isApproval selects the writes of approvals.
func isApproval(r *http.Request) bool {
	return r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/approval")
}

// TestLeaderDiesBeforeItsWrite holds the write of a leader that is killed. Its successor approves the
// request once.
func TestLeaderDiesBeforeItsWrite(t *testing.T) {
	f := newFixture(t)
	replica, proxy := shared.NewReplicaBehindProxy(f.ctx, t)
	never := make(chan struct{})
	defer close(never)
	held := proxy.Add(faultproxy.Rule{Match: isApproval, Hold: never})
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args(fleet.ShortTimings...)})
	shared.WaitForLeader(f.ctx, t, m)
	n := f.createNode("n", "10.3.0.1")
	name := f.createRequest(n, n, "10.3.0.1")
	assert.NoError(t, held.WaitHits(f.ctx, 1))
	m.Kill()
	shared.RunLeader(f.ctx, t, args(fleet.ShortTimings...)...)
	f.waitUntilSigned(name)
	f.settle()
	if got := f.approvals()[name]; got != 1 {
		t.Errorf("it was approved %d times", got)
	}
}

// TestLostAnswerApprovesOnce executes a write whose answer the leader does not get, and one that it is told
// to repeat later.
func TestLostAnswerApprovesOnce(t *testing.T) {
	f := newFixture(t)
	replica, proxy := shared.NewReplicaBehindProxy(f.ctx, t)
	proxy.Add(faultproxy.Rule{Match: isApproval, Times: 1, DropResponse: true})
	proxy.Add(faultproxy.Rule{Match: isApproval, Times: 1, Status: http.StatusTooManyRequests, RetryAfter: time.Second})
	proxy.Add(faultproxy.Rule{Match: isApproval, Times: 1, Status: http.StatusInternalServerError})
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args()})
	shared.WaitForLeader(f.ctx, t, m)
	n := f.createNode("n", "10.3.0.2")
	for range 4 {
		name := f.createRequest(n, n)
		f.waitUntilSigned(name)
		if got := f.approvals()[name]; got > 1 {
			t.Errorf("%s was approved %d times", name, got)
		}
	}
}

// TestHundredsThatFailDelayNobody sends 500 requests that fail from one node, and one from another.
func TestHundredsThatFailDelayNobody(t *testing.T) {
	f := newFixture(t)
	m := shared.RunLeader(f.ctx, t, args()...)
	evil, good := f.createNode("evil", "10.3.0.3"), f.createNode("good", "10.3.0.4")
	client, request := kubelet(t, evil).CertificatesV1().CertificateSigningRequests(), newRequest(evil, evil+".evil.example")
	parallel(500, func(int) {
		created, err := client.Create(f.ctx, request, metav1.CreateOptions{})
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { f.deleteRequest(created.Name) })
	})
	begin := time.Now()
	f.waitUntilSigned(f.createRequest(good, good, "10.3.0.4"))
	t.Logf("the other node's request was signed after %v", time.Since(begin).Round(time.Millisecond))
	fleet.Eventually(f.ctx, t, func() error {
		return fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_csr_approver_waiting_requests{check="9"} 500`)
	})
	writes := 0
	for _, e := range shared.AuditSince(t, f.begin, func(e auditv1.Event) bool {
		return cluster.AuditPod(e) == m.Pod && cluster.AuditWrite(e) && e.ObjectRef != nil && e.ObjectRef.Resource == "events"
	}) {
		if e.ObjectRef.Namespace == metav1.NamespaceDefault {
			writes++
		}
	}
	t.Logf("%d writes of Events", writes)
	if writes > 30 {
		t.Errorf("%d writes of Events, want 30 at most", writes)
	}
}

// TestRequestsDeletedMeanwhileAreForgotten sends requests with odd names, which are deleted while they are
// decided on.
func TestRequestsDeletedMeanwhileAreForgotten(t *testing.T) {
	f := newFixture(t)
	m := shared.RunLeader(f.ctx, t, args("--csr-approver-max-approvals-per-node-per-hour=0")...)
	n := f.createNode("n", "10.3.0.7")
	client, requests := kubelet(t, n).CertificatesV1().CertificateSigningRequests(), []*certificatesv1.CertificateSigningRequest{newRequest(n, n), newRequest(n, n+".evil.example")}
	names := []string{"0", "system.node.n1", "kubernetes.default.svc", "10.0.0.1", "a." + strings.Repeat("x", 200) + ".b"}
	parallel(200, func(i int) {
		r := requests[i%2].DeepCopy()
		r.GenerateName, r.Name = "", fmt.Sprintf("%s.%s.%d", names[i%len(names)], f.id, i)
		if _, err := client.Create(f.ctx, r, metav1.CreateOptions{}); err != nil {
			t.Error(err)
			return
		}
		f.deleteRequest(r.Name)
	})
	f.waitUntilSigned(f.createRequest(n, n))
	fleet.Eventually(f.ctx, t, func() error {
		return fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_csr_approver_waiting_requests{check="9"} 0`)
	})
	for name, writes := range f.approvals() {
		if writes > 1 {
			t.Errorf("%s was approved %d times", name, writes)
		}
	}
}

// TestNothingIsAskedForWhileNothingChanges has requests that wait, and Nodes whose kubelets report their
// health.
func TestNothingIsAskedForWhileNothingChanges(t *testing.T) {
	f := newFixture(t)
	m := shared.RunLeader(f.ctx, t, args()...)
	n := f.createNode("n", "10.3.0.5")
	f.expectWaiting(n, f.createRequest(n, "10.3.0.6"), "check 9")
	f.settle()
	begin := time.Now()
	for range 10 {
		node, err := shared.Admin.CoreV1().Nodes().Get(f.ctx, n, metav1.GetOptions{})
		if err == nil {
			node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
			_, err = shared.Admin.CoreV1().Nodes().UpdateStatus(f.ctx, node, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Log(err) // another controller may have written meanwhile
		}
		fleet.Wait(f.ctx, time.Second)
	}
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == m.Pod }) {
		if ref := e.ObjectRef; ref != nil && strings.HasSuffix(e.UserAgent, "/csr-approver") {
			t.Errorf("%s %s", e.Verb, e.RequestURI)
		}
	}
}
