// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// fencedPair is a leader and a standby that run while somebody changes the fence in the API server.
type fencedPair struct {
	*fleet.Workloads
	t                           *testing.T
	leader                      *replica
	follower                    *replica
	leaderClient, standbyClient kubernetes.Interface // clients with the tokens of the leader and of the standby
}

func newFencedPair(ctx context.Context, t *testing.T) *fencedPair {
	t.Helper()
	waitForFence(ctx, t)
	w := shared.NewWorkloads(ctx, t, 1)
	replicas := newReplicas(ctx, t, 2, setup{args: []string{"--insecure-metrics"}})
	leader, err := replicas.waitForLeader(ctx)
	assert.NoError(t, err)
	f := &fencedPair{Workloads: w, t: t, leader: leader, follower: replicas.others(leader)[0]}
	f.leaderClient, f.standbyClient = newClient(t, f.leader.Config()), newClient(t, f.follower.Config())
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx) })
	return f
}

// expectWork checks that the leader does its work, and returns how long that took. Nobody has an Event
// to read about it.
func (f *fencedPair) expectWork(ctx context.Context) time.Duration {
	f.t.Helper()
	begin := time.Now()
	assert.NoError(f.t, f.Change(ctx, 0))
	fleet.Eventually(ctx, f.t, func() error { return f.Settled(ctx) })
	took := time.Since(begin)
	if f.leader.hasEnded() {
		f.t.Fatal("the leader has ended")
	}
	events, err := shared.Admin.CoreV1().Events(f.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "type=Warning"})
	assert.NoError(f.t, err)
	for _, e := range events.Items {
		f.t.Errorf("a Warning on %s: %s %s", e.InvolvedObject.Name, e.Reason, e.Message)
	}
	return took
}

// expectRefusal checks that the API server refuses the standby.
func (f *fencedPair) expectRefusal(ctx context.Context) {
	f.t.Helper()
	waitForVerdict(ctx, f.t, f.standbyClient, refuses)
	for what, err := range tryLeaderWrites(ctx, f.Workloads, f.standbyClient) {
		if !isFenceRefusal(err) {
			f.t.Errorf("a standby may %s: %v", what, err)
		}
	}
}

// waitForState waits until the leader and the standby report the state of the fence.
func (f *fencedPair) waitForState(ctx context.Context, state apifence.State) {
	f.t.Helper()
	for _, r := range []*replica{f.leader, f.follower} {
		fleet.Eventually(ctx, f.t, func() error {
			return fleet.Answers(r.life().InsecureURL+"/metrics", "",
				200, fmt.Sprintf("quartermaster_leader_election_server_fence{lease_namespace=\"kube-system\",name=%q,state=%q} 1", fleet.LeaseName, state))
		})
	}
}

// fenceFile returns the path of a file of the component.
func fenceFile(t *testing.T, name string) string {
	t.Helper()
	root, err := controlplane.Root()
	assert.NoError(t, err)
	return filepath.Join(root, "deploy", "components", "fence", name)
}

func applyFence(ctx context.Context, t *testing.T) {
	t.Helper()
	if _, err := shared.Kubectl(ctx, "apply", "-f", fenceFile(t, "namespace.yaml"), "-f", fenceFile(t, "fence.yaml")); err != nil {
		t.Fatal(err)
	}
}

// deletePolicy deletes the policy and its binding.
func deletePolicy(ctx context.Context, t *testing.T) {
	t.Helper()
	admission := shared.Admin.AdmissionregistrationV1()
	err := errors.Join(
		admission.ValidatingAdmissionPolicyBindings().Delete(ctx, apifence.PolicyName, metav1.DeleteOptions{}),
		admission.ValidatingAdmissionPolicies().Delete(ctx, apifence.PolicyName, metav1.DeleteOptions{}))
	assert.NoError(t, err)
}

