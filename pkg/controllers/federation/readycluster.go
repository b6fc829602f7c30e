// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"maps"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const (
	// clusterWorkers is how many objects of one cluster are reconciled at once.
	clusterWorkers = 5
	// clusterTimeout limits a request to a cluster.
	clusterTimeout = 10 * time.Second
)

// readyCluster is a cluster while it is ready: the watches of its objects, and the loop that writes them.
type readyCluster struct {
	controller *controller
	name       string
	client     *client
	loop       keyLoop
	running    atomic.Bool // set while the loop takes keys
	warnedHeld atomic.Bool // set while removals are held and the KubeFedCluster has a Warning of it
	stop       func()      // stops the loop, waits for it and closes it

	// Under the controller's mu:
	watches map[string]*typeWatch // the watches of types, by the name of the FederatedTypeConfig
	// endpoints are the EndpointSlices of managed Services, with --federation-dns.
	endpoints *informers.Following[*informers.Object]
	// liveAnnotations are hashes of annotations after the last write or read, of objects whose annotations are
	// overridden.
	liveAnnotations map[key]*uint64
	// repeats are the recent writes of the same content.
	repeats          map[queuedKey]*policy.Repeats
	lastRemovalCount removalCount
	// recentRemovals are the objects that placement has deleted lately, and when.
	recentRemovals map[types.UID]time.Time
	sweptAt        time.Time
}

// removalWindow is how long a deletion by placement counts, so that the guard adds up changes that follow
// each other.
const removalWindow = time.Minute

// removalCount has the number of objects of a cluster that placement would delete or has deleted lately, and
// the number of managed objects.
type removalCount struct {
	epoch              uint64
	countedAt          time.Time
	deletions, managed int
}

// setClient starts the loop of a cluster with its client, or ends the loop if the client is nil. Calls for
// one cluster follow each other.
func (c *controller) setClient(ctx context.Context, name string, client *client) {
	r := c.readyCluster(name)
	if r != nil && r.client == client {
		return
	}
	if r != nil {
		c.mu.Lock()
		delete(c.readyByName, name)
		c.mu.Unlock()
		r.keepWatches()
		r.stop()
		r.client.CloseIdleConnections()
		c.dropResults(name, everyType)
		c.recheckObjects()
	}
	if client == nil {
		return
	}
	select {
	case <-controllers.Draining(ctx):
		return // closeClients follows
	default:
	}
	if err := c.openCluster(ctx, name, client); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot open a cluster", "cluster", name)
	}
}

// openCluster runs the loop of a cluster.
func (c *controller) openCluster(ctx context.Context, name string, client *client) (err error) {
	r := &readyCluster{controller: c, name: name, client: client,
		watches: map[string]*typeWatch{}, recentRemovals: map[types.UID]time.Time{}, liveAnnotations: map[key]*uint64{}, repeats: map[queuedKey]*policy.Repeats{}}
	options := client.cluster.LoopOptions
	options.Loop = "sync"
	options.Workers, options.Background, options.DrainTimeout = clusterWorkers, r.runBackground, drainTimeout
	if r.loop, err = newKeyLoop(options, r.reconcile); err != nil {
		return err
	}
	r.stop = client.cluster.Go(ctx, r.loop)
	c.mu.Lock()
	c.readyByName[name] = r
	c.mu.Unlock()
	select {
	case c.clusterOpened <- struct{}{}:
	default:
	}
	c.loop.EnqueueFor(name, c.federatedKeys(everyType)...)
	return nil
}

// runBackground notes that the loop takes keys. When the loop ends, its watches end too; followObjects starts
// new ones if the loop is started again.
func (r *readyCluster) runBackground(ctx context.Context) error {
	if r.controller.dns != nil {
		endpoints, err := r.controller.dns.followEndpointSlices(r)
		if err != nil {
			return err
		}
		defer endpoints.Stop()
		r.controller.mu.Lock()
		r.endpoints = endpoints
		r.controller.mu.Unlock()
	}
	r.running.Store(true)
	<-ctx.Done()
	r.running.Store(false)
	for name := range r.watchesByType() {
		r.stopWatch(name)
	}
	return nil
}

