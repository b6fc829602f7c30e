// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// waitForAnswer waits until url returns the code and a body that contains every part.
func waitForAnswer(ctx context.Context, t *testing.T, url, token string, code int, parts ...string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		got, body, err := fleet.Get(url, token)
		if err != nil {
			return err
		}
		for _, part := range append(parts, "") {
			if got != code || !strings.Contains(body, part) {
				return fmt.Errorf("%s returned %d, want %d with %q: %.2000s", url, got, code, part, body)
			}
		}
		return nil
	})
}

func TestTroubledControllerDisturbsNoOther(t *testing.T) {
	ctx := fleet.Context(t)
	troubled, err := cluster.BuildProgram(ctx, "test/manager/troubled", fleet.Race())
	assert.NoError(t, err)
	shared.ExpectRefusals(func(e auditv1.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Resource == "leases" && e.ObjectRef.Name == "" && e.ObjectRef.Namespace == ""
	})
	// Without the permission to read what does not exist, managers would get Forbidden in place of
	// NotFound.
	doodads := schema.GroupVersionResource{Group: "test.example.com", Version: "v1", Resource: "doodads"}
	shared.Grant(ctx, t, rbacv1.PolicyRule{APIGroups: []string{doodads.Group}, Resources: []string{doodads.Resource}, Verbs: []string{"list", "watch"}})
	token := shared.NewToken(ctx, t, "trouble-reader", "cluster-admin")
	s := shared.NewSample(ctx, t)
	configMaps := shared.Admin.CoreV1().ConfigMaps(s.Namespace)
	poisoned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "poisoned", Annotations: map[string]string{"example.com/poison": "yes"}}}
	if _, err := configMaps.Create(ctx, poisoned, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	start := func() *cluster.Manager {
		return shared.Run(t, shared.NewReplica(ctx, t), cluster.ManagerOptions{Binary: troubled, Args: fleet.ShortTimings})
	}
	m := start()
	shared.WaitForLeader(ctx, t, m)

	// A rollout continues: the leader is ready, and so is a new replica beside it.
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(m) })
	standby := start()
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(standby) })

	// Each trouble shows at its controller and nowhere else, the reason to those who may see it.
	waitForHealth := func(name string, code int, parts ...string) {
		t.Helper()
		waitForAnswer(ctx, t, m.InsecureURL+"/healthz/controller-"+name, "", code, parts...)
	}
	waitForReason := func(name, reason string) {
		t.Helper()
		waitForHealth(name, http.StatusInternalServerError, "reason withheld")
		waitForAnswer(ctx, t, m.SecureURL+"/debug/controllers/"+name, token, http.StatusOK, reason)
	}
	waitForReason("absent", "cannot list doodads.test.example.com: NotFound")
	waitForReason("forbidden", "cannot list leases.coordination.k8s.io: Forbidden")
	waitForReason("failing", "stopped unexpectedly")
	waitForReason("poisoned", "panics on 1 objects of configmaps, one of them "+s.Namespace+"/poisoned")
	waitForHealth("config-reload", http.StatusOK, "ok")
	waitForAnswer(ctx, t, m.InsecureURL+"/livez", "", http.StatusOK, "ok")
	waitForAnswer(ctx, t, m.SecureURL+"/metrics", token, http.StatusOK,
		`quartermaster_controller_problem{controller="absent"} 1`,
		`quartermaster_controller_problem{controller="forbidden"} 1`,
		`quartermaster_controller_problem{controller="failing"} 1`,
		`quartermaster_controller_problem{controller="poisoned"} 1`,
		`quartermaster_controller_problem{controller="config-reload"} 0`,
		`quartermaster_controller_restarts_total{controller="config-reload"} 0`,
		`quartermaster_controller_restarts_total{controller="failing"} `,
		`quartermaster_controller_panics_total{controller="poisoned"} `)
	var shown map[string]struct {
		Restarts uint64
		Problem  string
	}
	_, body, err := fleet.Get(m.SecureURL+"/debug/controllers/", token)
	if err == nil {
		err = json.Unmarshal([]byte(body), &shown)
	}
	assert.NoError(t, err)
	if shown["failing"].Restarts == 0 || !strings.Contains(shown["poisoned"].Problem, "panics") || !strings.Contains(shown["forbidden"].Problem, "Forbidden") || shown["config-reload"].Problem != "" {
		t.Errorf("/debug/controllers/ shows %+v", shown)
	}
	if out, _, _ := runStatus(ctx, t, "--endpoint="+m.SecureURL, "--endpoint-insecure"); !strings.Contains(out, "cannot list leases.coordination.k8s.io: Forbidden") {
		t.Errorf("manager status does not show the problem:\n%s", out)
	}
	s.WaitUntilKnown(ctx, t, "web")
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)

	// A repaired trouble disappears without a restart.
	assert.NoError(t, shared.InstallResource(ctx, doodads, "Doodad"))
	t.Cleanup(func() { _, _ = shared.Kubectl(context.Background(), "delete", "crd", doodads.GroupResource().String()) })
	waitForHealth("absent", http.StatusOK, "ok")
	poisoned.Annotations = nil
	if _, err := configMaps.Update(ctx, poisoned, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitForHealth("poisoned", http.StatusOK, "ok")
	if m.ExitCode() != -1 || standby.ExitCode() != -1 {
		t.Errorf("a manager ended, with %d or %d", m.ExitCode(), standby.ExitCode())
	}
}

