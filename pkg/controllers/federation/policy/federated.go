// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Federated is a federated object. It refers to what it was read from, and changes nothing there.
type Federated struct {
	Namespace, Name string
	Generation      int64
	Annotations     map[string]string
	// Deleting and HasFinalizer are set if the object has a deletionTimestamp and our finalizer.
	Deleting, HasFinalizer bool
	// Template is what clusters get, or nil.
	Template  any
	Placement Placement
	Status    FederatedStatus

	hasSpec        bool
	retainReplicas any
	overrides      []clusterOverrides
	// malformed is why the overrides cannot be read. Then all clusters fail, since the overrides may be for any.
	malformed error
}

// ReadFederated reads a federated object. A status that cannot be read counts as none.
func ReadFederated(u *unstructured.Unstructured) *Federated {
	f := &Federated{
		Namespace: u.GetNamespace(), Name: u.GetName(), Generation: u.GetGeneration(), Annotations: u.GetAnnotations(),
		Deleting: u.GetDeletionTimestamp() != nil, HasFinalizer: slices.Contains(u.GetFinalizers(), Finalizer), Status: statusOf[FederatedStatus](u),
	}
	if u.Object["spec"] == nil {
		return f
	}
	f.hasSpec = true
	spec, isObject := u.Object["spec"].(map[string]any)
	if !isObject {
		f.Placement.Malformed = "spec: must be an object"
		return f
	}
	f.Template, f.Placement, f.retainReplicas = spec["template"], readPlacement(spec["placement"]), spec["retainReplicas"]
	f.malformed = decode(spec["overrides"], &f.overrides)
	return f
}

// Warnings names the parts of the template that clusters do not get.
func (f *Federated) Warnings() (warnings []Problem) {
	template, _ := f.Template.(map[string]any)
	metadata, _ := template["metadata"].(map[string]any)
	if metadata["annotations"] != nil {
		warnings = append(warnings, Problem{AnnotationsNotSupported, "annotations of the template are not propagated; an override of /metadata/annotations is"})
	}
	if metadata["finalizers"] != nil {
		warnings = append(warnings, Problem{FinalizersNotSupported, "finalizers of the template are not propagated"})
	}
	return warnings
}

// Digest is what the manager keeps of a federated object: enough to decide that there is nothing to do.
type Digest struct {
	Generation int64     `json:"g,omitempty"`
	Versions   Versions  `json:"v"`
	Placement  Placement `json:"p"`
	// Labels is the hash of the labels in clusters without overrides.
	Labels uint64 `json:"l"`
	// Overrides are the digests of the overrides of each cluster, sorted by cluster.
	Overrides []OverrideDigest `json:"o,omitempty"`
	// HasFinalizer is set if the object has our finalizer. Status is the hash of its status, see
	// FederatedStatus.Hash.
	HasFinalizer bool   `json:"f,omitempty"`
	Status       uint64 `json:"s"`
}

// OverrideDigest is what is kept of the overrides of a cluster.
type OverrideDigest struct {
	Cluster string `json:"c"`
	// Hash is the hash of the overrides, Labels the hash of the labels with the overrides applied.
	Hash   uint64 `json:"h"`
	Labels uint64 `json:"l"`
	// Annotations is set if the overrides change annotations.
	Annotations bool `json:"a,omitempty"`
}

// Digest returns the digest of the federated object.
func (f *Federated) Digest() Digest {
	d := Digest{Generation: f.Generation, Versions: f.Versions(), Placement: f.Placement, Labels: hashJSON(f.labels(nil)), HasFinalizer: f.HasFinalizer, Status: f.Status.Hash()}
	for _, cluster := range f.overrides {
		operations := cluster.ClusterOverrides
		if i := slices.IndexFunc(d.Overrides, func(o OverrideDigest) bool { return o.Cluster == cluster.ClusterName }); i >= 0 {
			d.Overrides[i].Hash ^= hashJSON(cluster) // named twice, which is an error for the cluster
			continue
		}
		d.Overrides = append(d.Overrides, OverrideDigest{Cluster: cluster.ClusterName, Hash: hashJSON(operations),
			Labels: hashJSON(f.labels(operations)), Annotations: slices.ContainsFunc(operations, Operation.touchesAnnotations)})
	}
	slices.SortFunc(d.Overrides, func(a, b OverrideDigest) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return d
}

// ForCluster returns what the digest says of a cluster.
func (d *Digest) ForCluster(cluster string) OverrideDigest {
	i, found := slices.BinarySearchFunc(d.Overrides, cluster, func(o OverrideDigest, name string) int { return cmp.Compare(o.Cluster, name) })
	if !found {
		return OverrideDigest{Cluster: cluster, Labels: d.Labels}
	}
	return d.Overrides[i]
}

// ContentHash returns a hash of what the federated object says of a cluster, for Repeats.
func (d *Digest) ContentHash(cluster string) uint64 {
	return hashJSON([]any{d.Versions.Template, d.ForCluster(cluster).Hash})
}

// SummarizeFederated returns the digest of a federated object as bytes, which the cache keeps instead of it.
func SummarizeFederated(u *unstructured.Unstructured) []byte {
	data, _ := json.Marshal(ReadFederated(u).Digest()) // a digest is plain data
	return data
}

// ReadDigest reads what SummarizeFederated returned. For any other bytes, the digest has a malformed
// placement.
func ReadDigest(summary []byte) (d Digest) {
	if json.Unmarshal(summary, &d) != nil {
		d.Placement.Malformed = "it cannot be read"
	}
	return d
}

// labels returns the labels of the object in a cluster with these overrides. Operations on other fields
// cannot change labels, and an operation that fails here fails in Render too.
func (f *Federated) labels(operations []Operation) map[string]any {
	template, _ := f.Template.(map[string]any)
	metadata, _ := template["metadata"].(map[string]any)
	stub := map[string]any{}
	if labels, isObject := metadata["labels"].(map[string]any); isObject {
		stub["labels"] = deepCopy(labels)
	}
	var object any = map[string]any{"metadata": stub}
	for _, o := range operations {
		if path, err := o.pointer(); err == nil && (len(path) < 2 && overlaps(path, "metadata") || overlaps(path, "metadata", "labels")) {
			if patched, err := o.apply(object, path); err == nil {
				object = patched
			}
		}
	}
	fields, _ := object.(map[string]any)
	labels, found, err := unstructured.NestedMap(fields, "metadata", "labels")
	if !found || err != nil {
		labels = map[string]any{}
	}
	labels[ManagedLabel] = "true"
	return labels
}
