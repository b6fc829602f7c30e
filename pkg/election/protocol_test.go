// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var testTiming = timing{lease: 15 * time.Second, deadline: 10 * time.Second, retry: 2 * time.Second}

// testLease returns a Lease as renewed at the second that is its version.
func testLease(version string, transitions int32, holder string, change ...func(*coordinationv1.Lease)) *coordinationv1.Lease {
	lease := newLease(types.NamespacedName{Namespace: "ns", Name: "lease"}, holder, 15*time.Second, time.Unix(0, 0))
	lease.UID, lease.ResourceVersion = "uid", version
	lease.Spec.LeaseTransitions = ptr.To(transitions)
	seconds := time.Duration(len(version)) * time.Second
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(time.Unix(0, 0).Add(seconds)))
	for _, c := range change {
		c(lease)
	}
	return lease
}

func released(l *coordinationv1.Lease)  { *l = *releasedLease(l, time.Unix(99, 0)) }
func recreated(l *coordinationv1.Lease) { l.UID = "other" }
func lasting(d time.Duration) func(*coordinationv1.Lease) {
	return func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(int32(d / time.Second)) }
}
