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

// HoldsUnknown reports whether placement must not delete an object that is in no PropagatedVersion: the host
// may have been restored to a time before the object was placed.
func (r Removals) HoldsUnknown(guard int, now time.Time) bool {
	return guard < 100 && !now.Before(r.AllowedUntil)
}

func (r Removals) guarded(guard int) bool {
	return guard <= 0 || guard < 100 && r.Deletions > guardFrom && r.Deletions*100 > r.Managed*guard
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

const (
	// WrittenOffLabel is "true" on the ConfigMaps that record removals that were written off.
	WrittenOffLabel = "quartermaster.dev/federation-written-off"
	// recordKey is the key of a record in the data of its ConfigMap.
	recordKey = "record"
)

// WrittenOff is the record of a removal that a cluster still owes: its federated object was deleted while the
// cluster was away, and is gone.
type WrittenOff struct {
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

// WrittenOffName returns the name of the ConfigMap with the record of an object in a cluster.
func WrittenOffName(cluster, kind, namespace, name string) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{cluster, kind, namespace, name}, "/")))
	return "federation-written-off-" + hex.EncodeToString(sum[:16])
}

// Data returns the data of the record's ConfigMap.
func (p WrittenOff) Data() map[string]string {
	data, _ := json.Marshal(p) // it is plain data
	return map[string]string{recordKey: string(data)}
}

// ReadWrittenOff reads the record that is the data of a ConfigMap of this name.
func ReadWrittenOff(name string, data map[string]string) (p WrittenOff, err error) {
	if err := json.Unmarshal([]byte(data[recordKey]), &p); err != nil {
		return p, fmt.Errorf("data.%s: %w", recordKey, err)
	}
	switch {
	case WrittenOffName(p.Cluster, p.Type, p.Namespace, p.Name) != name:
		return p, fmt.Errorf("data.%s: must be the record to which the name of the ConfigMap belongs", recordKey)
	case p.Deleted.IsZero():
		return p, errors.New("data." + recordKey + ": must have a time in deleted")
	}
	return p, nil
}

// Covers reports whether the record means an object: the object was there when the federated object was
// deleted. The times are of two clusters' clocks. The UID does not depend on them, but a manager that has
// never seen the object does not know it.
func (p WrittenOff) Covers(live metav1.Object) bool {
	return live.GetCreationTimestamp().Time.Before(p.Deleted) && (p.UID == "" || p.UID == live.GetUID())
}

// Away is what is known of a cluster for which a deleted federated object waits.
type Away struct {
	// Since is when the cluster became not ready or, if it is ready, when it began to refuse the type.
	Since time.Time
	// Seen is set once this process has seen that itself.
	Seen bool
}

// awayRecheck is how often to look again at a cluster that this process has not yet seen away.
const awayRecheck = 5 * time.Second

// WriteOff returns how long the cluster still holds the deleted federated object; 0 writes it off.
func (a Away) WriteOff(deleted time.Time, grace time.Duration, now time.Time) time.Duration {
	from := deleted
	if a.Since.After(deleted) {
		from = a.Since
	}
	left := from.Add(grace).Sub(now)
	switch {
	case left > 0:
		return left
	case !a.Seen:
		return awayRecheck
	}
	return 0
}
