// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"fmt"
	"math"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/ptr"
)

// ReleasedDuration is the leaseDurationSeconds of a released Lease, as client-go writes it. It
// distinguishes a release from a holder that was edited away.
const ReleasedDuration = time.Second

// Term is one uninterrupted leadership. It does not repeat: within a Lease the transitions grow until
// they wrap, and a Lease that was deleted returns with another UID. Only a restored store or an edit of
// the transitions takes the numbers back.
type Term struct {
	LeaseUID    types.UID `json:"leaseUID"`
	Transitions int32     `json:"transitions"`
}

// String implements fmt.Stringer.
func (t Term) String() string {
	return fmt.Sprintf("%s/%d", t.LeaseUID, t.Transitions)
}

// next returns the term of the next holder. Somebody who edits the transitions to their maximum must
// not block the Lease for ever.
func (t Term) next() Term {
	if t.Transitions == math.MaxInt32 {
		return Term{LeaseUID: t.LeaseUID}
	}
	return Term{LeaseUID: t.LeaseUID, Transitions: t.Transitions + 1}
}

// TermOf returns the term of the Lease.
func TermOf(lease *coordinationv1.Lease) Term {
	return Term{LeaseUID: lease.UID, Transitions: ptr.Deref(lease.Spec.LeaseTransitions, 0)}
}

// HolderOf returns the identity of the holder, "" if there is none.
func HolderOf(lease *coordinationv1.Lease) string {
	return ptr.Deref(lease.Spec.HolderIdentity, "")
}

// PodOf returns the Pod's name in an identity, which a UUID follows.
func PodOf(identity string) string {
	pod, _, _ := strings.Cut(identity, "_") // a Pod's name has none
	return pod
}

// DurationOf returns how long others must wait after a write by the holder: what the holder has
// written, MaxLease at most, or fallback if it has written nothing.
func DurationOf(lease *coordinationv1.Lease, fallback time.Duration) time.Duration {
	if lease == nil || lease.Spec.LeaseDurationSeconds == nil {
		return fallback
	}
	return min(time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second, MaxLease)
}

// isFree reports whether nobody holds the Lease and nobody may believe to hold it: either an
// installer created it and it was never held, or it was released. A release sets both times to the
// same value; if somebody removes the holder by hand, they differ.
func isFree(lease *coordinationv1.Lease) bool {
	if HolderOf(lease) != "" {
		return false
	}
	renewed, acquired := lease.Spec.RenewTime, lease.Spec.AcquireTime
	return renewed == nil ||
		DurationOf(lease, ReleasedDuration) <= ReleasedDuration && acquired != nil && renewed.Equal(acquired)
}

// isNewer reports whether a is a later version than b. Versions that cannot be ordered count as
// later. That is safe: a standby waits, a leader stops.
func isNewer(a, b *coordinationv1.Lease) bool {
	if a.ResourceVersion == b.ResourceVersion {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err != nil || order > 0
}

// isOlder reports whether a is an earlier version than b.
func isOlder(a, b *coordinationv1.Lease) bool {
	if a == nil || b == nil || a.ResourceVersion == b.ResourceVersion {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// isNext reports whether the later version belongs to the next term.
func isNext(earlier, later *coordinationv1.Lease) bool {
	return TermOf(later) == TermOf(earlier).next()
}

// isSameHolding reports whether the later version is a renewal, a release, or an edit of other
// fields.
func isSameHolding(earlier, later *coordinationv1.Lease) bool {
	if TermOf(earlier) != TermOf(later) {
		return false
	}
	return HolderOf(earlier) == HolderOf(later) || isRelease(earlier, later)
}

// isRelease reports whether the later version of the same term is its release. A release sets both
// times again; two manual edits that look like one do not.
func isRelease(earlier, later *coordinationv1.Lease) bool {
	return HolderOf(earlier) != "" && isFree(later) && !later.Spec.RenewTime.Equal(earlier.Spec.RenewTime)
}

// NewLease returns the Lease to create if there is none.
func NewLease(name types.NamespacedName, identity string, duration time.Duration, now time.Time) *coordinationv1.Lease {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	lease.Spec.LeaseTransitions = ptr.To[int32](0)
	setHolder(lease, identity, duration, now)
	return lease
}

// AcquiredLease returns the Lease with a new holder. The times are for people and dashboards; no
// elector decides by them.
func AcquiredLease(lease *coordinationv1.Lease, identity string, duration time.Duration, now time.Time) *coordinationv1.Lease {
	lease = lease.DeepCopy()
	lease.Spec.LeaseTransitions = ptr.To(TermOf(lease).next().Transitions)
	setHolder(lease, identity, duration, now)
	return lease
}

// setHolder writes a record whose two times differ by the least that the Lease can carry, so that it
// never looks like a release.
func setHolder(lease *coordinationv1.Lease, identity string, duration time.Duration, now time.Time) {
	lease.Spec.HolderIdentity = ptr.To(identity)
	lease.Spec.LeaseDurationSeconds = ptr.To(int32(duration / time.Second))
	lease.Spec.AcquireTime = ptr.To(metav1.NewMicroTime(now.Add(-time.Microsecond)))
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(now))
}

// renewedLease also restores the duration, in case somebody has edited it.
func renewedLease(lease *coordinationv1.Lease, duration time.Duration, now time.Time) *coordinationv1.Lease {
	lease = lease.DeepCopy()
	lease.Spec.LeaseDurationSeconds = ptr.To(int32(duration / time.Second))
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(now))
	return lease
}

// ReleasedLease returns the Lease as client-go releases it, so that its electors, too, take the
// Lease without waiting.
func ReleasedLease(lease *coordinationv1.Lease, now time.Time) *coordinationv1.Lease {
	lease = lease.DeepCopy()
	setHolder(lease, "", ReleasedDuration, now)
	lease.Spec.AcquireTime = lease.Spec.RenewTime
	delete(lease.Annotations, ProcessAnnotation)
	return lease
}
