// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// newWriteOffLoop returns the loop of the records of removals that were written off.
func (c *controller) newWriteOffLoop(options controllers.LoopOptions) (*controllers.Loop[cache.ObjectName], error) {
	c.informers.writeOffs.AddHandler(func(old, object *corev1.ConfigMap, _ bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if object == nil {
			delete(c.writeOffs, old.Name)
		} else if record, err := policy.ReadWriteOff(object.Name, object.Data); err == nil {
			c.writeOffs[object.Name] = record
		}
	})
	return controllers.NewLoop(options, c.reconcileWriteOff, controllers.WatchSelf(c.informers.writeOffs),
		controllers.WatchChanges(c.informers.clusters, func(e controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			if e.New != nil {
				return nil
			}
			return objectNames(c.informers.writeOffs, c.cfg.Namespace)
		}))
}

// reconcileWriteOff deletes the record of a cluster that has left, and lets the loop of a ready cluster
// carry out the others.
func (c *controller) reconcileWriteOff(ctx context.Context, name cache.ObjectName) (time.Duration, error) {
	object, exists := c.informers.writeOffs.Get(name)
	if !exists {
		return 0, nil
	}
	record, err := policy.ReadWriteOff(object.Name, object.Data)
	if err != nil {
		return 0, controllers.TerminalError(fmt.Errorf("ConfigMap %s: %w", name, err))
	}
	if _, joined := c.kubeFedCluster(record.Cluster); !joined {
		return 0, c.deleteWriteOff(ctx, object)
	}
	if r := c.readyCluster(record.Cluster); r != nil {
		r.loop.Enqueue(writeOffKey(record))
	}
	return 0, nil
}

func writeOffKey(record policy.WriteOff) key {
	return key{record.Type, cache.ObjectName{Namespace: record.Namespace, Name: record.Name}}
}

// deleteWriteOff deletes a record, unless somebody has changed it.
func (c *controller) deleteWriteOff(ctx context.Context, object *corev1.ConfigMap) error {
	preconditions := metav1.Preconditions{UID: &object.UID, ResourceVersion: &object.ResourceVersion}
	err := c.host.Client.CoreV1().ConfigMaps(c.cfg.Namespace).Delete(ctx, object.Name, metav1.DeleteOptions{Preconditions: &preconditions})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("ConfigMap %s: %w", object.Name, err)
	}
	return nil
}

// clusterWriteOffs returns the records of a cluster.
func (c *controller) clusterWriteOffs(cluster string) (records []policy.WriteOff) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, record := range c.writeOffs {
		if record.Cluster == cluster {
			records = append(records, record)
		}
	}
	return records
}

// writeOffClusters lets a deleted federated object go if it waits for nothing but clusters that have been
// away for long: what they owe is recorded first. Otherwise it returns when to look again.
func (c *controller) writeOffClusters(ctx context.Context, v *view, outcomes map[string]clusterOutcome) (wait time.Duration, err error) {
	if !v.deleting || c.cfg.UnreachableGracePeriod <= 0 {
		return 0, nil
	}
	var due []string
	for name, outcome := range outcomes {
		if outcome.cleared {
			continue
		}
		outage, away := c.clusterOutage(ctx, v.Name, name)
		if !away {
			return 0, nil // the cluster's result is awaited first
		}
		wait = max(wait, outage.RemainingGrace(v.object.GetDeletionTimestamp().Time, c.cfg.UnreachableGracePeriod, time.Now()))
		due = append(due, name)
	}
	if wait > 0 {
		return wait, nil
	}
	for _, name := range due {
		written, err := c.writeOffCluster(ctx, v, name)
		if err != nil {
			return 0, fmt.Errorf("write off %s in cluster %s: %w", describeTarget(v), name, err)
		}
		outcomes[name] = clusterOutcome{status: outcomes[name].status, cleared: written}
	}
	return 0, nil
}

// clusterOutage returns what is known of a cluster that is not ready or refuses a type; false means that the
// cluster is ready and does not refuse the type.
func (c *controller) clusterOutage(ctx context.Context, typeName, cluster string) (policy.Outage, bool) {
	if r := c.readyCluster(cluster); r != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		watch := r.watches[typeName]
		if watch == nil || watch.availability != policy.Forbidden {
			return policy.Outage{}, false
		}
		return policy.Outage{Since: watch.since, Confirmed: true}, true
	}
	state := c.clusters.state(cluster)
	return policy.Outage{Since: state.awaySince, Confirmed: state.probed && state.failures >= c.settings(ctx).FailureThreshold}, !state.health.Ready()
}

