// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const (
	syncWorkers = 10
	// statusEvery is how often the status of the federated object is written at most.
	statusEvery = time.Second
	// patience is how long the status of the federated object waits for the result of a cluster.
	patience = time.Minute
)

// keyRecord is the record of a key while there is something to do, or to be written on the host.
type keyRecord struct {
	fingerprint uint64
	since       time.Time // when the fingerprint was first seen
	results     map[string]*result
	// was is the digest of the federated object to which the recorded versions belong, if the federated
	// object has changed since.
	was *policy.Digest
	// wrote is when the status was last written; dirty is set after a later write in a cluster.
	wrote time.Time
	dirty bool
	// told are the Events that the federated object has had.
	told []policy.Warning
}

// result is the outcome of a key in one cluster.
type result struct {
	fingerprint uint64
	// done is set when the cluster's loop has reconciled the fingerprint. Until then, the key is in its queue.
	done   bool
	status string
	// version is the object's version after the last write of this content.
	version string
	content uint64
	// cleared is set if the deletion of the federated object need not wait for this cluster.
	cleared bool
}

// resultOf returns the result of a cluster, or nil.
func (r *keyRecord) resultOf(cluster string) *result {
	if r == nil {
		return nil
	}
	return r.results[cluster]
}

// recordFor returns the record of a key, which the caller changes under mu.
func (c *controller) recordFor(k key) *keyRecord {
	r := c.records[k]
	if r == nil {
		r = &keyRecord{results: map[string]*result{}}
		c.records[k] = r
	}
	return r
}

// reconcile finds out what a federated object asks of each cluster, lets the clusters' loops do it, and
// writes the outcome on the host.
func (c *controller) reconcile(ctx context.Context, k key) (time.Duration, error) {
	v, runs := c.viewOf(k)
	if runs && !v.inputsListed {
		return tick, nil // an object that is not listed yet must not look as if it did not exist
	}
	if !runs || v.object == nil {
		c.mu.Lock()
		delete(c.records, k)
		c.mu.Unlock()
		if runs {
			c.enqueueInMembers(k) // managed objects without a federated object
		}
		return 0, nil
	}
	if v.IsNamespace() && k.Name != k.Namespace {
		c.tell(v, policy.Warning{Reason: policy.InvalidName, Text: "a FederatedNamespace has the name of its namespace; this one is ignored"})
		return 0, nil
	}
	if v.err != nil && !v.deleting {
		return c.conclude(ctx, v, nil)
	}
	if v.deleting && !v.digest.Finalizer {
		return 0, nil
	}
	if !v.deleting && !v.digest.Finalizer {
		return 0, c.addFinalizer(ctx, v) // its event is next: no cluster is written before that
	}
	return c.conclude(ctx, v, c.judge(v))
}

// enqueueInMembers enqueues a key in every cluster that holds its object.
func (c *controller) enqueueInMembers(k key) {
	for _, m := range c.ready() {
		if m.holds(k) {
			m.loop.Enqueue(k)
		}
	}
}

// verdict is the state of a federated object in one cluster.
type verdict struct {
	status  string
	pending bool
	cleared bool
}

// judge returns the verdict of every cluster that should have, has, or is recorded to have the object. It
// enqueues the key in each cluster that has something to do and has not reconciled the present fingerprint.
func (c *controller) judge(v *view) map[string]verdict {
	names := slices.Clone(v.placed)
	for _, recorded := range v.recorded.Clusters {
		names = append(names, recorded.Cluster)
	}
	members := c.ready()
	for _, m := range members {
		if m.holds(v.key) {
			names = append(names, m.name)
		}
	}
	slices.Sort(names)
	verdicts := map[string]verdict{}
	for _, name := range slices.Compact(names) {
		if c.joins(name) {
			verdicts[name] = c.judgeIn(v, name, members[name])
		}
	}
	return verdicts
}

