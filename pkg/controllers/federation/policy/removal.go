// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// unguardedDeletions is how many deletions by placement the guard never holds.
const unguardedDeletions = 10

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
// lets the deletion go ahead. The guard is in per cent: 0 holds every deletion by placement, 100 none.
func (r Removals) Hold(availableDelay time.Duration, guard int, now time.Time) (status string, wait time.Duration) {
	settled := r.ReadySince.Add(availableDelay)
	switch {
	case r.Replaced:
		return RemovalHeld, 0
	case now.Before(settled):
		return WaitingForRemoval, settled.Sub(now)
	case r.exceedsGuard(guard) && !now.Before(r.AllowedUntil):
		return RemovalHeld, 0
	}
	return "", 0
}

// HoldsUnrecorded reports whether placement must not delete an object that is in no PropagatedVersion: the
// host may have been restored to a time before the object was placed.
func (r Removals) HoldsUnrecorded(guard int, now time.Time) bool {
	return guard < 100 && !now.Before(r.AllowedUntil)
}

func (r Removals) exceedsGuard(guard int) bool {
	return guard <= 0 || guard < 100 && r.Deletions > unguardedDeletions && r.Deletions*100 > r.Managed*guard
}

// DeleteOptions returns the options, from the annotation of a deleted federated object, of deletions in
// clusters. While the annotation is malformed, nothing is deleted.
func (f *Federated) DeleteOptions() (options metav1.DeleteOptions, err error) {
	text, has := f.Annotations[DeleteOptionAnnotation]
	if !has {
		return options, nil
	}
	var annotation struct {
		GracePeriodSeconds *int64                      `json:"gracePeriodSeconds"`
		PropagationPolicy  *metav1.DeletionPropagation `json:"propagationPolicy"`
	}
	if json.Unmarshal([]byte(text), &annotation) != nil {
		return options, errors.New(DeleteOptionAnnotation + ": must be DeleteOptions in JSON")
	}
	if annotation.GracePeriodSeconds != nil && *annotation.GracePeriodSeconds < 0 {
		return options, errors.New(DeleteOptionAnnotation + ": gracePeriodSeconds must not be negative")
	}
	policies := []metav1.DeletionPropagation{metav1.DeletePropagationOrphan, metav1.DeletePropagationBackground, metav1.DeletePropagationForeground}
	if annotation.PropagationPolicy != nil && !slices.Contains(policies, *annotation.PropagationPolicy) {
		return options, errors.New(DeleteOptionAnnotation + ": propagationPolicy must be Orphan, Background or Foreground")
	}
	options.GracePeriodSeconds, options.PropagationPolicy = annotation.GracePeriodSeconds, annotation.PropagationPolicy
	return options, nil
}

// MustBeGone reports whether an object that was read must be gone before a deleted federated object may go.
// The host's own Namespace need not be gone: it is enough that it is being deleted.
func MustBeGone(live metav1.Object, isHostNamespace bool) bool {
	return live.GetLabels()[ManagedLabel] == "true" && (!isHostNamespace || live.GetDeletionTimestamp() == nil)
}

const (
	// WriteOffLabel is "true" on the ConfigMaps that record removals that were written off.
	WriteOffLabel = "quartermaster.dev/federation-written-off"
	// recordKey is the key of a record in the data of its ConfigMap.
	recordKey = "record"
)

// WriteOff is the record of a removal that a cluster still owes: its federated object was deleted while the
// cluster was away, and is gone.
type WriteOff struct {
	Cluster string `json:"cluster"`
	// Type is the name of the FederatedTypeConfig.
	Type string `json:"type"`
	// Namespace, Name and FederatedUID are the federated object's.
	Namespace    string    `json:"namespace,omitempty"`
	Name         string    `json:"name"`
	FederatedUID types.UID `json:"federatedUID"`
	// UID is the UID of the cluster's object, if it is known.
	UID types.UID `json:"uid,omitempty"`
	// Deleted is when the federated object was deleted.
	Deleted time.Time            `json:"deleted"`
	Options metav1.DeleteOptions `json:"options"`
}

// WriteOffName returns the name of the ConfigMap with the record of an object in a cluster.
func WriteOffName(cluster, kind, namespace, name string) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{cluster, kind, namespace, name}, "/")))
	return "federation-written-off-" + hex.EncodeToString(sum[:16])
}

// Data returns the data of the record's ConfigMap.
func (w WriteOff) Data() map[string]string {
	data, _ := json.Marshal(w) // it is plain data
	return map[string]string{recordKey: string(data)}
}

// ReadWriteOff reads the record that is the data of a ConfigMap of this name.
func ReadWriteOff(name string, data map[string]string) (w WriteOff, err error) {
	if err := json.Unmarshal([]byte(data[recordKey]), &w); err != nil {
		return w, fmt.Errorf("data.%s: %w", recordKey, err)
	}
	switch {
	case WriteOffName(w.Cluster, w.Type, w.Namespace, w.Name) != name:
		return w, fmt.Errorf("data.%s: must be the record to which the name of the ConfigMap belongs", recordKey)
	case w.Deleted.IsZero():
		return w, errors.New("data." + recordKey + ": must have a time in deleted")
	}
	return w, nil
}

// Covers reports whether the record means an object: the object was there when the federated object was
// deleted. The times are of two clusters' clocks. The UID does not depend on them, but a manager that has
// never seen the object does not know it.
func (w WriteOff) Covers(live metav1.Object) bool {
	return live.GetCreationTimestamp().Time.Before(w.Deleted) && (w.UID == "" || w.UID == live.GetUID())
}

// Outage is what is known of a cluster for which a deleted federated object waits.
type Outage struct {
	// Since is when the cluster became not ready or, if it is ready, when it began to refuse the type.
	Since time.Time
	// Confirmed is set once this process itself has seen the outage.
	Confirmed bool
}

// outageRecheckInterval is how often to look again at a cluster that this process has not yet seen away.
const outageRecheckInterval = 5 * time.Second

// RemainingGrace returns how long the cluster still holds the deleted federated object; 0 writes it off.
func (o Outage) RemainingGrace(deleted time.Time, grace time.Duration, now time.Time) time.Duration {
	start := deleted
	if o.Since.After(deleted) {
		start = o.Since
	}
	left := start.Add(grace).Sub(now)
	switch {
	case left > 0:
		return left
	case !o.Confirmed:
		return outageRecheckInterval
	}
	return 0
}
