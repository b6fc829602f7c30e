// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// LeaseName is the managers' Lease, in kube-system.
const LeaseName = "quartermaster"

// Lease reads the managers' Lease.
func (f *Fleet) Lease(ctx context.Context, t testing.TB) *coordinationv1.Lease {
	t.Helper()
	l, err := f.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, LeaseName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// HolderPod returns the Pod in the holder's identity, "" if nobody holds the Lease.
func (f *Fleet) HolderPod(ctx context.Context, t testing.TB) string {
	t.Helper()
	return protocol.PodOf(ptr.Deref(f.Lease(ctx, t).Spec.HolderIdentity, ""))
}

// WaitForLeader waits until the Lease names m.
func (f *Fleet) WaitForLeader(ctx context.Context, t testing.TB, m *cluster.Manager) {
	t.Helper()
	Eventually(ctx, t, func() error {
		if holder := f.HolderPod(ctx, t); holder != m.Pod {
			return fmt.Errorf("the Lease is held by %q, not by %s", holder, m.Pod)
		}
		return nil
	})
}

// FreeLease takes the Lease from a manager that has ended without releasing it, so that nobody has
// to wait until it expires.
func (f *Fleet) FreeLease(t testing.TB, m *cluster.Manager) {
	t.Helper()
	ctx := Within(context.Background(), t, Patience)
	leases := f.Admin.CoordinationV1().Leases(metav1.NamespaceSystem)
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		l, err := leases.Get(ctx, LeaseName, metav1.GetOptions{})
		if err != nil || protocol.PodOf(ptr.Deref(l.Spec.HolderIdentity, "")) != m.Pod {
			return err
		}
		l.Spec.HolderIdentity, l.Spec.RenewTime = nil, ptr.To(metav1.NowMicro())
		_, err = leases.Update(ctx, l, metav1.UpdateOptions{})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Error(err)
	}
}

// AuditSince returns the audit log's events of requests that arrived after begin and match.
func (f *Fleet) AuditSince(t testing.TB, begin time.Time, match func(auditv1.Event) bool) []auditv1.Event {
	t.Helper()
	all, err := f.AuditEvents()
	if err != nil {
		t.Fatal(err)
	}
	var got []auditv1.Event
	for _, e := range all {
		if e.RequestReceivedTimestamp.After(begin) && match(e) {
			got = append(got, e)
		}
	}
	return got
}

// IsControllerWrite reports whether the event is a write by the Pod's manager that only a leader
// may do: not of a Lease or an Event, nor of the Namespace that names the leader.
func IsControllerWrite(e auditv1.Event, pod string) bool {
	if !cluster.AuditWrite(e) || cluster.AuditPod(e) != pod || e.ObjectRef == nil {
		return false
	}
	return !slices.Contains([]string{"leases", "events", "namespaces"}, e.ObjectRef.Resource)
}

// IsRelease reports whether the event is the write with which the Pod's manager releases its Lease.
// Its watch may show the release before the answer comes: the manager then drops the request, and the
// API server logs code 504 for what it has stored.
func IsRelease(e auditv1.Event, pod string) bool {
	dropped := e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusGatewayTimeout
	return isLeaseWrite(e, pod) && (dropped || cluster.AuditWrite(e)) && !namesHolder(e, pod)
}

// IsRenewal reports whether the event is a write with which the Pod's manager takes or renews its
// Lease.
func IsRenewal(e auditv1.Event, pod string) bool {
	return isLeaseWrite(e, pod) && cluster.AuditWrite(e) && namesHolder(e, pod)
}

func isLeaseWrite(e auditv1.Event, pod string) bool {
	return e.Stage == auditv1.StageResponseComplete && cluster.AuditPod(e) == pod &&
		e.ObjectRef != nil && e.ObjectRef.Resource == "leases" && e.RequestObject != nil
}

func namesHolder(e auditv1.Event, pod string) bool {
	return strings.Contains(string(e.RequestObject.Raw), `"holderIdentity":"`+pod)
}