func (c *controller) judgeIn(v *view, name string, m *readyMember) verdict {
	if m == nil {
		switch probed, ready := c.clusters.probed(name); {
		case !probed:
			return verdict{pending: true}
		case ready:
			return verdict{status: policy.ClientRetrievalFailed, pending: true} // its loop begins in a moment
		}
		return verdict{status: policy.ClusterNotReady}
	}
	serving := m.serving(v.Name)
	if status := serving.Status(); status != "" {
		wanted := v.wanted(name)
		gone := serving == policy.Absent && !wanted
		if gone {
			status = ""
		}
		return verdict{status: status, pending: serving == policy.NotListed, cleared: gone}
	}
	state := c.state(v, m)
	action := policy.Decide(state)
	clearance := policy.Clearing{Joined: true, Ready: true, Serving: serving, Live: state.Live, Own: state.Own, Expected: v.expected(name)}.Clearance()
	c.mu.Lock()
	r := c.recordFor(v.key)
	if r.fingerprint != v.fingerprint {
		r.fingerprint, r.since = v.fingerprint, c.host.LoopOptions.Clock.Now()
	}
	known := r.results[name]
	if known == nil {
		known = &result{}
		r.results[name] = known
	}
	is := verdict{status: known.status, cleared: known.cleared}
	enqueue := false
	switch {
	case known.fingerprint == v.fingerprint && known.done:
	case action == policy.Nothing && (!v.deleting || clearance != policy.MustAsk):
		known.status = ""
		is.status, is.cleared = "", clearance == policy.Cleared
	default:
		is.pending = true
		enqueue = known.fingerprint != v.fingerprint
		known.fingerprint, known.done = v.fingerprint, false
	}
	c.mu.Unlock()
	if enqueue {
		m.loop.Enqueue(v.key)
	}
	return is
}

// withdraw drops the pending result of a cluster whose loop has reconciled the key without an outcome.
func (c *controller) withdraw(k key, cluster string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.records[k]; r.resultOf(cluster) != nil && !r.results[cluster].done {
		delete(r.results, cluster)
	}
}

// report records the outcome of a key in a cluster.
func (c *controller) report(v *view, cluster string, with result, wrote bool) {
	c.mu.Lock()
	r := c.recordFor(v.key)
	known := r.results[cluster]
	if known == nil {
		known = &result{}
		r.results[cluster] = known
	}
	with.fingerprint, with.done = v.fingerprint, true
	if with.version == "" {
		with.version, with.content = known.version, known.content
	}
	changed := wrote || known.status != with.status || known.cleared != with.cleared || known.fingerprint != with.fingerprint || !known.done
	since := r.since
	*known = with
	r.dirty = r.dirty || wrote
	c.mu.Unlock()
	if wrote && !since.IsZero() {
		c.metrics.lag.WithLabelValues(cluster).Observe(c.host.LoopOptions.Clock.Since(since).Seconds())
	}
	if changed {
		c.loop.Enqueue(v.key)
	}
}

// conclude writes the outcome of a federated object on the host: its versions and its status or, if it is
// being deleted and no cluster has its object, the removal of its finalizer.
func (c *controller) conclude(ctx context.Context, v *view, verdicts map[string]verdict) (time.Duration, error) {
	now := c.host.LoopOptions.Clock.Now()
	c.mu.Lock()
	r := c.recordFor(v.key)
	if r.fingerprint != v.fingerprint {
		r.fingerprint, r.since = v.fingerprint, now
	}
	conclusion := policy.Conclusion{Generation: v.digest.Generation, Wrote: r.dirty}
	if v.reason != "" && !v.deleting {
		conclusion.Reasons = []string{v.reason}
	}
	next, cleared, versions := time.Duration(0), true, map[string]string{}
	for name, verdict := range verdicts {
		cleared = cleared && verdict.cleared
		if verdict.pending {
			if left := patience - now.Sub(r.since); left > 0 {
				next = max(next, left)
			}
			if verdict.status == "" {
				verdict.status = policy.CachedRetrievalFailed
			}
		}
		if v.placed != nil && slices.Contains(v.placed, name) || verdict.status != "" {
			conclusion.Clusters = append(conclusion.Clusters, policy.ClusterResult{Name: name, Status: verdict.status})
		}
		if version := v.valid[name]; v.wanted(name) && version != "" {
			versions[name] = version
		}
		if known := r.results[name]; known != nil && v.wanted(name) && known.version != "" && known.content == v.digest.Content(name) {
			versions[name] = known.version
		}
	}
	wrote := r.wrote
	c.mu.Unlock()
	if v.deleting && cleared {
		return 0, c.removeFinalizer(ctx, v)
	}
	if next > 0 {
		return next, nil
	}
	if left := statusEvery - now.Sub(wrote); left > 0 {
		return left, nil
	}
	if v.deleting {
		c.waiting(v, conclusion.Clusters)
	} else if v.err == nil {
		if err := c.writeVersions(ctx, v, policy.NewPropagated(v.digest.Versions, versions)); err != nil {
			return 0, err
		}
	}
	return 0, c.writeStatus(ctx, v, conclusion)
}