// watchesByType returns the watches, by the name of the FederatedTypeConfig.
func (r *readyCluster) watchesByType() map[string]*typeWatch {
	r.controller.mu.Lock()
	defer r.controller.mu.Unlock()
	return maps.Clone(r.watches)
}

// cachedObject returns the managed object of a key as the cache has it.
func (r *readyCluster) cachedObject(k key) (*informers.Object, bool) {
	r.controller.mu.Lock()
	watch := r.watches[k.typeName]
	r.controller.mu.Unlock()
	if watch == nil {
		return nil, false
	}
	return watch.following.Get(watch.federated.targetName(k))
}

// availability returns the state of the watch of a type.
func (r *readyCluster) availability(typeName string) policy.Availability {
	r.controller.mu.Lock()
	defer r.controller.mu.Unlock()
	if watch := r.watches[typeName]; watch != nil {
		return watch.availability
	}
	return policy.NotListed
}

// availabilities returns the states of the watches, by the name of the FederatedTypeConfig.
func (r *readyCluster) availabilities() map[string]string {
	availabilities := map[string]string{}
	for name := range r.watchesByType() {
		availabilities[name] = string(r.availability(name))
	}
	return availabilities
}

// liveObject returns the managed object of a key as the cache has it, or nil.
func (r *readyCluster) liveObject(k key) *policy.LiveObject {
	object, exists := r.cachedObject(k)
	if !exists {
		return nil
	}
	return new(readLiveObject(object))
}

func readLiveObject(o *informers.Object) policy.LiveObject {
	return policy.ReadLiveObject(o, o.Digest(Name))
}

// hasObject reports whether the cluster has a managed object of a key.
func (r *readyCluster) hasObject(k key) bool {
	_, exists := r.cachedObject(k)
	return exists
}

// reconcile does what a key needs in the cluster, and reports the outcome.
func (r *readyCluster) reconcile(ctx context.Context, k key) (time.Duration, error) {
	v, runs := r.controller.viewOf(k)
	switch {
	case !runs, v.err != nil && !v.deleting,
		v.object != nil && v.IsNamespace() && k.Name != k.Namespace, v.object != nil && !v.digest.HasFinalizer, // the host's loop is first
		r.availability(k.typeName).Status() != "": // nothing is known of the type, or the cluster does not have it
		r.controller.withdrawResult(k, r.name)
		return 0, nil
	}
	if err := r.settleWriteOff(ctx, v); err != nil {
		return 0, err
	}
	w := &objectWriter{view: v, cluster: r, state: r.controller.objectState(v, r)}
	var err error
	switch policy.Decide(w.state) {
	case policy.Nothing:
		err = w.confirmAbsent(ctx)
	case policy.Wait:
		w.status = policy.WaitingForRemoval
	case policy.Create:
		err = w.create(ctx)
	case policy.Update:
		err = w.update(ctx)
	case policy.Remove:
		err = w.remove(ctx, true)
	case policy.Unlabel:
		err = w.remove(ctx, false)
	}
	switch noOutcome := w.noOutcome || err != nil; {
	case !noOutcome && v.object != nil:
		r.controller.reportResult(v, r.name, w.result, w.wrote)
	case noOutcome && w.requeueAfter == 0 && err == nil:
		r.controller.withdrawResult(k, r.name)
	}
	if w.noAnswer {
		r.controller.clusters.Enqueue(cache.ObjectName{Namespace: r.controller.cfg.Namespace, Name: r.name}) // probe it: the cluster may be gone
	}
	return w.requeueAfter, cmp.Or(err, w.err)
}

