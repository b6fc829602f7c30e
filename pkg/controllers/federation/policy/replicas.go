// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/replicas"
)

// ReplicaPreference is the spec of a ReplicaSchedulingPreference, which spreads the replicas of the federated
// object of its own name.
type ReplicaPreference struct {
	TargetKind    string `json:"targetKind"`
	TotalReplicas *int64 `json:"totalReplicas"`
	Rebalance     bool   `json:"rebalance"`
	// Intersect leaves the clusters alone that the selectors of the federated object and of its
	// FederatedNamespace do not both select.
	Intersect bool                           `json:"intersectWithClusterSelector"`
	Clusters  map[string]replicas.Preference `json:"clusters"`
}

// spreadTypes are the FederatedTypeConfigs of the types that have replicas to spread, by the federated kind.
var spreadTypes = map[string]string{"FederatedDeployment": "deployments.apps", "FederatedReplicaSet": "replicasets.apps"}

// ReadReplicaPreference reads a ReplicaSchedulingPreference. An error means that nothing may be written.
func ReadReplicaPreference(u *unstructured.Unstructured) (p ReplicaPreference, err error) {
	if err := decode(u.Object["spec"], &p); err != nil {
		return p, fmt.Errorf("spec: %s", truncate(err.Error(), maxError))
	}
	switch {
	case p.Type() == "":
		return p, fmt.Errorf("targetKind: must be FederatedDeployment or FederatedReplicaSet, got %q", truncate(p.TargetKind, 64))
	case p.TotalReplicas == nil:
		return p, errors.New("totalReplicas: must be set")
	}
	inRange := func(n int64) bool { return n >= 0 && n <= replicas.MaxNumber }
	if !inRange(*p.TotalReplicas) {
		return p, fmt.Errorf("totalReplicas: must be 0 to %d", replicas.MaxNumber)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Clusters)) {
		if c := p.Clusters[name]; !inRange(c.Min) || !inRange(c.Weight) || c.Max != nil && !inRange(*c.Max) {
			return p, fmt.Errorf("clusters[%q]: each number must be 0 to %d", truncate(name, 64), replicas.MaxNumber)
		}
	}
	return p, nil
}

// Type returns the name of the FederatedTypeConfig of the target, or "".
func (p ReplicaPreference) Type() string { return spreadTypes[p.TargetKind] }

// SelectClusters returns the clusters that the selectors of a federated object and of its FederatedNamespace,
// which is nil if there is none, both select. Lists of clusters do not count.
func SelectClusters(t *TypeConfig, federated, namespace *unstructured.Unstructured, clusters []Cluster) (selected []Cluster, err error) {
	selectorPlacement := func(u *unstructured.Unstructured) *Placement {
		if u == nil {
			return nil
		}
		value, _, _ := unstructured.NestedFieldNoCopy(u.Object, "spec", "placement", "clusterSelector") // nil if malformed
		placement := readPlacement(map[string]any{"clusterSelector": value})
		return &placement
	}
	names, _, err := Place(t, *selectorPlacement(federated), selectorPlacement(namespace), clusters)
	for _, c := range clusters {
		if slices.Contains(names, c.Name) {
			selected = append(selected, c)
		}
	}
	return selected, err
}

// NotReadySince returns since when the status says that a cluster is not ready.
func (c Cluster) NotReadySince() (time.Time, bool) {
	for _, condition := range c.Status.Conditions {
		if condition.Type == Ready && condition.Status == "False" && condition.LastTransitionTime != nil {
			return condition.LastTransitionTime.Time, true
		}
	}
	return time.Time{}, false
}

const replicasPath = "/spec/replicas"

