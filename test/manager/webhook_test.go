// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestReplicaThatCannotBeNamedGivesUpTheLease kills the leader while a webhook on Namespaces is away and
// fails closed, so that nobody can be named for the fence. The timings are the default ones: a renew
// deadline of 10 s, a lease duration of 15 s.
func TestReplicaThatCannotBeNamedGivesUpTheLease(t *testing.T) {
	for name, listens := range map[string]bool{"its address refuses connections": false, "it does not answer": true} {
		t.Run(name, func(t *testing.T) { testWebhook(t, listens) })
	}
}

func testWebhook(t *testing.T, listens bool) {
	t.Helper()
	const renewDeadline, lease, slack = 10 * time.Second, 15 * time.Second, 20 * time.Second
	ctx := fleet.Context(t)
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	leader := shared.RunLeader(ctx, t)
	standbys := map[string]*cluster.Manager{}
	for range 2 {
		m := shared.RunStandby(ctx, t)
		standbys[m.Pod] = m
	}
	removeWebhook := installDeadWebhook(ctx, t, listens)
	leader.Kill()

	// awaitHolder waits until another than those holds the Lease.
	awaitHolder := func(former ...string) (pod string) {
		fleet.Eventually(ctx, t, func() error {
			if pod = shared.HolderPod(ctx, t); pod == "" || strings.Contains(strings.Join(former, " "), pod) {
				return fmt.Errorf("%q holds the Lease", pod)
			}
			return nil
		})
		return pod
	}
	second := awaitHolder(leader.Pod)
	acquired := time.Now()
	stuck := standbys[second]
	fleet.Eventually(ctx, t, func() error {
		code, body, err := fleet.Get(stuck.SecureURL+"/readyz?verbose", token)
		if err != nil || code == 200 || !strings.Contains(body, "[-]lease-access") {
			return fmt.Errorf("%d %s: %w", code, body, err)
		}
		return nil
	})
	unready := time.Since(acquired)
	if _, metrics, err := fleet.Get(stuck.SecureURL+"/metrics", token); err != nil ||
		!strings.Contains(metrics, `quartermaster_leader_election_is_leader{lease_namespace="kube-system",name="quartermaster"} 0`) {
		t.Errorf("is_leader is not 0: %v", err)
	}
	third := awaitHolder(leader.Pod, second)
	retried := time.Since(acquired)
	t.Logf("%s says that it is not ready %s after it took the Lease; %s tries after %s", second, unready, third, retried)
	if unready > renewDeadline+slack || retried > lease+30*time.Second {
		t.Errorf("that is late")
	}
	removeWebhook()
	fleet.Eventually(ctx, t, func() error {
		_, body, err := fleet.Get(standbys[third].SecureURL+"/debug/leader?format=json", token)
		if err != nil || !strings.Contains(body, `"phase": "Leading"`) {
			return fmt.Errorf("%s: %w", body, err)
		}
		return nil
	})
}

// installDeadWebhook installs a webhook that nobody serves on changes of the leader's Namespace, and returns
// what removes it.
func installDeadWebhook(ctx context.Context, t *testing.T, listens bool) (removeWebhook func()) {
	t.Helper()
	address := "127.0.0.1:1"
	if listens { // and the kernel accepts the connections
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		assert.NoError(t, err)
		t.Cleanup(func() { _ = listener.Close() })
		address = listener.Addr().String()
	}
	webhooks := shared.Admin.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err := webhooks.Create(ctx, &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "away"},
		Webhooks: []admissionregistrationv1.MutatingWebhook{{
			Name: "away.quartermaster.dev", AdmissionReviewVersions: []string{"v1"},
			ClientConfig:   admissionregistrationv1.WebhookClientConfig{URL: ptr.To("https://" + address + "/")},
			TimeoutSeconds: ptr.To[int32](30),
			SideEffects:    ptr.To(admissionregistrationv1.SideEffectClassNone),
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Update},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"namespaces"}},
			}},
			MatchConditions: []admissionregistrationv1.MatchCondition{{Name: "leader", Expression: "request.name == 'quartermaster-leader'"}},
		}},
	}, metav1.CreateOptions{})
	assert.NoError(t, err)
	remove := func() {
		_ = webhooks.Delete(context.Background(), "away", metav1.DeleteOptions{}) // the second time there is none
	}
	t.Cleanup(remove)
	return remove
}
