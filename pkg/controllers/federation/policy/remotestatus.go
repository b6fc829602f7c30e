// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const (
	// maxRemoteStatus is how long the status of an object may be, in JSON, to be copied into the federated
	// object; maxRemoteStatuses is how long the statuses of all clusters may be.
	maxRemoteStatus   = 32 << 10
	maxRemoteStatuses = 512 << 10
)

// StatusTooLarge is the reason of a Warning: the status of an object is not in its federated object.
const StatusTooLarge = "StatusTooLarge"

// SummarizeWithStatus returns SummarizeLiveObject and, in JSON, the status. A status that is too large is
// "true".
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
	case err != nil || value == nil:
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
	left := maxRemoteStatuses
	slices.SortFunc(results, func(a, b ClusterResult) int { return cmp.Compare(a.Name, b.Name) })
	for i := range results {
		name := results[i].Name
		status, value := statuses[name], any(nil)
		if len(status) == 0 || json.Unmarshal(status, &value) != nil {
			continue
		}
		if _, isObject := value.(map[string]any); !isObject || len(status) > left {
			tooLarge = append(tooLarge, name)
			continue
		}
		left -= len(status)
		results[i].RemoteStatus = value
	}
	return tooLarge
}
