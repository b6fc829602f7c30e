// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// federatedType is a type whose federated objects are followed.
type federatedType struct {
	policy.TypeConfig
	// runs is set if the type is propagated. FederatedNamespaces are followed even if they are not propagated,
	// since they place other objects.
	runs bool
	// collects is set if the status of the objects in clusters is copied into the federated objects.
	collects  bool
	following *informers.Following[*informers.Object]
	unwatch   func() // ends the loop's watch of following
	client    dynamic.NamespaceableResourceInterface
	// definedAt is when the API server last said that the CustomResourceDefinition is not being deleted. It is
	// under the controller's mu.
	definedAt time.Time
}

// targetName returns the name of the object in clusters.
func (t *federatedType) targetName(k key) cache.ObjectName {
	if t.IsNamespace() {
		return cache.ObjectName{Name: k.Name}
	}
	return k.ObjectName
}

// keyOf returns the key to which an object in a cluster belongs.
func (t *federatedType) keyOf(target cache.ObjectName) key {
	if t.IsNamespace() {
		target.Namespace = target.Name
	}
	return key{t.Name, target}
}

// get returns a federated object as the cache has it.
func (t *federatedType) get(name cache.ObjectName) (object *informers.Object, digest policy.Digest) {
	object, exists := t.following.Get(name)
	if !exists {
		return nil, digest
	}
	return object, digestOf(object)
}

// view is what is known of a federated object at one moment.
type view struct {
	*federatedType
	key    key
	object *informers.Object // nil if the federated object does not exist
	digest policy.Digest
	// deleting is set if the federated object is being deleted.
	deleting bool
	// inputsListed is set once everything that a removal depends on has been listed.
	inputsListed bool
	// keepUnwanted is set if clusters keep an object that is no longer wanted.
	keepUnwanted bool
	// placedClusters, reason and err are the results of policy.Place: placedClusters has the names of the
	// clusters where the federated object belongs, sorted.
	placedClusters []string
	reason         string
	err            error
	// propagated has the versions that the PropagatedVersion says were last written, validVersions those of them
	// that still hold.
	propagated    policy.Propagated
	validVersions map[string]string
	// fingerprint is a hash of what the view asks of clusters.
	fingerprint uint64
}

// viewOf returns what is known of a key; false if its type does not run.
func (c *controller) viewOf(k key) (*view, bool) {
	c.mu.Lock()
	t, namespaces := c.federatedTypes[k.typeName], c.federatedTypes[policy.NamespacesType]
	var propagatedDigest *policy.Digest
	if record := c.records[k]; record != nil {
		propagatedDigest = record.propagatedDigest
	}
	c.mu.Unlock()
	if t == nil || !t.runs {
		return nil, false
	}
	v := &view{federatedType: t, key: k}
	v.object, v.digest = t.get(k.ObjectName)
	v.inputsListed = t.following.Status().Synced
	var namespace *policy.Placement
	if t.Target.Namespaced() {
		v.inputsListed = v.inputsListed && namespaces != nil && namespaces.following.Status().Synced
		if namespaces != nil {
			if object, digest := namespaces.get(cache.ObjectName{Namespace: k.Namespace, Name: k.Namespace}); object != nil {
				namespace = &digest.Placement
			}
		}
	}
	v.keepUnwanted = t.IsNamespace() && policy.ProtectedNamespace(k.Name, c.cfg.ProtectedNamespaces...)
	if definition, exists := c.informers.definitions.Get(cache.ObjectName{Name: t.Federated.GroupResource().String()}); exists {
		v.keepUnwanted = v.keepUnwanted || definition.GetDeletionTimestamp() != nil
	}
	if v.object == nil {
		return v, true
	}
	v.deleting = v.object.GetDeletionTimestamp() != nil
	v.keepUnwanted = v.keepUnwanted || v.deleting && v.object.GetAnnotations()[policy.OrphanAnnotation] == "true"
	if !t.IsNamespace() || !policy.ProtectedNamespace(k.Name, c.cfg.ProtectedNamespaces...) {
		v.placedClusters, v.reason, v.err = policy.Place(&t.TypeConfig, v.digest.Placement, namespace, c.joinedClusters())
	}
	v.propagated = c.propagatedOf(v)
	v.validVersions = v.propagated.ValidVersions(propagatedDigest, v.digest)
	v.fingerprint = v.computeFingerprint()
	return v, true
}

