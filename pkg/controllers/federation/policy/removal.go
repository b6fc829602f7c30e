// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"errors"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// guardFrom is how many deletions by placement the guard never holds.
const guardFrom = 10

// Removals is what is known of a cluster before a removal from it.
type Removals struct {
	// Listed is set once KubeFedClusters, FederatedTypeConfigs, the federated type and FederatedNamespaces
	// have been listed completely in this term: unknown is not absent.
	Listed bool
	// ReadySince is when the cluster became ready.
	ReadySince time.Time
	// Deletions counts the objects that placement would now delete, Managed all managed objects.
	Deletions, Managed int
	// AllowedUntil is what Cluster.AllowsRemovals returned.
	AllowedUntil time.Time
}

// Hold says whether a removal may go ahead.
type Hold int

// The answers.
const (
	Go Hold = iota
	// Incomplete waits for complete lists.
	Incomplete
	// NotSettled waits until the cluster has been ready for long enough.
	NotSettled
	// Guarded waits until somebody allows it: RemovalHeld.
	Guarded
)

// Holds says whether a removal may go ahead, and when to ask again. byPlacement is set for a deletion because
// the federated object is no longer placed in the cluster, not because it is being deleted, and not for the
// removal of a label. The guard is in per cent: 0 holds every deletion by placement, 100 none.
func (r Removals) Holds(byPlacement bool, availableDelay time.Duration, guard int, now time.Time) (Hold, time.Duration) {
	settled := r.ReadySince.Add(availableDelay)
	switch {
	case !r.Listed:
		return Incomplete, 0
	case !byPlacement:
		return Go, 0
	case now.Before(settled):
		return NotSettled, settled.Sub(now)
	case r.guarded(guard) && !now.Before(r.AllowedUntil):
		return Guarded, 0
	}
	return Go, 0
}

func (r Removals) guarded(guard int) bool {
	switch {
	case guard <= 0:
		return true
	case guard >= 100:
		return false
	}
	return r.Deletions > guardFrom && r.Deletions*100 > r.Managed*guard
}

// Orphan reports whether clusters keep their objects when the federated object is deleted.
func (f *Federated) Orphan() bool { return f.Annotations[OrphanAnnotation] == "true" }

// DeleteOptions returns the options, from the annotation of a deleted federated object, of deletions in
// clusters. While the annotation is malformed, nothing is deleted.
func (f *Federated) DeleteOptions() (options metav1.DeleteOptions, err error) {
	text, has := f.Annotations[DeleteOptionAnnotation]
	if !has {
		return options, nil
	}
	var given struct {
		GracePeriodSeconds *int64                      `json:"gracePeriodSeconds"`
		PropagationPolicy  *metav1.DeletionPropagation `json:"propagationPolicy"`
	}
	if json.Unmarshal([]byte(text), &given) != nil {
		return options, errors.New(DeleteOptionAnnotation + ": must be DeleteOptions in JSON")
	}
	if given.GracePeriodSeconds != nil && *given.GracePeriodSeconds < 0 {
		return options, errors.New(DeleteOptionAnnotation + ": gracePeriodSeconds must not be negative")
	}
	policies := []metav1.DeletionPropagation{metav1.DeletePropagationOrphan, metav1.DeletePropagationBackground, metav1.DeletePropagationForeground}
	if given.PropagationPolicy != nil && !slices.Contains(policies, *given.PropagationPolicy) {
		return options, errors.New(DeleteOptionAnnotation + ": propagationPolicy must be Orphan, Background or Foreground")
	}
	options.GracePeriodSeconds, options.PropagationPolicy = given.GracePeriodSeconds, given.PropagationPolicy
	return options, nil
}

// ToClear returns the clusters, sorted, that must be clean before a deleted federated object may go.
func ToClear(placed, recorded, holding []string) []string {
	all := slices.Concat(placed, recorded, holding)
	slices.Sort(all)
	return slices.Compact(all)
}

// Clearing is what is known of a cluster that must be clean.
type Clearing struct {
	// Joined is set if the KubeFedCluster exists. Without it, the cluster keeps what it has.
	Joined bool
	Ready  bool
	Serving
	// Live is the managed object in the cache, or nil. Own is set if it is the host's own Namespace.
	Live *LiveObject
	Own  bool
	// Expected is set if the federated object is placed or recorded in the cluster: then an empty cache is not
	// enough, since it may be late.
	Expected bool
	// Checked is the result of a GET, made because the cache has no object.
	Checked LiveCheck
}

// LiveCheck is the result of a GET.
type LiveCheck int

// The answers.
const (
	LiveUnknown LiveCheck = iota
	// LiveAbsent is no object, an unlabelled one, or the host's own Namespace being deleted.
	LiveAbsent
	// LivePresent is an object that must go first.
	LivePresent
)

// CheckLive returns what a GET has shown. Live is nil if there is no object.
func CheckLive(live metav1.Object, own bool) LiveCheck {
	if live == nil || live.GetLabels()[ManagedLabel] != "true" || own && live.GetDeletionTimestamp() != nil {
		return LiveAbsent
	}
	return LivePresent
}

// Clearance says whether a cluster still holds an object.
type Clearance int

// The answers.
const (
	NotCleared Clearance = iota
	// MustAsk wants a GET.
	MustAsk
	Cleared
)

// Clearance returns whether the cluster is clean. The finalizer is removed when all clusters are.
func (c Clearing) Clearance() Clearance {
	switch {
	case !c.Joined:
		return Cleared
	case !c.Ready, c.Serving != Synced && c.Serving != Absent:
		return NotCleared
	case c.Live != nil && (!c.Own || !c.Live.Deleting):
		return NotCleared
	case c.Live != nil, !c.Expected, c.Checked == LiveAbsent:
		return Cleared
	case c.Checked == LivePresent:
		return NotCleared
	}
	return MustAsk
}
