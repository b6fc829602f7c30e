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
	// Replaced is set if the KubeFedCluster led to another cluster before.
	Replaced bool
	// AllowedUntil is what Cluster.AllowsRemovals returned.
	AllowedUntil time.Time
}

// Hold says whether a removal may go ahead.
type Hold int

// Reasons to hold a removal.
const (
	HoldNone Hold = iota
	// HoldUnlisted waits for complete lists.
	HoldUnlisted
	// HoldUnsettled waits until the cluster has been ready for long enough.
	HoldUnsettled
	// HoldGuarded waits until somebody allows it: RemovalHeld.
	HoldGuarded
)

// Check says whether a removal may go ahead, and when to ask again. byPlacement is set for a deletion because
// the federated object is no longer placed in the cluster, not because it is being deleted, and not for the
// removal of a label. The guard is in per cent: 0 holds every deletion by placement, 100 none.
func (r Removals) Check(byPlacement bool, availableDelay time.Duration, guard int, now time.Time) (Hold, time.Duration) {
	settled := r.ReadySince.Add(availableDelay)
	switch {
	case !r.Listed:
		return HoldUnlisted, 0
	case !byPlacement:
		return HoldNone, 0
	case r.Replaced:
		return HoldGuarded, 0
	case now.Before(settled):
		return HoldUnsettled, settled.Sub(now)
	case r.guarded(guard) && !now.Before(r.AllowedUntil):
		return HoldGuarded, 0
	}
	return HoldNone, 0
}

// HoldsUnrecorded reports whether a deletion by placement waits until somebody allows it if the host has no
// record of having written the object: the host may have been restored to a time before it was placed.
func (r Removals) HoldsUnrecorded(guard int, now time.Time) bool {
	return guard < 100 && !now.Before(r.AllowedUntil)
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

// ClusterRemoval is what is known of a cluster from which an object must be gone.
type ClusterRemoval struct {
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

// Results of a GET.
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

// RemovalState says whether a cluster still holds an object.
type RemovalState int

// States of a removal.
const (
	RemovalPending RemovalState = iota
	// RemovalUnknown means that a GET has to decide.
	RemovalUnknown
	RemovalDone
)

// State returns whether the object is gone from the cluster. The finalizer is removed when it is gone from
// all clusters.
func (c ClusterRemoval) State() RemovalState {
	switch {
	case !c.Joined:
		return RemovalDone
	case !c.Ready, c.Serving != Synced && c.Serving != Absent:
		return RemovalPending
	case c.Live != nil && (!c.Own || !c.Live.Deleting):
		return RemovalPending
	case c.Live != nil, !c.Expected, c.Checked == LiveAbsent:
		return RemovalDone
	case c.Checked == LivePresent:
		return RemovalPending
	}
	return RemovalUnknown
}
