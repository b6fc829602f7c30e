// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// followObjects follows the federated objects of the types that run, on the host and in the clusters, until
// ctx ends.
func (c *controller) followObjects(ctx context.Context) error {
	defer func() {
		for name := range c.followedTypes() {
			c.unfollow(name)
		}
	}()
	for {
		c.followTypes(ctx)
		interval := idlePollInterval
		for _, r := range c.readyClusters() {
			if r.syncWatches(ctx) {
				interval = pollInterval
			}
		}
		c.recentObjects.removeExpired()
		c.metrics.setGauges(c.clusterStatuses())
		select {
		case <-time.After(interval):
		case <-c.clusterOpened:
		case <-ctx.Done():
			return nil
		}
	}
}

// followedTypes returns the types that are followed, by the name of the FederatedTypeConfig.
func (c *controller) followedTypes() map[string]*federatedType {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.federatedTypes)
}

// followTypes follows the types that run, and FederatedNamespaces if they can be, and no others.
func (c *controller) followTypes(ctx context.Context) {
	wanted := map[string]*federatedType{}
	// FederatedNamespaces place other objects even if Namespaces are not propagated.
	if namespaces, follows := policy.Namespaces(c.types.typeConfigs(), c.types.isDefined); follows {
		wanted[namespaces.Name] = &federatedType{TypeConfig: namespaces}
	}
	config := c.settings(ctx)
	for _, t := range c.types.runningTypes() {
		wanted[t.Name] = &federatedType{TypeConfig: t, runs: true, collects: t.CollectsStatus(config)}
	}
	for name, t := range c.followedTypes() {
		next := wanted[name]
		if next != nil && next.Generation == t.Generation && next.runs == t.runs && next.collects == t.collects {
			delete(wanted, name)
			continue
		}
		c.unfollow(name)
	}
	for name, t := range wanted {
		if err := c.followType(t); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot follow a federated type", "type", name)
		}
	}
}

// unfollow stops the watch of a type, and removes the records of its objects.
func (c *controller) unfollow(name string) {
	c.mu.Lock()
	t := c.federatedTypes[name]
	delete(c.federatedTypes, name)
	for k := range c.records {
		if k.typeName == name {
			delete(c.records, k)
		}
	}
	c.mu.Unlock()
	if t != nil {
		t.unwatch()
		t.following.Stop()
	}
}

// followType follows the federated objects of a type.
func (c *controller) followType(t *federatedType) (err error) {
	resource := schema.GroupVersionResource{Group: t.Federated.Group, Version: t.Federated.Version, Resource: t.Federated.PluralName}
	t.client = c.host.Dynamic.Resource(resource)
	need := informers.Need{
		Resource: resource, ClusterScoped: !t.Federated.Namespaced(),
		Annotations: []string{policy.OrphanAnnotation, policy.DeleteOptionAnnotation}, MaxAnnotation: 4096,
		Digest: informers.DigestOf(policy.SummarizeFederated),
	}
	// The lock makes the handler wait until the type is in the map, so that reconciles find the type of the
	// enqueued keys.
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.following, err = informers.Follow[*informers.Object](c.host, need); err != nil {
		return err
	}
	t.unwatch, err = c.loop.Watch(controllers.WatchMapped(t.following.Informer, func(e controllers.Event[*informers.Object]) []queuedKey {
		return []queuedKey{newQueuedKey(c.federatedChanged(t, e.Old, e.New))}
	}))
	if err != nil {
		t.following.Stop()
		return err
	}
	c.federatedTypes[t.Name] = t
	return nil
}

// federatedChanged enqueues what depends on a federated object, and returns its key.
func (c *controller) federatedChanged(t *federatedType, old, object *informers.Object) key {
	var before, after policy.Digest
	name := cache.ObjectName{}
	if old != nil {
		name, before = cache.MetaObjectToName(old), digestOf(old)
	}
	if object != nil {
		name, after = cache.MetaObjectToName(object), digestOf(object)
	}
	k := key{t.Name, name}
	moved := old == nil || object == nil || policy.Fingerprint(before.Placement) != policy.Fingerprint(after.Placement)
	if moved {
		c.epoch.Add(1)
	}
	if old != nil && object != nil && before.Versions != after.Versions {
		c.rememberDigest(&view{federatedType: t, key: k, object: object}, before)
	}
	if moved || before.Generation != after.Generation {
		c.replicas.enqueuePreference(k)
	}
	if moved && t.IsNamespace() && name.Name == name.Namespace {
		c.replicas.Enqueue(objectNames(c.informers.preferences, name.Namespace)...)
		for _, k := range c.federatedKeys(func(t *federatedType) bool { return t.Target.Namespaced() }) {
			if k.Namespace == name.Namespace {
				c.loop.Enqueue(k)
			}
		}
	}
	return k
}

