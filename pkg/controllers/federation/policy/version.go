// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/md5" // no secret: KubeFed must find what it would have written itself
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Versions are the versions of the content of a federated object.
type Versions struct {
	Template  string `json:"templateVersion"`
	Overrides string `json:"overridesVersion"`
}

// Versions returns the versions of the federated object.
func (f *Federated) Versions() (v Versions) {
	if f.Template != nil {
		v.Template = md5OfJSON(f.Template)
	}
	if f.hasSpec && f.malformed == nil {
		v.Overrides = md5OfJSON(struct {
			Overrides []clusterOverrides `json:"overrides"`
		}{f.overrides})
	}
	return v
}

// md5OfJSON returns the md5 of the JSON form and a newline.
func md5OfJSON(v any) string {
	h := md5.New()
	_ = json.NewEncoder(h).Encode(v) // it was JSON
	return hex.EncodeToString(h.Sum(nil))
}

// Propagated is what a PropagatedVersion says.
type Propagated struct {
	Versions
	// Owner is the UID of the federated object: an earlier object of the same name may have left its
	// PropagatedVersion.
	Owner types.UID
	// Clusters are the last written versions of clusters' objects. The version of an older content is empty.
	Clusters map[string]string
}

// clusterVersion is how an API server has the version of a cluster's object.
type clusterVersion struct {
	Cluster string `json:"clusterName"`
	Version string `json:"version"`
}

// PropagatedName returns the name of the PropagatedVersion of a federated object. A name that would be too
// long is cut and ends with a hash. (KubeFed then writes no PropagatedVersion: the API server refuses its
// name.)
func PropagatedName(t *TypeConfig, name string) string {
	name = strings.ToLower(t.Target.Kind) + "-" + name
	if len(name) > validation.DNS1123SubdomainMaxLength {
		sum := md5OfJSON(name)
		name = strings.TrimRight(name[:validation.DNS1123SubdomainMaxLength-len(sum)-1], ".-") + "-" + sum
	}
	return name
}

// ReadPropagated reads a PropagatedVersion. A status that cannot be read counts as none, so that every
// cluster is written again.
func ReadPropagated(u *unstructured.Unstructured) Propagated {
	var status struct {
		Versions
		Clusters []clusterVersion `json:"clusterVersions"`
	}
	if decode(u.Object["status"], &status) != nil {
		return Propagated{}
	}
	p := Propagated{Versions: status.Versions, Clusters: map[string]string{}}
	for _, c := range status.Clusters {
		p.Clusters[c.Cluster] = c.Version
	}
	if owners := u.GetOwnerReferences(); len(owners) > 0 {
		p.Owner = owners[0].UID
	}
	return p
}

// Status returns the status as an API server has it, sorted by cluster.
func (p Propagated) Status() map[string]any {
	clusters := []clusterVersion{}
	for _, name := range slices.Sorted(maps.Keys(p.Clusters)) {
		clusters = append(clusters, clusterVersion{name, p.Clusters[name]})
	}
	return map[string]any{"templateVersion": p.Template, "overridesVersion": p.Overrides, "clusterVersions": clusters}
}

// SummarizePropagated returns what ReadPropagated reads as bytes, which the cache keeps instead of it.
func SummarizePropagated(u *unstructured.Unstructured) []byte {
	data, _ := json.Marshal(ReadPropagated(u)) // it is plain data
	return data
}

// ReadPropagatedSummary reads what SummarizePropagated returned.
func ReadPropagatedSummary(summary []byte) (p Propagated) {
	if json.Unmarshal(summary, &p) != nil {
		return Propagated{}
	}
	return p
}

// HasVersion reports whether there is a version of a cluster.
func (p Propagated) HasVersion(cluster string) bool {
	_, has := p.Clusters[cluster]
	return has
}

// Equal reports whether two say the same.
func (p Propagated) Equal(other Propagated) bool {
	return p.Versions == other.Versions && maps.Equal(p.Clusters, other.Clusters)
}

// ValidVersions returns the versions of the clusters whose content is still as written: of all clusters if
// the federated object has not changed. previous is the digest of the federated object when the
// PropagatedVersion was written, or nil if this process does not know it. With previous, clusters whose own
// overrides are the same keep their versions.
func (p Propagated) ValidVersions(previous *Digest, current Digest) map[string]string {
	valid := map[string]string{}
	if current.Versions.Overrides == "" {
		return valid // the overrides cannot be read, and every cluster fails
	}
	known := previous != nil && previous.Versions == p.Versions && p.Template == current.Versions.Template
	for cluster, version := range p.Clusters {
		if p.Versions == current.Versions || known && previous.ForCluster(cluster).Hash == current.ForCluster(cluster).Hash {
			valid[cluster] = version
		}
	}
	return valid
}

// LiveObject is what is kept of an object in a cluster.
type LiveObject struct {
	UID      types.UID
	Version  string
	Deleting bool
	// Labels and Annotations are hashes.
	Labels, Annotations uint64
}

// ObjectVersion returns the version of an object of a cluster.
func ObjectVersion(o metav1.Object) string {
	if g := o.GetGeneration(); g != 0 {
		return "gen:" + strconv.FormatInt(g, 10)
	}
	return "rv:" + o.GetResourceVersion()
}

// SummarizeLiveObject returns what the cache must keep of an object beyond its name, UID, resourceVersion
// and deletionTimestamp: at most 26 bytes.
func SummarizeLiveObject(o metav1.Object) []byte {
	data := binary.LittleEndian.AppendUint64(make([]byte, 0, 18), hashStrings(o.GetLabels()))
	data = binary.LittleEndian.AppendUint64(data, hashStrings(o.GetAnnotations()))
	return binary.AppendVarint(data, o.GetGeneration())
}

// hashStrings is hashJSON of a map of strings. Nil is as good as empty.
func hashStrings(m map[string]string) uint64 {
	if m == nil {
		m = map[string]string{}
	}
	return hashJSON(m)
}

// ReadLiveObject joins a cached object and what SummarizeLiveObject returned. Without a summary the object
// has no version, so that it is read.
func ReadLiveObject(o metav1.Object, summary []byte) LiveObject {
	live := LiveObject{UID: o.GetUID(), Deleting: o.GetDeletionTimestamp() != nil}
	if len(summary) < 17 { // two hashes of 8 bytes, and the generation
		return live
	}
	live.Version = "rv:" + o.GetResourceVersion()
	live.Labels, live.Annotations = binary.LittleEndian.Uint64(summary), binary.LittleEndian.Uint64(summary[8:])
	if generation, _ := binary.Varint(summary[16:]); generation != 0 {
		live.Version = "gen:" + strconv.FormatInt(generation, 10)
	}
	return live
}
