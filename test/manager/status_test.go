// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// runStatus runs `manager status` as the administrator and returns its stdout, its stderr and its
// exit code.
func runStatus(ctx context.Context, t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(ctx, shared.Binary, append([]string{"status", "--kubeconfig=" + shared.Kubeconfig()}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// status is the part of the JSON that the test checks.
type status struct {
	Leader struct {
		Leads                bool
		Holder, Pod          string
		LeaseUID             string
		Term                 int32
		LeaseDurationSeconds int32
	}
	Fence    struct{ State, Source string }
	Replicas []struct {
		Name, Phase, Endpoint, Error string
		Reached                      bool
		Controllers                  []struct{ Name, Phase string }
	}
	Problems []string
}

func readStatus(ctx context.Context, t *testing.T, args ...string) (s status, code int) {
	t.Helper()
	out, errs, code := runStatus(ctx, t, append(args, "--output=json")...)
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("%v; it printed:\n%s%s", err, out, errs)
	}
	return s, code
}

// leaderReader returns the kubeconfig of a user who may read the Lease and one of the two paths.
func leaderReader(ctx context.Context, t *testing.T) string {
	t.Helper()
	const name = "leader-reader"
	_, err := shared.Admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get"}},
			{NonResourceURLs: []string{"/debug/leader"}, Verbs: []string{"get"}},
		},
	}, metav1.CreateOptions{})
	assert.NoError(t, err)
	config, err := clientcmd.LoadFromFile(shared.Kubeconfig())
	assert.NoError(t, err)
	for user := range config.AuthInfos {
		config.AuthInfos[user] = &api.AuthInfo{Token: shared.NewToken(ctx, t, name, name)}
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	assert.NoError(t, clientcmd.WriteToFile(*config, path))
	return path
}

func TestStatusShowsTwoReplicas(t *testing.T) {
	ctx := fleet.Context(t)
	leader := shared.RunLeader(ctx, t, fleet.ShortTimings...)
	standby := shared.RunStandby(ctx, t, fleet.ShortTimings...)
	// The leader has tested the fence, and its controller runs.
	token := shared.NewToken(ctx, t, "status-reader", "cluster-admin")
	waitForBody(ctx, t, leader, token, "/debug/leader?format=json", `"serverFence": "Enforced"`)
	waitForBody(ctx, t, leader, token, "/debug/controllers/config-reload", `"phase": "Running"`)
	endpoints := []string{"--endpoint=" + leader.SecureURL, "--endpoint=" + standby.SecureURL, "--endpoint-insecure"}
	lease := shared.Lease(ctx, t)

	t.Run("who leads is in the Lease, the rest is asked of the replicas", func(t *testing.T) {
		s, code := readStatus(ctx, t, endpoints...)
		if code != 0 || !s.Leader.Leads || s.Leader.Pod != leader.Pod || s.Leader.Holder != *lease.Spec.HolderIdentity || s.Leader.LeaseUID != string(lease.UID) ||
			s.Leader.Term != ptr.Deref(lease.Spec.LeaseTransitions, 0) || s.Leader.LeaseDurationSeconds != 3 {
			t.Errorf("exit code %d, leader %+v", code, s.Leader)
		}
		if s.Fence.State != "Enforced" || len(s.Problems) > 0 {
			t.Errorf("fence %+v, problems %v", s.Fence, s.Problems)
		}
		phases := map[string][2]string{leader.Pod: {"Leading", "Running"}, standby.Pod: {"Standby", "Stopped"}}
		for _, r := range s.Replicas {
			want, expected := phases[r.Name]
			if !expected {
				continue // the Pod of another test
			}
			delete(phases, r.Name)
			if !r.Reached || r.Phase != want[0] || len(r.Controllers) == 0 || r.Controllers[0].Name != "config-reload" || r.Controllers[0].Phase != want[1] {
				t.Errorf("replica %+v, want %v", r, want)
			}
		}
		if len(phases) > 0 {
			t.Errorf("missing: %v", phases)
		}
	})
	t.Run("a table for people", func(t *testing.T) {
		out, _, code := runStatus(ctx, t, endpoints...)
		for _, want := range []string{"Leader:        " + leader.Pod, "API fence:     Enforced", "CONTROLLER"} {
			if code != 0 || !strings.Contains(out, want) {
				t.Errorf("exit code %d, no %q in\n%s", code, want, out)
			}
		}
	})
	t.Run("without a way to the replicas it says so, and that the fence is untested", func(t *testing.T) {
		s, code := readStatus(ctx, t)
		if code != 0 || !s.Leader.Leads || s.Fence.State != "Installed" {
			t.Errorf("exit code %d, %+v", code, s)
		}
		for _, r := range s.Replicas {
			if r.Reached || r.Error == "" {
				t.Errorf("replica %+v", r)
			}
		}
	})
	t.Run("with a certificate that it cannot verify it says so", func(t *testing.T) {
		s, code := readStatus(ctx, t, "--endpoint="+leader.SecureURL)
		failed := s.Replicas[len(s.Replicas)-1]
		if code != 0 || failed.Endpoint != leader.SecureURL || failed.Reached || !strings.Contains(failed.Error, "certificate") {
			t.Errorf("exit code %d, replica %+v", code, failed)
		}
	})
	t.Run("to a user who may read one path it shows that one", func(t *testing.T) {
		s, code := readStatus(ctx, t, append(endpoints, "--kubeconfig="+leaderReader(ctx, t))...)
		for _, r := range s.Replicas {
			if r.Name == leader.Pod && r.Phase == "Leading" && len(r.Controllers) == 0 && r.Error == "/debug/controllers/: forbidden" {
				return
			}
		}
		t.Errorf("exit code %d, replicas %+v", code, s.Replicas)
	})
	t.Run("another Lease does not exist", func(t *testing.T) {
		out, errs, code := runStatus(ctx, t, "--lease-name=other")
		if code != 1 || strings.TrimSpace(errs) != "Error: nobody leads" || !strings.Contains(out, "no Lease kube-system/other") {
			t.Errorf("exit code %d: %s\n%s", code, errs, out)
		}
	})
	t.Run("an expired Lease is nobody's", func(t *testing.T) {
		_ = standby.Signal(syscall.SIGKILL)
		_ = leader.Signal(syscall.SIGKILL)
		fleet.Eventually(ctx, t, func() error {
			_, errs, code := runStatus(ctx, t)
			if code != 1 || strings.TrimSpace(errs) != "Error: nobody leads" {
				return stillLeadsError(errs)
			}
			return nil
		})
		s, _ := readStatus(ctx, t)
		if s.Leader.Leads || s.Leader.Pod != leader.Pod {
			t.Errorf("leader %+v", s.Leader)
		}
	})
	t.Run("an API server that is not there is an error", func(t *testing.T) {
		_, errs, code := runStatus(ctx, t, "--kubeconfig=/nonexistent")
		if code != 1 || !strings.Contains(errs, "Error: --kubeconfig, --context: ") {
			t.Errorf("exit code %d: %s", code, errs)
		}
	})
}

type stillLeadsError string

func (e stillLeadsError) Error() string { return "it still says: " + string(e) }
