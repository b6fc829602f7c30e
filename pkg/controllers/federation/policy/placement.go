// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Placement says in which clusters an object belongs.
type Placement struct {
	// Clusters are names. nil lets the selector decide, an empty list selects none.
	Clusters []string `json:"c"`
	// Selector selects KubeFedClusters by their labels. nil selects none.
	Selector *metav1.LabelSelector `json:"s,omitempty"`
	// Malformed is why the placement cannot be read.
	Malformed string `json:"m,omitempty"`
}

// readPlacement reads the placement of a spec. If there is a list, the selector does not matter.
func readPlacement(placement any) (p Placement) {
	fields, isObject := placement.(map[string]any)
	if placement == nil || isObject && len(fields) == 0 {
		return p
	}
	var list []struct{ Name string }
	err := errors.New("placement: must be an object")
	if isObject {
		err = decode(fields["clusters"], &list)
	}
	if err == nil && list != nil {
		p.Clusters = make([]string, 0, len(list))
		for _, cluster := range list {
			if cluster.Name == "" {
				err = errors.New("placement.clusters: each cluster must have a name")
			}
			p.Clusters = append(p.Clusters, cluster.Name)
		}
	} else if err == nil {
		if err = decode(fields["clusterSelector"], &p.Selector); err == nil {
			_, err = metav1.LabelSelectorAsSelector(p.Selector)
		}
	}
	if err != nil {
		return Placement{Malformed: truncate(err.Error(), maxError)}
	}
	return p
}

// clusterFilter returns whether the placement selects a KubeFedCluster.
func (p Placement) clusterFilter() (func(Cluster) bool, error) {
	if p.Malformed != "" {
		return nil, errors.New(p.Malformed)
	}
	if p.Clusters != nil {
		return func(c Cluster) bool { return slices.Contains(p.Clusters, c.Name) }, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(p.Selector)
	if err != nil {
		return nil, fmt.Errorf("clusterSelector: %w", err)
	}
	return func(c Cluster) bool { return selector.Matches(labels.Set(c.Labels)) }, nil
}

// Place returns the sorted names of the existing clusters in which the federated object belongs. Namespace is
// the placement of the FederatedNamespace of a namespaced target, and nil if there is none. The reason is the
// reason of the condition: with ComputePlacementFailed nothing may be written, with NamespaceNotFederated the
// federated object belongs nowhere.
func Place(t *TypeConfig, placement Placement, namespace *Placement, clusters []Cluster) (names []string, reason string, err error) {
	selected, err := placement.clusterFilter()
	if err != nil {
		return nil, ComputePlacementFailed, err
	}
	federated := func(Cluster) bool { return true }
	if t.Target.Namespaced() {
		if namespace == nil {
			return nil, NamespaceNotFederated, nil
		}
		if federated, err = namespace.clusterFilter(); err != nil {
			return nil, ComputePlacementFailed, fmt.Errorf("FederatedNamespace: %w", err)
		}
	}
	for _, c := range clusters {
		if selected(c) && federated(c) {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return names, "", nil
}

// protectedNamespaces exist in every cluster and belong to it.
var protectedNamespaces = []string{metav1.NamespaceSystem, metav1.NamespacePublic, "kube-node-lease", metav1.NamespaceDefault}

// ProtectedNamespace reports whether a Namespace is never propagated, and so never deleted either.
// Own are the federation namespace and the manager's.
func ProtectedNamespace(name string, own ...string) bool {
	return slices.Contains(protectedNamespaces, name) || slices.Contains(own, name)
}