// propagatedVersion returns the cached PropagatedVersion of the federated object.
func (c *controller) propagatedVersion(v *view) (*informers.Object, bool) {
	versions := c.informers.propagated
	if !v.Federated.Namespaced() {
		versions = c.informers.clusterPropagated
	}
	return versions.Get(v.propagatedName())
}

// propagatedOf returns what the cached PropagatedVersion says. A PropagatedVersion that an earlier federated
// object of this name has left counts as none.
func (c *controller) propagatedOf(v *view) policy.Propagated {
	object, exists := c.propagatedVersion(v)
	if !exists {
		return policy.Propagated{}
	}
	propagated := policy.ReadPropagatedSummary(object.Digest(Name))
	if propagated.Owner != v.object.GetUID() {
		return policy.Propagated{}
	}
	return propagated
}

// propagatedVersionClient returns the client for the PropagatedVersion of the federated object, and its
// resource and kind.
func (c *controller) propagatedVersionClient(v *view) (client dynamic.ResourceInterface, resource schema.GroupVersionResource, kind string) {
	resource, kind = propagatedVersions, "PropagatedVersion"
	if !v.Federated.Namespaced() {
		resource, kind = clusterPropagatedVersions, "ClusterPropagatedVersion"
	}
	return c.host.Dynamic.Resource(resource).Namespace(v.key.Namespace), resource, kind
}

// hasPropagatedTo reports whether federation wrote the object of a cluster, as far as the host knows. A
// restored host does not know what was placed after the backup. The PropagatedVersion is read from the API
// server, since the cache may still have it after a restore has removed it. A version that this process has
// yet to write there counts; a PropagatedVersion of another federated object does not.
func (c *controller) hasPropagatedTo(ctx context.Context, v *view, cluster string) (bool, error) {
	c.mu.Lock()
	record := c.records[v.key]
	last := record.resultOf(cluster)
	unwritten := last != nil && last.version != "" && record.dirty
	c.mu.Unlock()
	if unwritten {
		return true, nil
	}
	client, _, _ := c.propagatedVersionClient(v)
	object, err := client.Get(ctx, v.propagatedName().Name, metav1.GetOptions{})
	if err != nil {
		return false, ignoreNotFound(err)
	}
	propagated := policy.ReadPropagated(object)
	return propagated.Owner == v.object.GetUID() && propagated.HasVersion(cluster), nil
}

// computeFingerprint returns the hash of what the view asks of clusters.
func (v *view) computeFingerprint() uint64 {
	return policy.Fingerprint(v.object.GetUID(), v.digest.Generation, v.digest.Versions, v.placedClusters, v.reason, v.deleting, v.keepUnwanted,
		v.object.GetAnnotations()[policy.DeleteOptionAnnotation])
}

func (v *view) propagatedName() cache.ObjectName {
	return cache.ObjectName{Namespace: v.key.Namespace, Name: policy.PropagatedName(&v.TypeConfig, v.key.Name)}
}

// wanted reports whether a cluster is to have the object.
func (v *view) wanted(cluster string) bool {
	return v.object != nil && !v.deleting && slices.Contains(v.placedClusters, cluster)
}

// expected reports whether the federated object is placed in a cluster, or has it in its PropagatedVersion.
func (v *view) expected(cluster string) bool {
	return slices.Contains(v.placedClusters, cluster) || v.propagated.HasVersion(cluster)
}

// objectState returns the input of policy.Decide. Live is nil if the cluster has no managed object.
func (c *controller) objectState(v *view, r *readyCluster) policy.State {
	s := policy.State{Exists: v.object != nil, Wanted: v.wanted(r.name), KeepUnwanted: v.keepUnwanted, WrittenVersion: v.validVersions[r.name], Rendered: v.digest.ForCluster(r.name)}
	if s.Live = r.liveObject(v.key); s.Live != nil {
		s.IsHostNamespace = c.isHostNamespace(v.federatedType, v.key, s.Live.UID)
	}
	content := v.digest.ContentHash(r.name)
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := c.records[v.key].resultOf(r.name); last != nil && last.version != "" && last.content == content {
		s.WrittenVersion = last.version
	}
	s.LiveAnnotations = r.liveAnnotations[v.key]
	return s
}

// isHostNamespace reports whether an object of a cluster is the host's own Namespace: the cluster is the
// host itself.
func (c *controller) isHostNamespace(t *federatedType, k key, uid types.UID) bool {
	if !t.IsNamespace() {
		return false
	}
	namespace, exists := c.informers.namespaces.Get(cache.ObjectName{Name: k.Name})
	return exists && namespace.GetUID() == uid
}

