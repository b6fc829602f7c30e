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
	clusterWorkers = 5
	// clusterTimeout limits a request to a cluster.
	clusterTimeout = 10 * time.Second
)

// readyCluster is a cluster while it is ready: the watches of its objects, and the loop that writes them.
type readyCluster struct {
	c          *controller
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
	repeats map[queuedKey]*policy.Repeats
	counted removalCount
	// removed are the objects that placement has deleted lately, and when.
	removed map[types.UID]time.Time
	swept   time.Time
}

// removalWindow is how long a deletion by placement counts, so that one change after the other counts.
const removalWindow = time.Minute

// removalCount is how many objects of a cluster placement would delete or has deleted lately, of how many
// managed ones.
type removalCount struct {
	epoch              uint64
	at                 time.Time
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
		delete(c.readyClusters, name)
		c.mu.Unlock()
		r.keepWatches()
		r.stop()
		r.client.CloseIdleConnections()
		c.dropResults(name, everyType)
		c.recheckAll()
	}
	if client == nil {
		return
	}
	select {
	case <-controllers.Draining(ctx):
		return // closeAll follows
	default:
	}
	if err := c.open(ctx, name, client); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot open a cluster", "cluster", name)
	}
}

// open runs the loop of a cluster.
func (c *controller) open(ctx context.Context, name string, client *client) (err error) {
	r := &readyCluster{c: c, name: name, client: client,
		watches: map[string]*typeWatch{}, removed: map[types.UID]time.Time{}, liveAnnotations: map[key]*uint64{}, repeats: map[queuedKey]*policy.Repeats{}}
	options := client.cluster.LoopOptions
	options.Loop = "sync"
	options.Workers, options.Background, options.DrainTimeout = clusterWorkers, r.background, drainTimeout
	if r.loop, err = newKeyLoop(options, r.reconcile); err != nil {
		return err
	}
	r.stop = client.cluster.Go(ctx, r.loop)
	c.mu.Lock()
	c.readyClusters[name] = r
	c.mu.Unlock()
	select {
	case c.opened <- struct{}{}:
	default:
	}
	c.loop.EnqueueFor(name, c.all(everyType)...)
	return nil
}

