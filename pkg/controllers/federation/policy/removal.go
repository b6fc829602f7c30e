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

// Removals is what is known of a cluster before placement deletes an object there.
type Removals struct {
	// ReadySince is when the cluster became ready.
	ReadySince time.Time
	// Deletions counts the objects that placement would now delete, Managed all managed objects.
	Deletions, Managed int
	// Replaced is set if the KubeFedCluster led to another cluster before.
	Replaced bool
	// AllowedUntil is until when the KubeFedCluster allows removals.
	AllowedUntil time.Time
}

// Hold returns the status of a deletion by placement that must wait, and for how long if that is known. ""
// lets it go ahead. The guard is in per cent: 0 holds every deletion by placement, 100 none.
func (r Removals) Hold(availableDelay time.Duration, guard int, now time.Time) (status string, wait time.Duration) {
	settled := r.ReadySince.Add(availableDelay)
	switch {
	case r.Replaced:
		return RemovalHeld, 0
	case now.Before(settled):
		return WaitingForRemoval, settled.Sub(now)
	case r.guarded(guard) && !now.Before(r.AllowedUntil):
		return RemovalHeld, 0
	}
	return "", 0
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

// Present reports whether an object that was read must be gone before a deleted federated object may go. Own
// is set if it is the host's own Namespace.
func Present(live metav1.Object, own bool) bool {
	return live.GetLabels()[ManagedLabel] == "true" && (!own || live.GetDeletionTimestamp() == nil)
}