func TestColdStandbyIsHealthy(t *testing.T) {
	ctx := fleet.Context(t)
	shared.RunLeader(ctx, t)
	m := shared.RunReplica(ctx, t, "--standby=cold")
	if _, err := m.WaitForLine(ctx, "Competing for the Lease"); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/healthz", "/healthz/controller-config-reload", "/readyz"} {
		if err := fleet.Answers(m.InsecureURL+path, "", http.StatusOK); err != nil {
			t.Error(err)
		}
	}
}

// TestControllerThatHangsKeepsTheLease uses a controller without any code for its drain, like a
// first attempt.
func TestControllerThatHangsKeepsTheLease(t *testing.T) {
	for name, tc := range map[string]struct {
		args     []string
		exitCode int
	}{
		"with an election, the write that has no answer keeps the Lease": {fleet.ShortTimings, 1},
		"without an election, nothing waits for the write":               {[]string{"--leader-elect=false"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			begin := time.Now()
			binary, err := cluster.BuildProgram(ctx, "examples/manager", fleet.Race())
			assert.NoError(t, err)
			assert.NoError(t, shared.ApplyDir(ctx, "../../examples/greeter"))
			s := shared.NewSample(ctx, t)
			_, err = shared.Admin.CoreV1().ConfigMaps(s.Namespace).Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: "greeted", Annotations: map[string]string{"example.com/greet": "world"}},
			}, metav1.CreateOptions{})
			assert.NoError(t, err)
			replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
			patch := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodPatch, "/namespaces/"+s.Namespace+"/configmaps/greeted"), Hold: make(chan struct{})})
			m := shared.Run(t, replica, cluster.ManagerOptions{Binary: binary, Args: append([]string{"--controllers=-config-reload", "--shutdown-timeout=3s"}, tc.args...)})
			assert.NoError(t, patch.WaitHits(ctx, 1))
			stopped := time.Now()
			assert.NoError(t, m.Signal(syscall.SIGTERM))
			if err := m.Wait(ctx); m.ExitCode() != tc.exitCode {
				t.Errorf("it ended with %d (%v), want %d", m.ExitCode(), err, tc.exitCode)
			}
			if took := time.Since(stopped); took < 1500*time.Millisecond {
				t.Errorf("it ended after %s, before half of --shutdown-timeout", took)
			}
			if _, err := m.WaitForLine(ctx, `"Loop is draining" controller="greeter" inFlight=[{"key":"`+s.Namespace+`/greeted"`); err != nil {
				t.Errorf("the log does not name what hangs: %v", err)
			}
			if n := len(shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsRelease(e, m.Pod) })); n != 0 {
				t.Errorf("the Lease was released %d times although a write was in flight", n)
			}
		})
	}
}