// objectWriter makes one reconcile of a key in a cluster, and has the outcome. Its methods return an error if
// there is no outcome to report.
type objectWriter struct {
	*view
	cluster *readyCluster
	state   policy.State
	result
	// wrote is set after a write, noAnswer after a request that got no answer.
	wrote, noAnswer bool
	// noOutcome is set if there is no outcome to report, but no error either.
	noOutcome    bool
	requeueAfter time.Duration
	// err is why a request that is tried again failed. The outcome is reported.
	err error
}

// setWaiting sets an outcome that will change.
func (w *objectWriter) setWaiting(status string, requeueAfter time.Duration) error {
	w.status, w.requeueAfter = status, requeueAfter
	return nil
}

// confirmAbsent reads the cluster before a deleted federated object may go, and before the PropagatedVersion
// loses an object that is not wanted, if an empty cache does not prove that the object is absent.
func (w *objectWriter) confirmAbsent(ctx context.Context) error {
	if w.object == nil || w.wanted(w.cluster.name) {
		return nil
	}
	if w.state.Live == nil && w.expected(w.cluster.name) {
		live, err := w.get(ctx)
		if err != nil {
			return w.setFailed(policy.RetrievalFailed, err)
		}
		if live != nil && policy.MustBeGone(live, w.isHostNamespace(live)) {
			return w.setWaiting(policy.WaitingForRemoval, time.Second) // the cache does not have the object yet
		}
	}
	w.cleared = true
	return nil
}

// sweepRepeats forgets, once a minute, the writes that need no memory.
func (r *readyCluster) sweepRepeats(now time.Time) {
	if now.Sub(r.sweptAt) < time.Minute {
		return
	}
	r.controller.mu.Lock()
	defer r.controller.mu.Unlock()
	r.sweptAt = now
	for k, repeats := range r.repeats {
		if repeats.Idle(now) {
			delete(r.repeats, k)
		}
	}
}

// removals returns what policy needs to know before placement deletes an object in the cluster.
func (r *readyCluster) removals() policy.Removals {
	state, count := r.controller.clusters.state(r.name), r.countRemovals()
	removals := policy.Removals{ReadySince: state.readySince, Replaced: state.replaced, Deletions: count.deletions, Managed: count.managed}
	if object, joined := r.controller.kubeFedCluster(r.name); joined {
		removals.AllowedUntil = policy.AllowedUntil(object)
	}
	return removals
}

// countRemovals counts the objects that placement would delete in the cluster or has deleted lately. It looks
// at every object, but not again within a second if no placement has changed.
func (r *readyCluster) countRemovals() removalCount {
	epoch, now := r.controller.epoch.Load(), time.Now()
	r.controller.mu.Lock()
	last := r.lastRemovalCount
	maps.DeleteFunc(r.recentRemovals, func(_ types.UID, at time.Time) bool { return now.Sub(at) >= removalWindow })
	recent := maps.Clone(r.recentRemovals)
	r.controller.mu.Unlock()
	if last.epoch == epoch && now.Sub(last.countedAt) < time.Second {
		return last
	}
	count := removalCount{epoch: epoch, countedAt: now, deletions: len(recent), managed: len(recent)}
	for _, watch := range r.watchesByType() {
		for _, object := range watch.following.List("", nil) {
			if _, counted := recent[object.GetUID()]; counted {
				continue
			}
			count.managed++
			v, runs := r.controller.viewOf(watch.federated.keyOf(cache.MetaObjectToName(object)))
			if !runs || v.object == nil || v.deleting || v.keepUnwanted || v.err != nil || v.wanted(r.name) || object.GetDeletionTimestamp() != nil {
				continue
			}
			if !r.controller.isHostNamespace(v.federatedType, v.key, object.GetUID()) {
				count.deletions++
			}
		}
	}
	r.controller.mu.Lock()
	r.lastRemovalCount = count
	r.controller.mu.Unlock()
	return count
}
