// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func TestStandbyWritesNothing(t *testing.T) {
	ctx := fleet.Context(t)
	begin := time.Now()
	s := shared.NewSample(ctx, t)
	leader := shared.RunLeader(ctx, t)
	standby := shared.RunStandby(ctx, t)
	s.WaitUntilKnown(ctx, t, "web")
	for i := range 3 {
		s.Paint(ctx, t, fmt.Sprintf("red-%d", i))
		s.WaitForReplicaSets(ctx, t, "web", 2+i)
	}

	writes := func(m *cluster.Manager) []auditv1.Event {
		return shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsControllerWrite(e, m.Pod) })
	}
	if n := len(writes(leader)); n < 3 {
		t.Errorf("the audit log has %d writes of the leader: the test does not see writes", n)
	}
	for _, e := range writes(standby) {
		t.Errorf("the standby wrote: %s %s", e.Verb, e.RequestURI)
	}
	// There must be no request at all, not even a refused one or one for a Lease. The probe for the
	// fence is a dry run that is always refused.
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == standby.Pod }) {
		isProbe := e.ObjectRef != nil && e.ObjectRef.Resource == "namespaces" && strings.HasSuffix(e.RequestURI, "?dryRun=All")
		switch e.Verb {
		case "get", "list", "watch":
		default:
			if !isProbe && e.ObjectRef.APIGroup != "authentication.k8s.io" && e.ObjectRef.APIGroup != "authorization.k8s.io" {
				t.Errorf("the standby tried to write: %s %s", e.Verb, e.RequestURI)
			}
		}
	}
}

func TestStandbyTakesOver(t *testing.T) {
	for name, tc := range map[string]struct {
		signal syscall.Signal
		code   int
	}{
		"after SIGTERM, which the old leader survives in good order": {syscall.SIGTERM, 0},
		"after SIGINT, which the old leader survives in good order":  {syscall.SIGINT, 0},
		"after SIGKILL, before the Lease has expired":                {syscall.SIGKILL, 128 + 9},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			s := shared.NewSample(ctx, t)
			old := shared.RunLeader(ctx, t, fleet.ShortTimings...)
			next := shared.RunStandby(ctx, t, fleet.ShortTimings...)
			s.WaitUntilKnown(ctx, t, "web")
			before := shared.Lease(ctx, t).Spec.LeaseTransitions

			assert.NoError(t, old.Signal(tc.signal))
			shared.WaitForLeader(ctx, t, next)
			if err := old.Wait(ctx); err != nil && old.ExitCode() == -1 {
				t.Fatal(err)
			}
			if old.ExitCode() != tc.code {
				t.Errorf("the old leader ended with %d, want %d", old.ExitCode(), tc.code)
			}
			if after := shared.Lease(ctx, t).Spec.LeaseTransitions; *after != *before+1 {
				t.Errorf("leaseTransitions went from %d to %d", *before, *after)
			}
			s.Paint(ctx, t, "red")
			s.WaitForReplicaSets(ctx, t, "web", 2)
		})
	}
}

func TestDrainFinishesReconcilesBeforeTheRelease(t *testing.T) {
	ctx := fleet.Context(t)
	begin := time.Now()
	s := shared.NewSample(ctx, t)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	m := shared.Run(t, replica, cluster.ManagerOptions{})
	shared.WaitForLeader(ctx, t, m)
	s.WaitUntilKnown(ctx, t, "web")

	release := make(chan struct{})
	patch := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodPatch, "/namespaces/"+s.Namespace+"/deployments/web"), Hold: release})
	s.Paint(ctx, t, "red")
	assert.NoError(t, patch.WaitHits(ctx, 1))
	assert.NoError(t, m.Signal(syscall.SIGTERM))
	// It holds on: it is alive, serves probes and holds the Lease. Two renewals prove that it
	// continues.
	if _, err := m.WaitForLine(ctx, "a second signal ends the process"); err != nil {
		t.Fatal(err)
	}
	renewals := len(shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsRenewal(e, m.Pod) }))
	fleet.Eventually(ctx, t, func() error {
		if n := len(shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsRenewal(e, m.Pod) })); n < renewals+2 {
			return fmt.Errorf("%d renewals after SIGTERM", n-renewals)
		}
		return nil
	})
	if err := fleet.Answers(m.InsecureURL+"/livez", "", 200); err != nil {
		t.Errorf("while it drains: %v", err)
	}
	close(release)

	if err := m.Wait(ctx); err != nil {
		t.Errorf("it did not end with 0: %v\n%s", err, m.Tail(20))
	}
	if holder := shared.HolderPod(ctx, t); holder != "" {
		t.Errorf("the Lease is still held by %s", holder)
	}
	var released []auditv1.Event
	fleet.Eventually(ctx, t, func() error { // the API server logs a request after its response
		if released = shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsRelease(e, m.Pod) }); len(released) == 0 {
			return errors.New("no release in the audit log")
		}
		return nil
	})
	patched := shared.AuditSince(t, begin, func(e auditv1.Event) bool {
		return fleet.IsControllerWrite(e, m.Pod) && e.Verb == "patch" && e.ObjectRef.Namespace == s.Namespace
	})
	if len(patched) != 2 || len(released) != 1 { // the state, then the reload
		t.Fatalf("%d patches and %d releases in the audit log, want 2 and 1", len(patched), len(released))
	}
	if last := patched[1].StageTimestamp; !last.Time.Before(released[0].RequestReceivedTimestamp.Time) {
		t.Errorf("the patch was done at %s, the Lease released before, at %s", last, released[0].RequestReceivedTimestamp)
	}
	s.WaitForReplicaSets(ctx, t, "web", 2)
}

