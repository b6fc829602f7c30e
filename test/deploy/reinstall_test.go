// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	standbyWrites = 5 // after each

	// firstWriteLimit is how long a new leader may take from its first request to its first write of a
	// workload, its start on a busy machine included.
	firstWriteLimit = 20 * time.Second
)

// TestLongReinstalledLeaderIsFenced applies and deletes deploy/ again and again, as a user does. Each time
// the new leader must write, and the fence in the API server must refuse the standby.
func TestLongReinstalledLeaderIsFenced(t *testing.T) {
	const rounds = 4
	for name, ended := range map[string]bool{
		"what was deleted while managers ran":           false,
		"what was deleted after the managers had ended": true,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Within(t.Context(), t, 4*fleet.Patience)
			stop := startKubelet(ctx, t, map[string]string{"quartermaster:v0.9.1": shared.Binary})
			t.Cleanup(func() { // for other tests
				if err := shared.Install(context.Background(), overlay(t)); err != nil {
					t.Error(err)
				}
			})
			s := shared.NewSample(ctx, t)
			s.Deploy(ctx, t, "shop", map[string]string{fleet.ReloadAnnotation: "auto", "quartermaster.dev/reload-delay": "0s"})
			refused := 0
			for round := range rounds {
				if round > 0 {
					if ended {
						removeDeployment(ctx, t)
					}
					deleteInstallation(ctx, t)
					s.Paint(ctx, t, fmt.Sprint("color-", round)) // work for the next leader
				}
				begin := time.Now()
				apply(ctx, t, "v0.9.1")
				waitForVersion(ctx, t, "v0.9.1")
				leader := shared.HolderPod(ctx, t)
				fleet.Eventually(ctx, t, func() error { return checkFirstWrite(t, begin, leader) })
				refused += refusedWrites(ctx, t, s.Namespace, leader)
				if round > 0 {
					expectFirstTerm(ctx, t)
				}
			}
			if want := rounds * standbyWrites; refused != want {
				t.Errorf("the API server has refused %d of %d writes of standbys", refused, want)
			}
			removeDeployment(ctx, t)
			if _, err := stop(); err != nil && ended { // without its account a manager does not end well
				t.Error(err)
			}
		})
	}
}

// expectFirstTerm checks that the leader did not wait for a leader of the former installation: its term
// is the first of a new Lease.
func expectFirstTerm(ctx context.Context, t *testing.T) {
	t.Helper()
	lease, err := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	assert.NoError(t, err)
	if n := ptr.Deref(lease.Spec.LeaseTransitions, 0); n != 1 {
		t.Errorf("the leader has term %d of its Lease", n)
	}
}

// deleteInstallation deletes what deploy/ has installed, and waits until it is gone.
func deleteInstallation(ctx context.Context, t *testing.T) {
	t.Helper()
	begin := time.Now()
	if _, err := shared.Kubectl(ctx, "delete", "--ignore-not-found", "-k", overlay(t)); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error {
		pods, err := shared.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster"})
		if err != nil {
			return err
		}
		for i := range pods.Items {
			if metav1.GetControllerOf(&pods.Items[i]) != nil { // the others belong to other tests
				return fmt.Errorf("Pod %s is left", pods.Items[i].Name)
			}
		}
		return nil
	})
	end := time.Now()
	shared.ExpectRefusals(func(e auditv1.Event) bool { // of managers without roles
		at := e.RequestReceivedTimestamp.Time
		return at.After(begin) && at.Before(end)
	})
}

// checkFirstWrite returns nil once the leader has written a workload, and checks how soon it has.
func checkFirstWrite(t *testing.T, begin time.Time, leader string) error {
	t.Helper()
	var first time.Time
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == leader }) {
		at := e.RequestReceivedTimestamp.Time
		if first.IsZero() || at.Before(first) {
			first = at
		}
		if fleet.IsControllerWrite(e, leader) && e.ResponseStatus != nil && e.ResponseStatus.Code == 200 {
			took := at.Sub(first)
			if t.Logf("%s wrote %s after its first request", leader, took.Round(time.Millisecond)); took > firstWriteLimit {
				t.Errorf("this is more than %s", firstWriteLimit)
			}
			return nil
		}
	}
	return errors.New(leader + " has written nothing yet")
}

// refusedWrites returns how many writes of a replica that does not lead the fence has refused.
func refusedWrites(ctx context.Context, t *testing.T, namespace, leader string) (refused int) {
	t.Helper()
	pods, err := shared.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster"})
	assert.NoError(t, err)
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Name == leader || metav1.GetControllerOf(pod) == nil {
			continue
		}
		replica, err := shared.ReplicaOf(ctx, pod)
		assert.NoError(t, err)
		client, err := kubernetes.NewForConfig(replica.Config())
		assert.NoError(t, err)
		for range standbyWrites {
			_, err := client.AppsV1().Deployments(namespace).Patch(ctx, "shop", types.MergePatchType,
				[]byte(`{"metadata":{"annotations":{"by":"a standby"}}}`), metav1.PatchOptions{})
			if apierrors.IsForbidden(err) && strings.Contains(err.Error(), apifence.PolicyName+": written by Pod "+pod.Name) {
				refused++
			} else {
				t.Errorf("a write of %s while %s leads: %v", pod.Name, leader, err)
			}
		}
		return refused
	}
	t.Error("there is no standby")
	return 0
}
