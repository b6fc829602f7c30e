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

// Removals is what is known of a cluster when something is to be removed from it.
type Removals struct {
	// Listed is that KubeFedClusters, FederatedTypeConfigs, the federated type and FederatedNamespaces
	// have been listed completely in this term: unknown is not absent.
	Listed bool
	// ReadySince is when the cluster became ready.
	ReadySince time.Time
	// Deletions are what placement would now delete, of so many managed objects.
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

// Holds says whether a removal may go ahead, and when to ask again. byPlacement is a deletion because F
// is no longer placed in the cluster; a deletion of F, and the removal of a label, is none. The guard
// is in per cent: 0 holds every deletion by placement, 100 none.
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

// Orphan reports whether clusters keep their objects when F is deleted.
func (f *Federated) Orphan() bool { return f.Annotations[OrphanAnnotation] == "true" }

// DeleteOptions returns what the annotation of F says of deletions in clusters when F is deleted. While
// it is malformed, nothing is deleted.
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
		return options, errors.New(DeleteOptionAnnotation + " is no JSON of DeleteOptions")
	}
	if given.GracePeriodSeconds != nil && *given.GracePeriodSeconds < 0 {
		return options, errors.New(DeleteOptionAnnotation + ": gracePeriodSeconds is negative")
	}
	policies := []metav1.DeletionPropagation{metav1.DeletePropagationOrphan, metav1.DeletePropagationBackground, metav1.DeletePropagationForeground}
	if given.PropagationPolicy != nil && !slices.Contains(policies, *given.PropagationPolicy) {
		return options, errors.New(DeleteOptionAnnotation + ": propagationPolicy is none of Orphan, Background, Foreground")
	}
	options.GracePeriodSeconds, options.PropagationPolicy = given.GracePeriodSeconds, given.PropagationPolicy
	return options, nil
}

// ToClear returns the clusters, sorted, that must be clean before a deleted F may go.
func ToClear(placed, recorded, holding []string) []string {
	all := slices.Concat(placed, recorded, holding)
	slices.Sort(all)
	return slices.Compact(all)
}

// Clearing is what is known of a cluster that must be clean.
type Clearing struct {
	// Joined is that there is a KubeFedCluster. Without one, the cluster keeps what it has.
	Joined bool
	Ready  bool
	Serving
	// Live is the managed object in the cache, or nil. Own is that it is the host's own Namespace.
	Live *Member
	Own  bool
	// Expected is that F is placed or recorded in the cluster: then an empty cache is not enough, since it
	// may be late.
	Expected bool
	// Asked is what a GET found since the cache shows none.
	Asked Asked
}

// Asked is what a GET found.
type Asked int

// The answers.
const (
	NotAsked Asked = iota
	// AskedClean is no object, an unlabelled one, or the host's own Namespace being deleted.
	AskedClean
	// AskedHeld is an object that must go first.
	AskedHeld
)

// Ask returns what an object that a GET found, or nil for none, means.
func Ask(live metav1.Object, own bool) Asked {
	if live == nil || live.GetLabels()[ManagedLabel] != "true" || own && live.GetDeletionTimestamp() != nil {
		return AskedClean
	}
	return AskedHeld
}

// Clear is whether a cluster is clean.
type Clear int

// The answers.
const (
	NotClear Clear = iota
	// MustAsk wants a GET.
	MustAsk
	IsClear
)

// Clear returns whether the cluster is clean. The finalizer goes when all are.
func (c Clearing) Clear() Clear {
	switch {
	case !c.Joined:
		return IsClear
	case !c.Ready, c.Serving != Synced && c.Serving != Absent:
		return NotClear
	case c.Live != nil && (!c.Own || !c.Live.Deleting):
		return NotClear
	case c.Live != nil, !c.Expected, c.Asked == AskedClean:
		return IsClear
	case c.Asked == AskedHeld:
		return NotClear
	}
	return MustAsk
}
