// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const (
	memberWorkers = 5
	// memberTimeout limits a request to a cluster.
	memberTimeout = 10 * time.Second
)

// readyMember is a cluster while it is ready: the watches of its objects, and the loop that writes them.
type readyMember struct {
	c       *controller
	name    string
	client  *client
	cluster *controllers.Cluster
	objects dynamic.Interface
	loop    *controllers.Loop[key]
	running atomic.Bool // the loop takes keys
	held    atomic.Bool // the KubeFedCluster has been told that removals are held
	stop    context.CancelFunc
	ended   sync.WaitGroup

	// Under the controller's mu:
	types map[string]*typeWatch
	// liveAnnotations are hashes of annotations after the last write or read, of objects whose annotations are
	// overridden.
	liveAnnotations map[key]*uint64
	// repeats are the recent writes of the same content.
	repeats map[key]*policy.Repeats
	counted removalCount
	swept   time.Time
}

// removalCount is how many objects of a cluster placement would delete, of how many managed ones.
type removalCount struct {
	epoch              uint64
	at                 time.Time
	deletions, managed int
}

// setClient starts the loop of a cluster with its client, or ends the loop if the client is nil. Calls for
// one cluster follow each other.
func (c *controller) setClient(ctx context.Context, name string, client *client) {
	m := c.member(name)
	if m != nil && m.client == client {
		return
	}
	if m != nil {
		c.mu.Lock()
		delete(c.members, name)
		c.mu.Unlock()
		m.stop()
		m.ended.Wait()
		m.loop.Close()
		m.client.CloseIdleConnections()
		c.requeueTypes(name, func(*federatedType) bool { return true })
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
	m := &readyMember{c: c, name: name, client: client, cluster: client.cluster,
		types: map[string]*typeWatch{}, liveAnnotations: map[key]*uint64{}, repeats: map[key]*policy.Repeats{}}
	config := rest.CopyConfig(client.cluster.RESTConfig)
	config.Timeout = memberTimeout
	if m.objects, err = dynamic.NewForConfig(config); err != nil {
		return err
	}
	options := client.cluster.LoopOptions
	options.Name += "-sync"
	options.Workers, options.Background, options.DrainTimeout = memberWorkers, m.background, drain
	if m.loop, err = controllers.NewLoop(options, m.reconcile); err != nil {
		return err
	}
	ctx, m.stop = context.WithCancel(context.WithoutCancel(ctx)) // longer than this probe
	m.ended.Go(func() {
		if err := m.loop.Run(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Cluster loop stopped unexpectedly", "cluster", name)
		}
	})
	c.mu.Lock()
	c.members[name] = m
	c.mu.Unlock()
	select {
	case c.opened <- struct{}{}:
	default:
	}
	c.loop.Enqueue(c.all(func(*federatedType) bool { return true })...)
	return nil
}

// background notes that the loop takes keys. When it ends, so do the watches.
func (m *readyMember) background(ctx context.Context) error {
	m.running.Store(true)
	<-ctx.Done()
	m.running.Store(false)
	for name := range m.snapshot() {
		m.stopWatch(name)
	}
	return nil
}

// snapshot returns copies of the watches, by the name of the FederatedTypeConfig.
func (m *readyMember) snapshot() map[string]typeWatch {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	all := make(map[string]typeWatch, len(m.types))
	for name, s := range m.types {
		all[name] = *s
	}
	return all
}

// objectOf returns the managed object of a key as the cache has it.
func (m *readyMember) objectOf(k key) (*informers.Object, bool) {
	m.c.mu.Lock()
	s := m.types[k.kind]
	if s == nil {
		m.c.mu.Unlock()
		return nil, false
	}
	following, target := s.following, s.of.target(k)
	m.c.mu.Unlock()
	return following.Get(target)
}

// serving returns the state of the watch of a type.
func (m *readyMember) serving(kind string) policy.Serving {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if s := m.types[kind]; s != nil {
		return s.State
	}
	return policy.NotListed
}

func (m *readyMember) states() map[string]string {
	words := map[policy.Serving]string{policy.NotListed: "NotListed", policy.Synced: "Synced", policy.Absent: "Absent", policy.Forbidden: "Forbidden"}
	states := map[string]string{}
	for name := range m.snapshot() {
		states[name] = words[m.serving(name)]
	}
	return states
}

// live returns the managed object of a key as the cache has it, or nil.
func (m *readyMember) live(k key) *policy.Member {
	object, exists := m.objectOf(k)
	if !exists {
		return nil
	}
	live, err := policy.ReadMember(object, object.Digest(Name))
	if err != nil {
		live.Version = "" // it is read, then
	}
	return &live
}

// holds reports whether the cluster has a managed object of a key.
func (m *readyMember) holds(k key) bool {
	_, exists := m.objectOf(k)
	return exists
}

// reconcile does what a key needs in the cluster, and reports the outcome.
func (m *readyMember) reconcile(ctx context.Context, k key) (time.Duration, error) {
	v, runs := m.c.viewOf(k)
	switch {
	case !runs, v.err != nil && !v.deleting,
		v.object != nil && v.IsNamespace() && k.Name != k.Namespace, v.object != nil && !v.digest.Finalizer, // the host's loop comes first
		m.serving(k.kind).Status() != "": // nothing is known of the type, or the cluster does not have it
		m.c.withdraw(k, m.name)
		return 0, nil
	}
	w := &work{view: v, m: m, state: m.c.state(v, m)}
	switch policy.Decide(w.state) {
	case policy.Nothing:
		w.confirmAbsent(ctx)
	case policy.Wait:
		w.status = policy.WaitingForRemoval
	case policy.Create:
		w.create(ctx)
	case policy.Look, policy.Update:
		w.update(ctx)
	case policy.Remove:
		w.remove(ctx, true)
	case policy.Unlabel:
		w.remove(ctx, false)
	}
	switch {
	case !w.unknown && v.object != nil:
		m.c.report(v, m.name, w.result, w.wrote)
	case w.unknown && w.after == 0 && w.err == nil:
		m.c.withdraw(k, m.name)
	}
	if w.noAnswer {
		m.c.clusters.Enqueue(cache.ObjectName{Namespace: m.c.cfg.Namespace, Name: m.name}) // is it still there?
	}
	return w.after, w.err
}

// work is one reconcile of a key in a cluster, and its outcome.
type work struct {
	*view
	m     *readyMember
	state policy.State
	result
	// wrote is set after a write, noAnswer after a request that got no answer.
	wrote, noAnswer bool
	// unknown is set while there is no outcome to report.
	unknown bool
	after   time.Duration
	err     error
}

// confirmAbsent reads the cluster before a deleted federated object may go, if an empty cache does not prove
// that the object is absent.
func (w *work) confirmAbsent(ctx context.Context) {
	if !w.deleting {
		return
	}
	clearing := policy.Clearing{Joined: true, Ready: true, Serving: w.m.serving(w.Name), Live: w.state.Live, Own: w.state.Own, Expected: w.expected(w.m.name)}
	if clearing.Clearance() == policy.MustAsk {
		live, err := w.get(ctx)
		if err != nil {
			w.fail(policy.RetrievalFailed, err)
			return
		}
		clearing.Checked = policy.LiveAbsent
		if live != nil {
			clearing.Checked = policy.CheckLive(live, w.m.c.isHostNamespace(w.federatedType, w.key, live.GetUID()))
		}
	}
	if w.cleared = clearing.Clearance() == policy.Cleared; !w.cleared {
		w.status, w.after = policy.WaitingForRemoval, time.Second // the cache will show it
	}
}

// sweep forgets, once a minute, the writes and annotations of objects that need no memory.
func (m *readyMember) sweep(now time.Time) {
	if now.Sub(m.swept) < time.Minute {
		return
	}
	m.c.mu.Lock()
	m.swept = now
	var kept []key
	for k, repeats := range m.repeats {
		if repeats.Idle(now) {
			delete(m.repeats, k)
		}
	}
	for k := range m.liveAnnotations {
		kept = append(kept, k)
	}
	m.c.mu.Unlock()
	for _, k := range kept {
		if !m.holds(k) {
			m.c.mu.Lock()
			delete(m.liveAnnotations, k)
			m.c.mu.Unlock()
		}
	}
}

// removals returns what policy needs to know before a removal from the cluster.
func (m *readyMember) removals(v *view) policy.Removals {
	ready, since := m.c.clusters.Ready(m.name)
	r := policy.Removals{Listed: v.inputsListed && ready, ReadySince: since}
	for _, cluster := range m.c.joinedClusters() {
		if cluster.Name == m.name {
			r.AllowedUntil, _ = cluster.AllowsRemovals() // what is no time allows nothing
		}
	}
	n := m.countRemovals()
	r.Deletions, r.Managed = n.deletions, n.managed
	return r
}

// countRemovals counts the objects that placement would delete in the cluster. It looks at every object, but
// not again within a second if no placement has changed.
func (m *readyMember) countRemovals() removalCount {
	epoch, now := m.c.epoch.Load(), m.c.host.LoopOptions.Clock.Now()
	m.c.mu.Lock()
	known := m.counted
	m.c.mu.Unlock()
	if known.epoch == epoch && !known.at.IsZero() && now.Sub(known.at) < time.Second {
		return known
	}
	n := removalCount{epoch: epoch, at: now}
	for _, s := range m.snapshot() {
		for _, object := range s.following.List("", nil) {
			n.managed++
			v, runs := m.c.viewOf(s.of.keyOf(cache.MetaObjectToName(object)))
			if !runs || v.object == nil || v.deleting || v.keepUnwanted || v.err != nil || v.wanted(m.name) || object.GetDeletionTimestamp() != nil {
				continue
			}
			if !m.c.isHostNamespace(v.federatedType, v.key, object.GetUID()) {
				n.deletions++
			}
		}
	}
	m.c.mu.Lock()
	m.counted = n
	m.c.mu.Unlock()
	return n
}