// rememberDigest keeps the digest of the federated object to which the versions in the PropagatedVersion
// belong, so that the version of a cluster whose overrides stay the same still holds.
func (c *controller) rememberDigest(v *view, before policy.Digest) {
	if c.propagatedOf(v).Versions != before.Versions {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ensureRecord(v.key).propagatedDigest = &before
}

func digestOf(o *informers.Object) policy.Digest { return policy.ReadDigest(o.Digest(Name)) }

// typeWatch is the watch of a type in a cluster. A watch that fails tries again by itself.
type typeWatch struct {
	following *informers.Following[*informers.Object]
	federated *federatedType
	// availability is what the watch has found out, since is when availability last changed. Only the goroutine
	// of followObjects changes the two, under the mu of the controller.
	availability policy.Availability
	since        time.Time
}

// availabilityOf returns the state of the watch of a type in a cluster.
func availabilityOf(s informers.ResourceStatus) policy.Availability {
	switch {
	case s.Absent:
		return policy.Absent
	case s.Forbidden:
		return policy.Forbidden
	case s.Synced:
		return policy.Synced
	}
	return policy.NotListed
}

// syncWatches starts and stops watches so that each running type has one, and enqueues the objects of each
// type whose state has changed. It reports whether any type is not listed yet.
func (r *readyCluster) syncWatches(ctx context.Context) (unlisted bool) {
	if !r.running.Load() {
		return true
	}
	wanted, watches := r.controller.followedTypes(), r.watchesByType()
	for name, watch := range watches {
		if wanted[name] != watch.federated {
			r.stopWatch(name)
			delete(watches, name)
		}
	}
	now := time.Now()
	r.sweepRepeats(now)
	for name, t := range wanted {
		watch, watched := watches[name]
		switch {
		case !t.runs:
		case !watched:
			r.startWatch(ctx, t)
			unlisted = true
		default:
			state := availabilityOf(watch.following.Status())
			if unlisted = unlisted || state == policy.NotListed; state != watch.availability && state != policy.NotListed {
				r.setAvailability(watch, state, now)
			}
		}
	}
	return unlisted
}

// setAvailability notes a new state of the watch of a type.
func (r *readyCluster) setAvailability(watch *typeWatch, state policy.Availability, now time.Time) {
	r.controller.mu.Lock()
	watch.availability, watch.since = state, now
	if state == policy.Synced {
		delete(r.controller.endedWatches[r.name], watch.federated.Name)
	}
	r.controller.mu.Unlock()
	r.enqueueType(watch)
}

// startWatch starts the watch of a type in the cluster.
func (r *readyCluster) startWatch(ctx context.Context, t *federatedType) {
	need := informers.Need{
		Resource: schema.GroupVersionResource{Group: t.Target.Group, Resource: t.Target.PluralName}, ClusterScoped: !t.Target.Namespaced(),
		LabelSelector: policy.ManagedLabel + "=true", Form: informers.Metadata, Optional: true,
		Digest: informers.DigestOf(policy.SummarizeLiveObject),
	}
	if t.collects || r.controller.dns != nil && r.controller.dns.records[t.Name] != nil {
		need.Resource.Version, need.Form, need.Digest = t.Target.Version, informers.Reduced, informers.DigestOf(policy.SummarizeWithStatus)
	}
	following, err := informers.Follow[*informers.Object](r.client.cluster, need)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot watch a type in the cluster", "type", t.Name, "err", err)
		return
	}
	following.AddHandler(func(old, object *informers.Object, initial bool) {
		gone := object == nil
		switch {
		case gone:
			object = old
		case old == nil && initial:
			return
		}
		k := t.keyOf(cache.MetaObjectToName(object))
		if gone {
			r.controller.mu.Lock()
			delete(r.liveAnnotations, k)
			r.controller.mu.Unlock()
		}
		if gone || old == nil || readLiveObject(old) != readLiveObject(object) {
			r.loop.Enqueue(k) // a change of the status alone needs no write
		}
		r.controller.replicas.enqueuePreference(k)
		r.controller.dns.enqueueRecord(k)
		if t.collects {
			r.controller.statuses.Enqueue(k)
		}
	})
	r.controller.mu.Lock()
	defer r.controller.mu.Unlock()
	if !r.running.Load() {
		following.Stop() // the loop has ended meanwhile, and its other watches are stopped already
		return
	}
	r.watches[t.Name] = &typeWatch{following: following, federated: t, availability: policy.NotListed}
}

// enqueueType enqueues all objects of a type when the state of its watch in the cluster has changed, as
// after the first complete list.
func (r *readyCluster) enqueueType(watch *typeWatch) {
	for _, object := range watch.following.List(metav1.NamespaceAll, nil) {
		k := watch.federated.keyOf(cache.MetaObjectToName(object))
		r.controller.dns.enqueueRecord(k)
		if _, exists := watch.federated.following.Get(k.ObjectName); !exists {
			r.loop.Enqueue(k)
		}
	}
	for _, record := range r.controller.clusterWriteOffs(r.name) {
		if record.Type == watch.federated.Name {
			r.loop.Enqueue(writeOffKey(record))
		}
	}
	isType := func(t *federatedType) bool { return t == watch.federated }
	r.controller.dropResults(r.name, isType)
	r.controller.loop.EnqueueFor(r.name, r.controller.federatedKeys(isType)...)
}

// stopWatch stops the watch of a type in the cluster.
func (r *readyCluster) stopWatch(name string) {
	r.controller.mu.Lock()
	watch := r.watches[name]
	delete(r.watches, name)
	r.controller.mu.Unlock()
	if watch != nil {
		watch.following.Stop()
	}
}