func TestDrainTooLongDoesNotRelease(t *testing.T) {
	ctx := fleet.Context(t)
	begin := time.Now()
	s := shared.NewSample(ctx, t)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: append([]string{"--shutdown-timeout=1s"}, fleet.ShortTimings...)})
	shared.WaitForLeader(ctx, t, m)
	s.WaitUntilKnown(ctx, t, "web")

	patch := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodPatch, "/deployments/web"), Hold: make(chan struct{})})
	s.Paint(ctx, t, "red")
	assert.NoError(t, patch.WaitHits(ctx, 1))
	assert.NoError(t, m.Signal(syscall.SIGTERM))
	if err := m.Wait(ctx); m.ExitCode() != 1 {
		t.Errorf("it ended with %d (%v), want 1", m.ExitCode(), err)
	}
	if n := len(shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsRelease(e, m.Pod) })); n != 0 {
		t.Errorf("the Lease was released %d times although a reconcile was in flight", n)
	}
	// The Lease expires; nobody has to wait longer than that.
	shared.RunLeader(ctx, t, fleet.ShortTimings...)
}

func TestSignalTwiceEndsAtOnce(t *testing.T) {
	ctx := fleet.Context(t)
	s := shared.NewSample(ctx, t)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: append([]string{"--shutdown-timeout=10m"}, fleet.ShortTimings...)})
	shared.WaitForLeader(ctx, t, m)
	s.WaitUntilKnown(ctx, t, "web")
	patch := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodPatch, "/deployments/web"), Hold: make(chan struct{})})
	s.Paint(ctx, t, "red")
	assert.NoError(t, patch.WaitHits(ctx, 1))
	assert.NoError(t, m.Signal(syscall.SIGTERM))
	if _, err := m.WaitForLine(ctx, "a second signal ends the process"); err != nil {
		t.Fatal(err)
	}
	assert.NoError(t, m.Signal(syscall.SIGTERM))
	_ = m.Wait(ctx) // the exit code is checked below
	if m.ExitCode() != 128+int(syscall.SIGTERM) {
		t.Errorf("after a second signal it ended with %d, want %d", m.ExitCode(), 128+int(syscall.SIGTERM))
	}
}

func TestLongStartWaitsForTheAPIServer(t *testing.T) {
	ctx := fleet.Context(t)
	s := shared.NewSample(ctx, t)
	replica := shared.NewReplica(ctx, t)
	assert.NoError(t, shared.StopAPIServer(ctx))
	t.Cleanup(func() {
		if err := shared.StartAPIServer(context.Background()); err != nil {
			t.Error(err)
		}
	})
	m := shared.Run(t, replica, cluster.ManagerOptions{})
	if _, err := m.WaitForLine(ctx, "Waiting for the API server"); err != nil {
		t.Fatal(err)
	}
	if err := fleet.Answers(m.SecureURL+"/livez", "", 200); err != nil {
		t.Errorf("while it waits: %v", err)
	}
	if err := fleet.Answers(m.SecureURL+"/readyz", "", 500); err != nil {
		t.Errorf("while it waits: %v", err)
	}
	assert.NoError(t, shared.StartAPIServer(ctx))
	shared.WaitForLeader(ctx, t, m)
	s.WaitUntilKnown(ctx, t, "web")

	// It restarts while a manager leads: the manager does not restart, and work continues.
	assert.NoError(t, shared.RestartAPIServer(ctx))
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)
	if m.ExitCode() != -1 {
		t.Errorf("the manager ended with %d", m.ExitCode())
	}
}