// deleteNamespace deletes the leader's Namespace, and does the part of kube-controller-manager, which
// does not run here.
func deleteNamespace(ctx context.Context, t *testing.T) {
	t.Helper()
	namespaces := shared.Admin.CoreV1().Namespaces()
	assert.NoError(t, namespaces.Delete(ctx, leaderNamespace, metav1.DeleteOptions{}))
	fleet.Eventually(ctx, t, func() error {
		ns, err := namespaces.Get(ctx, leaderNamespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil {
			ns.Spec.Finalizers = nil
			_, err = namespaces.Finalize(ctx, ns, metav1.UpdateOptions{})
		}
		return errors.Join(errors.New("the Namespace is still there"), err)
	})
}

// TestFenceChangesUnderALeader changes the fence in the API server while a leader and a standby
// run. The leader must go on writing, whatever is done; and wherever the fence is installed, the
// standby must be refused.
func TestFenceChangesUnderALeader(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 6*fleet.Patience)
	f := newFencedPair(ctx, t)
	f.waitForState(ctx, apifence.Enforced)
	t.Cleanup(func() { applyFence(context.Background(), t) }) // should a step have failed

	t.Run("deleted and applied again, four times", func(t *testing.T) {
		f.t = t
		for range 4 {
			deletePolicy(ctx, t)
			deleteNamespace(ctx, t)
			unfenced := f.expectWork(ctx)
			applyFence(ctx, t)
			waitForVerdict(ctx, t, tokenClient(ctx, t), cannotJudge)
			t.Logf("the leader took %s for its work without the fence, %s with it again", unfenced, f.expectWork(ctx))
			f.expectRefusal(ctx)
		}
	})
	t.Run("the policy deleted, and applied again", func(t *testing.T) {
		f.t = t
		deletePolicy(ctx, t)
		waitForVerdict(ctx, t, f.standbyClient, noFence)
		f.expectWork(ctx)
		applyFence(ctx, t)
		waitForVerdict(ctx, t, f.leaderClient, admits) // the name was there all the time
		f.expectWork(ctx)
		f.expectRefusal(ctx)
	})
	t.Run("the Namespace deleted, and applied again", func(t *testing.T) {
		f.t = t
		deleteNamespace(ctx, t)
		waitForVerdict(ctx, t, f.standbyClient, noFence) // without it the fence refuses nobody
		for writer, client := range map[string]kubernetes.Interface{"somebody else": shared.Admin, "the standby": f.standbyClient} {
			for what, err := range tryLeaderWrites(ctx, f.Workloads, client) {
				if err != nil {
					t.Errorf("%s may not %s: %v", writer, what, err)
				}
			}
		}
		f.expectWork(ctx)
		applyFence(ctx, t)
		waitForVerdict(ctx, t, f.leaderClient, refuses) // nobody is named until the leader has something to write
		t.Logf("the leader took %s for its work", f.expectWork(ctx))
		f.expectRefusal(ctx)
	})
	for name, leader := range map[string]string{
		"wiped by kubectl replace": "",
		"edited to name another":   "stranger_0",
	} {
		t.Run("the annotation "+name, func(t *testing.T) {
			f.t = t
			if leader != "" {
				nameLeader(ctx, t, leader)
			} else if _, err := shared.Kubectl(ctx, "replace", "-f", fenceFile(t, "namespace.yaml")); err != nil {
				t.Fatal(err)
			}
			waitForVerdict(ctx, t, f.leaderClient, refuses)
			t.Logf("the leader took %s for its work", f.expectWork(ctx))
			waitForVerdict(ctx, t, f.leaderClient, admits)
			f.expectRefusal(ctx)
		})
	}
}

// TestLongFenceChangesAreNoticed waits until a minute has passed, several times.
func TestLongFenceChangesAreNoticed(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 6*fleet.Patience)
	f := newFencedPair(ctx, t)
	t.Cleanup(func() { applyFence(context.Background(), t) })
	f.waitForState(ctx, apifence.Enforced)
	deletePolicy(ctx, t)
	f.waitForState(ctx, apifence.Absent)
	applyFence(ctx, t)
	f.waitForState(ctx, apifence.Enforced)
	deleteNamespace(ctx, t)
	f.waitForState(ctx, apifence.Absent)
	applyFence(ctx, t)
	f.waitForState(ctx, apifence.Enforced)
	f.expectWork(ctx)
	f.expectRefusal(ctx)
}
