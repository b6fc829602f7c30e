// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"net/http"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/util/retry"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// allowSecrets grants config-reload what deploy/ grants, with or without Secrets.
func allowSecrets(ctx context.Context, t *testing.T, allow bool) {
	t.Helper()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		role, err := shared.Admin.RbacV1().ClusterRoles().Get(ctx, "quartermaster-controller-config-reload", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for i := range role.Rules {
			rule := &role.Rules[i]
			if !slices.Contains(rule.Resources, "configmaps") {
				continue
			}
			rule.Resources = slices.DeleteFunc(rule.Resources, func(r string) bool { return r == "secrets" })
			if allow {
				rule.Resources = append(rule.Resources, "secrets")
			}
		}
		_, err = shared.Admin.RbacV1().ClusterRoles().Update(ctx, role, metav1.UpdateOptions{})
		return err
	})
	assert.NoError(t, err)
}

func TestMissingPermissionConcernsOneController(t *testing.T) {
	ctx := fleet.Context(t)
	t.Cleanup(func() { allowSecrets(context.Background(), t, true) })
	shared.ExpectRefusals(func(e auditv1.Event) bool { return e.ObjectRef != nil && e.ObjectRef.Resource == "secrets" })
	const (
		check = "/healthz/controller-config-reload"
		other = "/healthz/controller-greeter"
	)
	waitForCode := func(m *cluster.Manager, path string, code int, parts ...string) {
		t.Helper()
		fleet.Eventually(ctx, t, func() error { return fleet.Answers(m.InsecureURL+path, "", code, parts...) })
	}

	// The check withholds the reason, which the debug page shows to who may see it.
	waitUntilDenied := func(m *cluster.Manager) {
		t.Helper()
		waitForCode(m, check, http.StatusInternalServerError)
		fleet.Eventually(ctx, t, func() error {
			return fleet.Answers(m.SecureURL+"/debug/controllers/config-reload", token, http.StatusOK, "cannot watch secrets: Forbidden")
		})
	}

	// Denied from the start, the cache of config-reload does not sync.
	allowSecrets(ctx, t, false)
	s := shared.NewSample(ctx, t)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	m := shared.Run(t, replica, cluster.ManagerOptions{})
	shared.WaitForLeader(ctx, t, m)
	waitUntilDenied(m)
	waitForCode(m, "/readyz", http.StatusOK) // a rollout continues
	s.Greet(ctx, t, "while-denied")
	waitForCode(m, other, http.StatusOK)
	allowSecrets(ctx, t, true)
	waitForCode(m, check, http.StatusOK)
	waitForCode(m, "/readyz", http.StatusOK)
	s.WaitUntilKnown(ctx, t, "web")

	// Permission is withdrawn. The server does not end an accepted watch, so this shows when the
	// watch ends.
	allowSecrets(ctx, t, false)
	proxy.Partition(faultproxy.Reset)
	proxy.Heal()
	waitUntilDenied(m)
	s.Greet(ctx, t, "while-withdrawn")
	waitForCode(m, other, http.StatusOK)
	if err := fleet.Answers(m.InsecureURL+"/readyz", "", http.StatusOK); err != nil {
		t.Errorf("a synced replica became unready: %v", err)
	}
	s.Paint(ctx, t, "red") // what the cache still receives is acted on
	s.WaitForReplicaSets(ctx, t, "web", 2)
	allowSecrets(ctx, t, true)
	waitForCode(m, check, http.StatusOK)
	s.SetSecret(ctx, t, "second")
	s.WaitForReplicaSets(ctx, t, "web", 3)
}