// joinedClusters returns the KubeFedClusters, sorted by name. Callers share the slice and must not change it.
func (c *controller) joinedClusters() []policy.Cluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.clusterList == nil {
		c.clusterList = []policy.Cluster{}
		for _, object := range c.informers.clusters.List(c.cfg.Namespace, nil) {
			c.clusterList = append(c.clusterList, policy.ReadCluster(object))
		}
		slices.SortFunc(c.clusterList, func(a, b policy.Cluster) int { return strings.Compare(a.Name, b.Name) })
	}
	return c.clusterList
}

// kubeFedCluster returns the KubeFedCluster of a cluster.
func (c *controller) kubeFedCluster(name string) (*unstructured.Unstructured, bool) {
	return c.informers.clusters.Get(cache.ObjectName{Namespace: c.cfg.Namespace, Name: name})
}

// readObject returns a federated object as it was read from the API server a moment ago, not older than the
// cache has it; nil if there is none.
func (c *controller) readObject(ctx context.Context, t *federatedType, name cache.ObjectName) (*unstructured.Unstructured, error) {
	version := ""
	if object, exists := t.following.Get(name); exists {
		version = object.GetResourceVersion()
	}
	return c.recentObjects.get(ctx, key{t.Name, name}, version, t.client)
}

// readFederated reads the federated object of a view.
func (c *controller) readFederated(ctx context.Context, v *view) (*policy.Federated, error) {
	object, err := c.readObject(ctx, v.federatedType, v.key.ObjectName)
	if object == nil || err != nil {
		return nil, err
	}
	return policy.ReadFederated(object), nil
}

// definitionDeleted reports whether the federated object of a view is being deleted, or its
// FederatedNamespace is gone, because the definition of its type is being deleted. The cache may learn of the
// definition later than of the object, so the API server is asked. The answer also counts for each object of
// the type that was first seen in its state before the answer.
func (c *controller) definitionDeleted(ctx context.Context, v *view, t *federatedType) (bool, error) {
	c.mu.Lock()
	seenAt := time.Now()
	if record := c.records[v.key]; record != nil && record.fingerprint == v.fingerprint {
		seenAt = record.since
	}
	defined := t.definedAt.After(seenAt)
	c.mu.Unlock()
	if defined {
		return false, nil
	}
	now := time.Now()
	object, err := c.metadata.Resource(customResourceDefinitions).Get(ctx, t.Federated.GroupResource().String(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil || object.GetDeletionTimestamp() != nil:
		return err == nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.definedAt = now
	return false, nil
}

// readNamespace reads the FederatedNamespace of a view. If the FederatedNamespace may be gone because its
// definition is deleted, the placement is unknown: the result is an error, so that nothing is removed.
func (c *controller) readNamespace(ctx context.Context, v *view) (*unstructured.Unstructured, error) {
	c.mu.Lock()
	namespaces := c.federatedTypes[policy.NamespacesType]
	c.mu.Unlock()
	if namespaces == nil {
		return nil, errors.New("FederatedNamespaces are not followed")
	}
	object, err := c.readObject(ctx, namespaces, cache.ObjectName{Namespace: v.key.Namespace, Name: v.key.Namespace})
	if object != nil || err != nil {
		return object, err
	}
	if deleted, err := c.definitionDeleted(ctx, v, namespaces); deleted || err != nil {
		return nil, cmp.Or(err, errors.New("the CustomResourceDefinition of FederatedNamespaces is being deleted"))
	}
	return nil, nil
}

// stillWanted reads the federated object and its FederatedNamespace from the API server, and reports whether
// the federated object is to be in the cluster, and whether it exists: a cache may be behind, and must not
// cause a removal.
func (c *controller) stillWanted(ctx context.Context, v *view, cluster string) (wanted, exists bool, err error) {
	federated, err := c.readFederated(ctx, v)
	if federated == nil || err != nil || federated.Deleting {
		return false, federated != nil, err
	}
	var namespace *policy.Placement
	if v.Target.Namespaced() {
		federatedNamespace, err := c.readNamespace(ctx, v)
		if err != nil {
			return false, true, err
		}
		if federatedNamespace != nil {
			namespace = &policy.ReadFederated(federatedNamespace).Placement
		}
	}
	if v.keepUnwanted && v.IsNamespace() {
		return false, true, nil
	}
	placed, _, err := policy.Place(&v.TypeConfig, federated.Placement, namespace, c.joinedClusters())
	return err != nil || slices.Contains(placed, cluster), true, nil
}
