// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// removeFinalizer deletes the PropagatedVersion and then lets the federated object go. The garbage collector
// would delete the PropagatedVersion later, perhaps when a new federated object of this name uses it; it does
// delete one that the cache does not have yet.
func (c *controller) removeFinalizer(ctx context.Context, v *view) error {
	if object, exists := c.propagatedVersion(v); exists {
		client, _, kind := c.propagatedVersionClient(v)
		err := client.Delete(ctx, object.GetName(), metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(object.GetUID()))})
		if ignoreNotFound(err) != nil {
			return fmt.Errorf("%s %s: %w", kind, v.propagatedName(), err)
		}
	}
	if err := c.ensureFinalizer(ctx, v, false); err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.records, v.key)
	c.mu.Unlock()
	return nil
}

// ensureFinalizer adds or removes the finalizer, which keeps the federated object until no cluster has its
// object.
func (c *controller) ensureFinalizer(ctx context.Context, v *view, wanted bool) error {
	object, err := c.readObject(ctx, v.federatedType, v.key.ObjectName)
	if object == nil || err != nil {
		return err
	}
	changed, err := setFinalizer(ctx, v.client.Namespace(v.key.Namespace), object, policy.Finalizer, wanted)
	if changed != nil {
		c.recentObjects.put(v.key, changed)
	}
	return err
}

// setFinalizer adds or removes a finalizer, unless somebody has changed the object since it was read. It
// returns nil if nothing was written.
func setFinalizer(ctx context.Context, client dynamic.ResourceInterface, object *unstructured.Unstructured, finalizer string, wanted bool) (*unstructured.Unstructured, error) {
	finalizers := object.GetFinalizers()
	if slices.Contains(finalizers, finalizer) == wanted {
		return nil, nil
	}
	if wanted {
		finalizers = append(finalizers, finalizer)
	} else {
		finalizers = slices.DeleteFunc(finalizers, func(f string) bool { return f == finalizer })
	}
	// With the resourceVersion, since the patch replaces the finalizers of others too.
	return patch(ctx, client, object.GetName(), map[string]any{
		"metadata": map[string]any{"resourceVersion": object.GetResourceVersion(), "finalizers": finalizers}})
}

// federationClient returns the client of a resource in the federation namespace.
func (c *controller) federationClient(resource schema.GroupVersionResource) dynamic.ResourceInterface {
	return c.host.Dynamic.Resource(resource).Namespace(c.cfg.Namespace)
}

// patch merges a change into an object. It returns nil if the object is gone.
func patch(ctx context.Context, client dynamic.ResourceInterface, name string, change map[string]any, subresources ...string) (*unstructured.Unstructured, error) {
	data, err := json.Marshal(change)
	if err != nil {
		return nil, err
	}
	object, err := client.Patch(ctx, name, types.MergePatchType, data, metav1.PatchOptions{}, subresources...)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return object, err
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// writePropagatedVersion writes the PropagatedVersion of the federated object if it has changed.
func (c *controller) writePropagatedVersion(ctx context.Context, v *view, next policy.Propagated) error {
	if v.propagated.Equal(next) || v.propagated.Template == "" && v.propagated.Overrides == "" && len(next.Clusters) == 0 {
		return nil
	}
	client, resource, kind := c.propagatedVersionClient(v)
	name, status := v.propagatedName(), map[string]any{"status": next.Status()}
	object, err := patch(ctx, client, name.Name, status, "status")
	if err == nil && object != nil && policy.ReadPropagated(object).Owner != v.object.GetUID() {
		// The PropagatedVersion belongs to an earlier federated object of this name. The garbage collector may be
		// about to delete it by its UID, so it is made anew.
		err = ignoreNotFound(client.Delete(ctx, name.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(object.GetUID()))}))
		object = nil
	}
	if err == nil && object == nil {
		object = &unstructured.Unstructured{Object: map[string]any{}}
		object.SetGroupVersionKind(resource.GroupVersion().WithKind(kind))
		object.SetName(name.Name)
		object.SetNamespace(name.Namespace)
		object.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: v.Federated.APIVersion(), Kind: v.Federated.Kind, Name: v.key.Name, UID: v.object.GetUID()}})
		if _, err = client.Create(ctx, object, metav1.CreateOptions{}); err == nil {
			_, err = patch(ctx, client, name.Name, status, "status")
		}
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", kind, name, err)
	}
	return nil
}