// Spread returns a federated object that is placed in the clusters of the plan, each with an override of its
// replicas, and whether it is another object than before. Overrides of something else stay.
func Spread(u *unstructured.Unstructured, plan map[string]int64) (spread *unstructured.Unstructured, changed bool, err error) {
	spec, isObject := u.Object["spec"].(map[string]any)
	if !isObject {
		return nil, false, errors.New("spec: must be an object")
	}
	overrides, err := overrideReplicas(spec["overrides"], plan)
	if err != nil {
		return nil, false, err
	}
	names := slices.Sorted(maps.Keys(plan))
	placed := readPlacement(spec["placement"])
	slices.Sort(placed.Clusters)
	samePlacement, current := placed.Malformed == "" && slices.Equal(placed.Clusters, names), spec["overrides"]
	if samePlacement && (reflect.DeepEqual(current, overrides) || current == nil && len(overrides) == 0) {
		return u, false, nil
	}
	spread = u.DeepCopy()
	spec = spread.Object["spec"].(map[string]any)
	spec["overrides"] = overrides
	if !samePlacement {
		clusters := make([]any, 0, len(names))
		for _, name := range names {
			clusters = append(clusters, map[string]any{"name": name})
		}
		placement, isObject := spec["placement"].(map[string]any)
		if !isObject {
			placement = map[string]any{}
		}
		placement["clusters"] = clusters
		spec["placement"] = placement
	}
	return spread, true, nil
}

// overrideReplicas returns the overrides with the planned replicas. Other overrides of the replicas are
// dropped.
func overrideReplicas(overrides any, plan map[string]int64) ([]any, error) {
	list, isList := overrides.([]any)
	if overrides != nil && !isList {
		return nil, errors.New("overrides: must be a list")
	}
	next, missing := make([]any, 0, len(list)+len(plan)), maps.Clone(plan)
	for _, item := range list {
		fields, isObject := item.(map[string]any)
		operations, isList := fields["clusterOverrides"].([]any)
		if !isObject || !isList && fields["clusterOverrides"] != nil {
			return nil, errors.New("overrides: each must be an object with a list clusterOverrides")
		}
		name, _ := fields["clusterName"].(string)
		count, planned := missing[name]
		delete(missing, name)
		kept := make([]any, 0, len(operations)+1)
		for _, o := range operations {
			operation, _ := o.(map[string]any)
			switch {
			case operation["path"] != replicasPath:
				kept = append(kept, o)
			case planned:
				if operation["value"] != count || operation["op"] == opRemove {
					o = replicasOverride(count)
				}
				kept, planned = append(kept, o), false
			}
		}
		if planned {
			kept = append(kept, replicasOverride(count))
		}
		if len(kept) > 0 || len(operations) == 0 {
			changed := maps.Clone(fields)
			if len(operations) > 0 || len(kept) > 0 {
				changed["clusterOverrides"] = kept
			}
			next = append(next, changed)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		next = append(next, map[string]any{"clusterName": name, "clusterOverrides": []any{replicasOverride(missing[name])}})
	}
	return next, nil
}

func replicasOverride(n int64) map[string]any {
	return map[string]any{"path": replicasPath, "value": n}
}

// Workload is a Deployment or a ReplicaSet of a cluster.
type Workload struct {
	// Replicas are asked for, Ready of them run and are ready, and Unschedulable have had no Node for long.
	Replicas, Ready, Unschedulable int64
	Selector                       string
}

// ReadWorkload reads a Deployment or a ReplicaSet. It knows nothing of unschedulable Pods.
func ReadWorkload(u *unstructured.Unstructured) (w Workload, err error) {
	var object appsv1.ReplicaSet // a Deployment has the same fields
	if err := decode(u.Object, &object); err != nil {
		return w, err
	}
	selector, err := metav1.LabelSelectorAsSelector(object.Spec.Selector)
	if err == nil && selector.String() == "" {
		err = errors.New("spec.selector: must select some Pods") // or all Pods of the namespace would count
	}
	if err != nil {
		return w, err
	}
	w = Workload{Replicas: 1, Ready: int64(object.Status.ReadyReplicas), Selector: selector.String()}
	if object.Spec.Replicas != nil {
		w.Replicas = int64(*object.Spec.Replicas)
	}
	return w, nil
}

// unschedulableDelay is how long a Pod must have had no Node to say that a cluster is full: until then, a
// Node may be on its way.
const unschedulableDelay = time.Minute

// CountPod counts a Pod of the workload.
func (w *Workload) CountPod(pod *unstructured.Unstructured, now time.Time) {
	var status corev1.PodStatus
	if decode(pod.Object["status"], &status) != nil {
		return // neither ready nor known to be unschedulable
	}
	for _, c := range status.Conditions {
		switch {
		case c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && status.Phase == corev1.PodRunning:
			w.Ready++
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable && now.Sub(c.LastTransitionTime.Time) > unschedulableDelay:
			w.Unschedulable++
		}
	}
}
