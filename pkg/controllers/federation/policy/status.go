// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// FederatedStatus is the status of the federated object.
type FederatedStatus struct {
	ObservedGeneration int64                `json:"observedGeneration,omitempty"`
	Conditions         []FederatedCondition `json:"conditions,omitempty"`
	Clusters           []ClusterResult      `json:"clusters,omitempty"`
}

// FederatedCondition is a condition of the federated object. Its times are in RFC 3339.
type FederatedCondition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	LastUpdateTime     string `json:"lastUpdateTime,omitempty"`
	LastTransitionTime string `json:"lastTransitionTime,omitempty"`
	Reason             string `json:"reason,omitempty"`
}

// ClusterResult is the status of one cluster. An empty status means that the cluster is up to date.
type ClusterResult struct {
	Name         string `json:"name"`
	Status       string `json:"status,omitempty"`
	RemoteStatus any    `json:"remoteStatus,omitempty"`
}

// Propagation is the type of the only condition of a federated object.
const Propagation = "Propagation"

// The reasons of the condition. KubeFed's ClusterRetrievalFailed is not among them: the KubeFedClusters are
// in the cache.
const (
	ComputePlacementFailed = "ComputePlacementFailed"
	NamespaceNotFederated  = "NamespaceNotFederated"
	CheckClusters          = "CheckClusters"
)

// The statuses of a cluster.
const (
	ClusterNotReady       = "ClusterNotReady"
	ClientRetrievalFailed = "ClientRetrievalFailed"
	CachedRetrievalFailed = "CachedRetrievalFailed"
	RetrievalFailed       = "RetrievalFailed"
	ComputeResourceFailed = "ComputeResourceFailed"
	FieldRetentionFailed  = "FieldRetentionFailed"
	ApplyOverridesFailed  = "ApplyOverridesFailed"
	CreationFailed        = "CreationFailed"
	UpdateFailed          = "UpdateFailed"
	DeletionFailed        = "DeletionFailed"
	LabelRemovalFailed    = "LabelRemovalFailed"
	AlreadyExists         = "AlreadyExists"
	ManagedLabelFalse     = "ManagedLabelFalse"
	WaitingForRemoval     = "WaitingForRemoval"
	APINotAvailable       = "APINotAvailable"
	RemovalHeld           = "RemovalHeld"
)

// TimedOutStatus returns the status of a write without an answer: CreationTimedOut for CreationFailed.
func TimedOutStatus(failed string) string {
	switch failed {
	case CreationFailed, UpdateFailed, DeletionFailed, LabelRemovalFailed:
		return strings.TrimSuffix(failed, "Failed") + "TimedOut"
	}
	return failed
}

// Conclusion is what a reconcile found out about the federated object.
type Conclusion struct {
	Generation int64
	// Reason is the reason for which the object is placed nowhere. Without one, CheckClusters follows from
	// Clusters.
	Reason string
	// Clusters are the clusters that should have or hold the object, in any order.
	Clusters []ClusterResult
	// Wrote is set if something was written in a cluster since the last status.
	Wrote bool
}

// Next returns the status after a reconcile, and whether to write it.
func (s FederatedStatus) Next(c Conclusion, now time.Time) (FederatedStatus, bool) {
	timestamp := now.UTC().Format(time.RFC3339)
	condition := FederatedCondition{Type: Propagation, Status: "True", LastUpdateTime: timestamp, LastTransitionTime: timestamp}
	condition.Reason = c.Reason
	if c.Reason == "" && slices.ContainsFunc(c.Clusters, func(r ClusterResult) bool { return r.Status != "" }) {
		condition.Reason = CheckClusters
	}
	if condition.Reason != "" {
		condition.Status = "False"
	}
	next := FederatedStatus{ObservedGeneration: c.Generation, Clusters: sortedByName(c.Clusters)}
	changed := c.Wrote || hashJSON(next.Clusters) != hashJSON(sortedByName(s.Clusters))
	var old FederatedCondition
	if i := slices.IndexFunc(s.Conditions, func(c FederatedCondition) bool { return c.Type == Propagation }); i >= 0 {
		old = s.Conditions[i]
	}
	if old.Status == condition.Status {
		condition.LastTransitionTime = old.LastTransitionTime
	}
	if changed = changed || old.Status != condition.Status || old.Reason != condition.Reason; !changed {
		condition.LastUpdateTime = old.LastUpdateTime
	}
	next.Conditions = []FederatedCondition{condition}
	return next, changed || len(s.Conditions) != 1 || next.ObservedGeneration != s.ObservedGeneration
}