// background notes that the loop takes keys. When it ends, so do the watches, and follow starts others if the
// loop is started again.
func (r *readyCluster) background(ctx context.Context) error {
	if r.c.dns != nil {
		endpoints, err := r.c.dns.follow(r)
		if err != nil {
			return err
		}
		defer endpoints.Stop()
		r.c.mu.Lock()
		r.endpoints = endpoints
		r.c.mu.Unlock()
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
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return maps.Clone(r.watches)
}

// objectOf returns the managed object of a key as the cache has it.
func (r *readyCluster) objectOf(k key) (*informers.Object, bool) {
	r.c.mu.Lock()
	w := r.watches[k.kind]
	r.c.mu.Unlock()
	if w == nil {
		return nil, false
	}
	return w.following.Get(w.federated.target(k))
}

// serving returns the state of the watch of a type.
func (r *readyCluster) serving(kind string) policy.Serving {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if w := r.watches[kind]; w != nil {
		return w.serving
	}
	return policy.NotListed
}

// states returns the states of the watches, by the name of the FederatedTypeConfig.
func (r *readyCluster) states() map[string]string {
	states := map[string]string{}
	for name := range r.watchesByType() {
		states[name] = string(r.serving(name))
	}
	return states
}

// live returns the managed object of a key as the cache has it, or nil.
func (r *readyCluster) live(k key) *policy.LiveObject {
	object, exists := r.objectOf(k)
	if !exists {
		return nil
	}
	return new(liveOf(object))
}

func liveOf(o *informers.Object) policy.LiveObject { return policy.ReadLiveObject(o, o.Digest(Name)) }

// holds reports whether the cluster has a managed object of a key.
func (r *readyCluster) holds(k key) bool {
	_, exists := r.objectOf(k)
	return exists
}

// reconcile does what a key needs in the cluster, and reports the outcome.
func (r *readyCluster) reconcile(ctx context.Context, k key) (time.Duration, error) {
	v, runs := r.c.viewOf(k)
	switch {
	case !runs, v.err != nil && !v.deleting,
		v.object != nil && v.IsNamespace() && k.Name != k.Namespace, v.object != nil && !v.digest.Finalizer, // the host's loop comes first
		r.serving(k.kind).Status() != "": // nothing is known of the type, or the cluster does not have it
		r.c.withdraw(k, r.name)
		return 0, nil
	}
	if err := r.settleWrittenOff(ctx, v); err != nil {
		return 0, err
	}
	w := &work{view: v, cluster: r, state: r.c.state(v, r)}
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
	switch unknown := w.unknown || err != nil; {
	case !unknown && v.object != nil:
		r.c.report(v, r.name, w.result, w.wrote)
	case unknown && w.after == 0 && err == nil:
		r.c.withdraw(k, r.name)
	}
	if w.noAnswer {
		r.c.clusters.Enqueue(cache.ObjectName{Namespace: r.c.cfg.Namespace, Name: r.name}) // is it still there?
	}
	return w.after, cmp.Or(err, w.err)
}

// work is one reconcile of a key in a cluster, and its outcome. Its methods return an error if there is no
// outcome to report.
type work struct {
	*view
	cluster *readyCluster
	state   policy.State
	result
	// wrote is set after a write, noAnswer after a request that got no answer.
	wrote, noAnswer bool
	// unknown is set if there is no outcome to report, but no error either.
	unknown bool
	after   time.Duration
	// err is why a request that is tried again failed. The outcome is reported.
	err error
}

// wait is an outcome that will change.
func (w *work) wait(status string, after time.Duration) error {
	w.status, w.after = status, after
	return nil
}

// confirmAbsent reads the cluster before a deleted federated object may go, and before the PropagatedVersion
// loses an object that is not wanted, if an empty cache does not prove that the object is absent.
func (w *work) confirmAbsent(ctx context.Context) error {
	if w.object == nil || w.wanted(w.cluster.name) {
		return nil
	}
	if w.state.Live == nil && w.expected(w.cluster.name) {
		live, err := w.get(ctx)
		if err != nil {
			return w.fail(policy.RetrievalFailed, err)
		}
		if live != nil && policy.Present(live, w.isOwn(live)) {
			return w.wait(policy.WaitingForRemoval, time.Second) // the cache will show it
		}
	}
	w.cleared = true
	return nil
}

// sweep forgets, once a minute, the writes that need no memory.
func (r *readyCluster) sweep(now time.Time) {
	if now.Sub(r.swept) < time.Minute {
		return
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	r.swept = now
	for k, repeats := range r.repeats {
		if repeats.Idle(now) {
			delete(r.repeats, k)
		}
	}
}

// removals returns what policy needs to know before placement deletes an object in the cluster.
func (r *readyCluster) removals() policy.Removals {
	state, n := r.c.clusters.state(r.name), r.countRemovals()
	removals := policy.Removals{ReadySince: state.readySince, Replaced: state.replaced, Deletions: n.deletions, Managed: n.managed}
	if object, joined := r.c.kubeFedCluster(r.name); joined {
		removals.AllowedUntil = policy.AllowedUntil(object)
	}
	return removals
}

// countRemovals counts the objects that placement would delete in the cluster or has deleted lately. It looks
// at every object, but not again within a second if no placement has changed.
func (r *readyCluster) countRemovals() removalCount {
	epoch, now := r.c.epoch.Load(), time.Now()
	r.c.mu.Lock()
	known := r.counted
	maps.DeleteFunc(r.removed, func(_ types.UID, at time.Time) bool { return now.Sub(at) >= removalWindow })
	removed := maps.Clone(r.removed)
	r.c.mu.Unlock()
	if known.epoch == epoch && now.Sub(known.at) < time.Second {
		return known
	}
	n := removalCount{epoch: epoch, at: now, deletions: len(removed), managed: len(removed)}
	for _, w := range r.watchesByType() {
		for _, object := range w.following.List("", nil) {
			if _, counted := removed[object.GetUID()]; counted {
				continue
			}
			n.managed++
			v, runs := r.c.viewOf(w.federated.keyOf(cache.MetaObjectToName(object)))
			if !runs || v.object == nil || v.deleting || v.keepUnwanted || v.err != nil || v.wanted(r.name) || object.GetDeletionTimestamp() != nil {
				continue
			}
			if !r.c.isHostNamespace(v.federatedType, v.key, object.GetUID()) {
				n.deletions++
			}
		}
	}
	r.c.mu.Lock()
	r.counted = n
	r.c.mu.Unlock()
	return n
}