// writeStatus writes the status of the federated object if it has changed, and drops the record if there is
// nothing left to write. A status that follows from no write must be paced.
func (c *controller) writeStatus(ctx context.Context, v *view, conclusion policy.Conclusion, paced bool) error {
	now := time.Now()
	expected, _ := policy.FederatedStatus{}.Next(conclusion, now)
	switch {
	case conclusion.Wrote:
	case expected.Hash() == v.digest.Status:
		c.dropRecord(v)
		return nil
	case !paced:
		c.statuses.Enqueue(v.key)
		return nil
	}
	federated, err := c.readFederated(ctx, v)
	if federated == nil || err != nil {
		return err
	}
	for _, warning := range federated.Warnings() {
		c.warnOnce(v, warning)
	}
	if v.err != nil {
		c.warnOnce(v, policy.Problem{Reason: policy.ComputePlacementFailed, Text: v.err.Error()})
	}
	status, changed := federated.Status.Next(conclusion, now)
	if changed {
		// null for an empty list: a merge patch leaves absent fields as they are.
		fields := map[string]any{"observedGeneration": status.ObservedGeneration, "conditions": status.Conditions, "clusters": nil}
		if len(status.Clusters) > 0 {
			fields["clusters"] = status.Clusters
		}
		object, err := patch(ctx, v.client.Namespace(v.key.Namespace), v.key.Name, map[string]any{"status": fields}, "status")
		if err != nil {
			return fmt.Errorf("status of %s %s: %w", v.Federated.Kind, v.key.ObjectName, err)
		}
		c.statusDuration.Store(int64(time.Since(now)))
		if object != nil {
			c.recentObjects.put(v.key, object)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	record := c.ensureRecord(v.key)
	record.dirty, record.statusPaced, record.lastStatusWrite = false, false, now
	return nil
}

// deleteOptions returns the DeleteOptions of the federated object for clusters. If they are malformed, its
// deletion waits.
func (c *controller) deleteOptions(v *view, federated *policy.Federated) (metav1.DeleteOptions, error) {
	options, err := federated.DeleteOptions()
	if err != nil {
		c.warnOnce(v, policy.Problem{Reason: policy.InvalidDeleteOptions, Text: err.Error()})
	}
	return options, err
}

// warnRemovalsHeld tells once on a KubeFedCluster that removals are held.
func (c *controller) warnRemovalsHeld(r *readyCluster, removals string) {
	if r.warnedHeld.Swap(true) {
		return
	}
	if object, joined := c.kubeFedCluster(r.name); joined {
		c.host.Events.Eventf(object, corev1.EventTypeWarning, policy.RemovalsHeld,
			"placement would delete %s; the annotation %s with a time allows it until then", removals, policy.AllowRemovalsAnnotation)
	}
}

const (
	// collectInterval is statusInterval if the status of the objects in clusters is collected.
	collectInterval = 5 * time.Second
	// paceInterval is the time between two statuses that follow from no write: there may be one of every
	// federated object, and what somebody changes must not wait for them. While a status takes long to write,
	// the time is longer, up to maxPaceInterval.
	paceInterval, maxPaceInterval = 20 * time.Millisecond, 100 * time.Millisecond
)

// statusInterval returns how often the status of the federated object is written at most.
func (t *federatedType) statusInterval() time.Duration {
	if t != nil && t.collects {
		return collectInterval
	}
	return statusInterval
}

// paceStatus lets the loop of the host, which alone writes statuses, write one that follows from no write in
// a cluster.
func (c *controller) paceStatus(ctx context.Context, k key) (time.Duration, error) {
	c.mu.Lock()
	record, t := c.ensureRecord(k), c.federatedTypes[k.typeName]
	remaining := t.statusInterval() - time.Since(record.lastStatusWrite)
	record.statusPaced = remaining <= 0
	c.mu.Unlock()
	if remaining > 0 {
		return remaining, nil
	}
	c.loop.Enqueue(k)
	select {
	case <-time.After(min(max(paceInterval, 2*time.Duration(c.statusDuration.Load())), maxPaceInterval)):
	case <-controllers.Draining(ctx):
	}
	return 0, nil
}

// recheckObjects enqueues all federated objects after a cluster has gone away: those that are being deleted
// may be written off, and the statuses of the others follow one by one.
func (c *controller) recheckObjects() {
	for _, t := range c.followedTypes() {
		for _, object := range t.following.List(metav1.NamespaceAll, nil) {
			loop := c.statuses
			if object.GetDeletionTimestamp() != nil {
				loop = c.loop
			}
			loop.Enqueue(key{t.Name, cache.MetaObjectToName(object)})
		}
	}
}

// collectStatuses gives the results of clusters the status of their objects, if it is collected.
func (c *controller) collectStatuses(v *view, results []policy.ClusterResult) {
	if !v.collects || v.deleting {
		return
	}
	statuses := map[string]policy.RemoteStatus{}
	for name, r := range c.readyClusters() {
		if object, exists := r.cachedObject(v.key); exists {
			statuses[name] = policy.ReadRemoteStatus(object.Digest(Name))
		}
	}
	if tooLarge := policy.SetRemoteStatuses(results, statuses); len(tooLarge) > 0 {
		c.warnOnce(v, policy.Problem{Reason: policy.StatusTooLarge, Text: "the status of these clusters is left out: " + strings.Join(tooLarge, ", ")})
	}
}