// Hash returns a hash of all but the times and the order. If a reconcile wrote nothing and its status has the
// hash that is in the digest, there is nothing to write, and the federated object need not be read.
func (s FederatedStatus) Hash() uint64 {
	s.Conditions = slices.Clone(s.Conditions)
	for i := range s.Conditions {
		s.Conditions[i].LastUpdateTime, s.Conditions[i].LastTransitionTime = "", ""
	}
	s.Clusters = sortedByName(s.Clusters)
	return hashJSON(s)
}

func sortedByName(results []ClusterResult) []ClusterResult {
	return slices.SortedFunc(slices.Values(results), func(a, b ClusterResult) int { return cmp.Compare(a.Name, b.Name) })
}

const (
	// maxRemoteStatus is how long the status of an object may be, in bytes of JSON, to be copied into the
	// federated object; maxRemoteStatuses is how long the statuses of all clusters together may be.
	maxRemoteStatus   = 32 << 10
	maxRemoteStatuses = 512 << 10
)

// StatusTooLarge is the reason of a Warning: the status of an object is not in its federated object.
const StatusTooLarge = "StatusTooLarge"

// SummarizeWithStatus returns SummarizeLiveObject and, in JSON, the status if it is an object. A status that
// is too large is "true".
func SummarizeWithStatus(o metav1.Object) []byte {
	data := SummarizeLiveObject(o)
	var value any
	if u, ok := o.(*unstructured.Unstructured); ok {
		value = u.Object["status"]
	} else if field := reflect.Indirect(reflect.ValueOf(o)).FieldByName("Status"); field.IsValid() {
		value = field.Interface()
	}
	status, err := json.Marshal(value)
	switch {
	case err != nil || status[0] != '{':
		return data
	case len(status) > maxRemoteStatus:
		status = []byte("true")
	}
	return append(data, status...)
}

// RemoteStatus is the status of an object of a cluster, in JSON; nil if it has none.
type RemoteStatus []byte

// ReadRemoteStatus returns the status that SummarizeWithStatus has kept.
func ReadRemoteStatus(summary []byte) RemoteStatus {
	if len(summary) < 17 {
		return nil
	}
	_, n := binary.Varint(summary[16:])
	return summary[16+max(n, 0):]
}

// SetRemoteStatuses gives the results of clusters, in the order of their names, the statuses of their
// objects. It returns the clusters whose status is left out because it is too large.
func SetRemoteStatuses(results []ClusterResult, statuses map[string]RemoteStatus) (tooLarge []string) {
	remaining := maxRemoteStatuses
	slices.SortFunc(results, func(a, b ClusterResult) int { return cmp.Compare(a.Name, b.Name) })
	for i := range results {
		name := results[i].Name
		status, value := statuses[name], any(nil)
		if len(status) == 0 || json.Unmarshal(status, &value) != nil {
			continue
		}
		if _, isObject := value.(map[string]any); !isObject || len(status) > remaining {
			tooLarge = append(tooLarge, name)
			continue
		}
		remaining -= len(status)
		results[i].RemoteStatus = withoutNulls(value)
	}
	return tooLarge
}

// withoutNulls removes the fields that are null, which an API server does not keep: the status would be
// written again and again.
func withoutNulls(value any) any {
	switch value := value.(type) {
	case map[string]any:
		maps.DeleteFunc(value, func(_ string, field any) bool { return withoutNulls(field) == nil })
	case []any:
		for _, element := range value {
			withoutNulls(element)
		}
	}
	return value
}