// waiting records an Event with the clusters for which a deleted federated object waits.
func (c *controller) waiting(v *view, clusters []policy.ClusterResult) {
	var names []string
	for _, cluster := range clusters {
		names = append(names, cluster.Name)
	}
	slices.Sort(names)
	c.event(v, corev1.EventTypeNormal, policy.Warning{Reason: "WaitForRemovalInCluster", Text: "waiting until these clusters have removed it: " + strings.Join(names, ", ")})
}

// tell gives the federated object a Warning, once.
func (c *controller) tell(v *view, warning policy.Warning) {
	c.event(v, corev1.EventTypeWarning, warning)
}

// event records an Event on the federated object, once in the life of its record.
func (c *controller) event(v *view, kind string, what policy.Warning) {
	c.mu.Lock()
	r := c.recordFor(v.key)
	told := slices.Contains(r.told, what)
	if !told {
		r.told = append(r.told, what)
	}
	c.mu.Unlock()
	if !told {
		c.emit(v, kind, what.Reason, what.Text)
	}
}

// emit records an Event on the federated object.
func (c *controller) emit(v *view, kind, reason, text string) {
	c.host.Events.Event(&corev1.ObjectReference{APIVersion: v.Federated.APIVersion(), Kind: v.Federated.Kind,
		Namespace: v.key.Namespace, Name: v.key.Name, UID: v.object.GetUID()}, kind, reason, text)
}

// forget drops the record of a key if all that it says is on the host.
func (c *controller) forget(v *view) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.records[v.key]
	if r == nil || r.dirty || r.fingerprint != v.fingerprint || len(r.told) > 0 {
		return
	}
	for _, known := range r.results {
		if known.fingerprint == v.fingerprint && !known.done || known.status != "" {
			return
		}
	}
	delete(c.records, v.key)
}

// requeueTypes drops the results of a cluster for some types, and enqueues all keys of these types.
func (c *controller) requeueTypes(cluster string, of func(*federatedType) bool) {
	c.mu.Lock()
	for k, r := range c.records {
		if t := c.followed[k.kind]; t != nil && of(t) {
			delete(r.results, cluster)
		}
	}
	c.mu.Unlock()
	c.loop.Enqueue(c.all(of)...)
}

// retryHeld enqueues the keys whose removal from a cluster is held.
func (c *controller) retryHeld(name string) {
	m := c.member(name)
	if m == nil {
		return
	}
	c.mu.Lock()
	var held []key
	for k, r := range c.records {
		if known := r.resultOf(name); known != nil && known.status == policy.RemovalHeld {
			held = append(held, k)
		}
	}
	c.mu.Unlock()
	m.loop.Enqueue(held...)
}

// member returns the loop of a cluster, or nil if the cluster is not ready.
func (c *controller) member(name string) *readyMember {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.members[name]
}

func (c *controller) ready() map[string]*readyMember {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.members)
}

func describe(v *view) string { return fmt.Sprintf("%s %q", v.Target.Kind, v.target(v.key)) }