// writeOffCluster records what a cluster owes when the federated object has gone, unless its object is to
// stay.
func (c *controller) writeOffCluster(ctx context.Context, v *view, cluster string) (written bool, err error) {
	federated, err := c.readFederated(ctx, v)
	if federated == nil || err != nil {
		return false, err
	}
	options, err := c.deleteOptions(v, federated)
	if err != nil {
		return false, nil // wait until the annotation with the DeleteOptions changes
	}
	definitionDeleted, err := c.definitionDeleted(ctx, v, v.federatedType)
	if err != nil {
		return false, err
	}
	consequence := "its object stays there"
	if !definitionDeleted && !v.keepUnwanted {
		consequence = "it removes its object when it is back"
		record := policy.WriteOff{Cluster: cluster, Type: v.Name, Namespace: v.key.Namespace, Name: v.key.Name, FederatedUID: v.object.GetUID(),
			UID: c.lastUID(cluster, v.key), Deleted: v.object.GetDeletionTimestamp().UTC(), Options: options}
		if err := c.saveWriteOff(ctx, record); err != nil {
			return false, err
		}
	}
	klog.FromContext(ctx).V(2).Info("Wrote off a deleted federated object", "object", klog.KRef(v.key.Namespace, v.key.Name), "type", v.Name, "cluster", cluster)
	c.eventOnce(v, corev1.EventTypeNormal, "WrittenOff", fmt.Sprintf("cluster %q has been away for long; %s", cluster, consequence))
	return true, nil
}

// saveWriteOff writes a record. An earlier one, of a former federated object of this name, is replaced.
func (c *controller) saveWriteOff(ctx context.Context, record policy.WriteOff) error {
	client := c.host.Client.CoreV1().ConfigMaps(c.cfg.Namespace)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.cfg.Namespace, Name: policy.WriteOffName(record.Cluster, record.Type, record.Namespace, record.Name),
		Labels: map[string]string{policy.WriteOffLabel: "true"}}, Data: record.Data()}
	_, err := client.Create(ctx, object, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	existing, err := client.Get(ctx, object.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if written, err := policy.ReadWriteOff(existing.Name, existing.Data); err == nil && written.FederatedUID == record.FederatedUID {
		return nil // written before a crash
	}
	object.UID, object.ResourceVersion = existing.UID, existing.ResourceVersion
	_, err = client.Update(ctx, object, metav1.UpdateOptions{})
	return err
}

// owedRemoval reports whether the managed object of a federated object that is gone is to be deleted, with
// which options. Call it after the federated object was found absent: from then on the record of its removal
// exists.
func (w *objectWriter) owedRemoval(ctx context.Context, live metav1.Object) (deletes bool, options metav1.DeleteOptions, err error) {
	name := policy.WriteOffName(w.cluster.name, w.key.typeName, w.key.Namespace, w.key.Name)
	object, err := w.cluster.controller.host.Client.CoreV1().ConfigMaps(w.cluster.controller.cfg.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, options, ignoreNotFound(err)
	}
	record, err := policy.ReadWriteOff(name, object.Data)
	if err != nil || !record.Covers(live) { // the loop of the records reports an invalid record
		return false, options, nil
	}
	_, err = w.client.Namespace(w.key.Namespace).Get(ctx, w.key.Name, metav1.GetOptions{}) // a new read, not one of recentObjects
	switch {
	case apierrors.IsNotFound(err):
		return true, record.Options, nil
	case err == nil:
		err = fmt.Errorf("%s exists again", describeTarget(w.view))
	}
	return false, options, err
}

// settleWriteOff deletes the record of an object once the object is gone from the cluster, or is placed there
// again.
func (r *readyCluster) settleWriteOff(ctx context.Context, v *view) error {
	name := cache.ObjectName{Namespace: r.controller.cfg.Namespace, Name: policy.WriteOffName(r.name, v.key.typeName, v.key.Namespace, v.key.Name)}
	object, exists := r.controller.informers.writeOffs.Get(name)
	if !exists || r.hasObject(v.key) && !v.wanted(r.name) {
		return nil
	}
	return r.controller.deleteWriteOff(ctx, object)
}

// keepWatches keeps what was last seen of a cluster's objects while the cluster is away, for the records of
// removals.
func (r *readyCluster) keepWatches() {
	_, joined := r.controller.kubeFedCluster(r.name)
	r.controller.mu.Lock()
	defer r.controller.mu.Unlock()
	if !joined {
		delete(r.controller.endedWatches, r.name)
		return
	}
	watches := r.controller.endedWatches[r.name]
	if watches == nil {
		watches = map[string]*typeWatch{}
		r.controller.endedWatches[r.name] = watches
	}
	for name, watch := range r.watches {
		if watch.availability == policy.Synced { // otherwise the earlier watch still counts
			watches[name] = watch
		}
	}
}

// lastUID returns the UID of an object of a cluster, as it was last seen, or "".
func (c *controller) lastUID(cluster string, k key) types.UID {
	c.mu.Lock()
	watch := c.endedWatches[cluster][k.typeName]
	c.mu.Unlock()
	if watch == nil {
		return ""
	}
	object, exists := watch.following.Get(watch.federated.targetName(k))
	if !exists {
		return ""
	}
	return object.GetUID()
}
