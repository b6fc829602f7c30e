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
	// syncWorkers is how many federated objects are reconciled on the host at once.
	syncWorkers = 10
	// statusInterval is how often the status of the federated object is written at most.
	statusInterval = time.Second
	// resultTimeout is how long the status of the federated object waits for the result of a cluster.
	resultTimeout = time.Minute
	// earlyVersionsInterval is how often, at most, the PropagatedVersion is written while a cluster has no
	// result, and how long the first new objects wait for it.
	earlyVersionsInterval = 200 * time.Millisecond
)

// keyRecord is what this process remembers of a key while there is something to do, or to be written on the
// host. What the next leader must know is in the PropagatedVersion.
type keyRecord struct {
	fingerprint uint64
	since       time.Time // when the fingerprint was first seen
	results     map[string]*result
	// propagatedDigest is the digest of the federated object to which the versions in the PropagatedVersion
	// belong, if the federated object has changed since.
	propagatedDigest *policy.Digest
	lastStatusWrite  time.Time
	// dirty is set after a write in a cluster that is later than lastStatusWrite.
	dirty bool
	// statusPaced is set once the loop of statuses has let the next status be written.
	statusPaced bool
	// lastEarlyVersions is when the PropagatedVersion was last written while a cluster had no result.
	lastEarlyVersions time.Time
	// events are the reasons and texts of the Events that were recorded on the federated object.
	events []string
}

// result is what the loop of a cluster has reported of a key.
type result struct {
	fingerprint uint64
	// reconciled is set when the cluster's loop has reconciled the fingerprint. Until then, the key is in the
	// loop's queue.
	reconciled bool
	status     string
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

// ensureResult returns the result of a cluster, made anew if there is none.
func (r *keyRecord) ensureResult(cluster string) *result {
	if r.results[cluster] == nil {
		r.results[cluster] = &result{}
	}
	return r.results[cluster]
}

// ensureRecord returns the record of a key, made anew if there is none. The caller holds mu.
func (c *controller) ensureRecord(k key) *keyRecord {
	record := c.records[k]
	if record == nil {
		record = &keyRecord{results: map[string]*result{}}
		c.records[k] = record
	}
	return record
}

// updateFingerprint notes in the record of a view when its fingerprint was first seen, and returns the
// record. The caller holds mu.
func (c *controller) updateFingerprint(v *view) *keyRecord {
	record := c.ensureRecord(v.key)
	if record.fingerprint != v.fingerprint {
		record.fingerprint, record.since = v.fingerprint, time.Now()
	}
	return record
}

// reconcile finds out what a federated object asks of each cluster, lets the clusters' loops do it, and
// writes the outcome on the host.
func (c *controller) reconcile(ctx context.Context, k key) (time.Duration, error) {
	v, runs := c.viewOf(k)
	if runs && !v.inputsListed {
		return pollInterval, nil // an object that is not listed yet must not count as absent
	}
	if !runs || v.object == nil {
		c.mu.Lock()
		delete(c.records, k)
		c.mu.Unlock()
		if runs {
			for _, r := range c.readyClusters() {
				if r.hasObject(k) {
					r.loop.Enqueue(k) // a managed object without a federated object
				}
			}
		}
		return 0, nil
	}
	if v.IsNamespace() && k.Name != k.Namespace {
		c.warnOnce(v, policy.Problem{Reason: policy.InvalidName, Text: "a FederatedNamespace has the name of its namespace; this one is ignored"})
		return 0, nil
	}
	if v.err != nil && !v.deleting {
		return c.writeOutcomes(ctx, v, nil)
	}
	switch {
	case v.digest.HasFinalizer:
	case v.deleting:
		return 0, nil
	default:
		return 0, c.ensureFinalizer(ctx, v, true) // the event of this write comes next; no cluster is written before
	}
	outcomes := c.outcomes(v)
	wait, err := c.writeOffClusters(ctx, v, outcomes)
	if err != nil {
		return 0, err
	}
	requeueAfter, err := c.writeOutcomes(ctx, v, outcomes)
	if wait > 0 && (requeueAfter == 0 || wait < requeueAfter) {
		requeueAfter = wait
	}
	return requeueAfter, err
}

// clusterOutcome is what the host knows of a federated object in one cluster.
type clusterOutcome struct {
	status  string
	pending bool
	cleared bool
}

// outcomes returns the outcome in every cluster that should have or has the object, or is in its
// PropagatedVersion. It enqueues the key in each cluster that has something to do and has not reconciled the
// present fingerprint.
func (c *controller) outcomes(v *view) map[string]clusterOutcome {
	names := slices.Clone(v.placedClusters)
	names = slices.AppendSeq(names, maps.Keys(v.propagated.Clusters))
	ready := c.readyClusters()
	for _, r := range ready {
		if r.hasObject(v.key) {
			names = append(names, r.name)
		}
	}
	slices.Sort(names)
	outcomes := map[string]clusterOutcome{}
	for _, name := range slices.Compact(names) {
		if _, joined := c.kubeFedCluster(name); joined {
			outcomes[name] = c.decideOutcome(v, name, ready[name])
		}
	}
	return outcomes
}

// decideOutcome returns the outcome in one cluster; r is nil if the cluster is not ready.
func (c *controller) decideOutcome(v *view, name string, r *readyCluster) clusterOutcome {
	if r == nil {
		switch state := c.clusters.state(name); {
		case !state.probed:
			return clusterOutcome{pending: true}
		case state.health.Ready():
			return clusterOutcome{status: policy.ClientRetrievalFailed, pending: true} // the cluster's loop begins in a moment
		}
		return clusterOutcome{status: policy.ClusterNotReady}
	}
	availability := r.availability(v.Name)
	if status := availability.Status(); status != "" {
		wanted := v.wanted(name)
		gone := availability == policy.Absent && !wanted
		if gone {
			status = ""
		}
		return clusterOutcome{status: status, pending: availability == policy.NotListed, cleared: gone}
	}
	state := c.objectState(v, r)
	action := policy.Decide(state)
	c.mu.Lock()
	last := c.updateFingerprint(v).ensureResult(name)
	current := clusterOutcome{status: last.status, cleared: last.cleared}
	enqueue := false
	switch {
	case last.fingerprint == v.fingerprint && last.reconciled:
	case action == policy.Nothing && (state.Live != nil || !v.expected(name)): // an empty cache may be late
		last.status = ""
		current.status, current.cleared = "", !v.wanted(name)
	default:
		current.pending = true
		enqueue = last.fingerprint != v.fingerprint
		last.fingerprint, last.reconciled = v.fingerprint, false
	}
	c.mu.Unlock()
	if enqueue {
		r.loop.Enqueue(v.key)
	}
	return current
}

// withdrawResult drops the pending result of a cluster whose loop has reconciled the key without an outcome.
func (c *controller) withdrawResult(k key, cluster string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if record := c.records[k]; record.resultOf(cluster) != nil && !record.results[cluster].reconciled {
		delete(record.results, cluster)
	}
}

// reportResult notes the outcome of a key in a cluster.
func (c *controller) reportResult(v *view, cluster string, next result, wrote bool) {
	c.mu.Lock()
	record := c.ensureRecord(v.key)
	last := record.ensureResult(cluster)
	next.fingerprint, next.reconciled = v.fingerprint, true
	if next.version == "" {
		next.version, next.content = last.version, last.content
	}
	changed := wrote || last.status != next.status || last.cleared != next.cleared || last.fingerprint != next.fingerprint || !last.reconciled
	since := record.since
	*last = next
	record.dirty = record.dirty || wrote
	c.mu.Unlock()
	if wrote && !since.IsZero() {
		c.metrics.lag.WithLabelValues(cluster).Observe(time.Since(since).Seconds())
	}
	if changed {
		c.loop.Enqueue(v.key)
	}
}

// writeOutcomes writes the outcome of a federated object on the host: its versions and its status or, if it
// is being deleted and no cluster has its object, the removal of its finalizer.
func (c *controller) writeOutcomes(ctx context.Context, v *view, outcomes map[string]clusterOutcome) (time.Duration, error) {
	now := time.Now()
	c.mu.Lock()
	record := c.updateFingerprint(v)
	conclusion := policy.Conclusion{Generation: v.digest.Generation, Wrote: record.dirty}
	if v.reason != "" && !v.deleting {
		conclusion.Reason = v.reason
	}
	resultsLeft := time.Duration(0) // how long the results of clusters are awaited
	versions := map[string]string{}
	waiting := []string{}  // the clusters that are not cleared
	hasNewVersion := false // whether the PropagatedVersion lacks a cluster that has been written
	for name, outcome := range outcomes {
		if !outcome.cleared {
			waiting = append(waiting, name)
		}
		if outcome.pending {
			resultsLeft = max(resultsLeft, resultTimeout-now.Sub(record.since))
			if outcome.status == "" {
				outcome.status = policy.CachedRetrievalFailed
			}
		}
		if v.placedClusters != nil && slices.Contains(v.placedClusters, name) || outcome.status != "" {
			conclusion.Clusters = append(conclusion.Clusters, policy.ClusterResult{Name: name, Status: outcome.status})
		}
		last := record.results[name]
		written := last != nil && last.version != ""
		if (v.propagated.HasVersion(name) || written && record.dirty) && (v.wanted(name) || !outcome.cleared) {
			versions[name] = v.validVersions[name] // empty if the cluster has an older content
		}
		if written && v.wanted(name) && last.content == v.digest.ContentHash(name) {
			versions[name] = last.version
			hasNewVersion = hasNewVersion || !v.propagated.HasVersion(name)
		}
	}
	// While a cluster has no result, the status waits for it. The versions of new objects must not: a later
	// leader would not delete an object of which no PropagatedVersion tells.
	statusLeft := v.statusInterval() - now.Sub(record.lastStatusWrite)
	early := resultsLeft > 0 && hasNewVersion && !v.deleting
	earlyLeft := earlyVersionsInterval - min(now.Sub(record.since), now.Sub(record.lastEarlyVersions))
	if early && earlyLeft <= 0 {
		record.lastEarlyVersions = now
	}
	paced := record.statusPaced
	c.mu.Unlock()
	if v.deleting && len(waiting) == 0 {
		return 0, c.removeFinalizer(ctx, v)
	}
	propagated := policy.Propagated{Versions: v.digest.Versions, Clusters: versions}
	switch {
	case early && earlyLeft > 0:
		return earlyLeft, nil
	case early:
		return resultsLeft, c.writePropagatedVersion(ctx, v, propagated)
	case resultsLeft > 0:
		return resultsLeft, nil
	case statusLeft > 0 && v.collects:
		c.statuses.Enqueue(v.key)
		return 0, nil
	case statusLeft > 0:
		return statusLeft, nil
	}
	c.collectStatuses(v, conclusion.Clusters)
	if v.deleting {
		slices.Sort(waiting)
		c.eventOnce(v, corev1.EventTypeNormal, "WaitForRemovalInCluster", "waiting until these clusters have removed the object: "+strings.Join(waiting, ", "))
	} else if v.err == nil {
		if err := c.writePropagatedVersion(ctx, v, propagated); err != nil {
			return 0, err
		}
	}
	return 0, c.writeStatus(ctx, v, conclusion, paced)
}

// warnOnce records a Warning on the federated object, once in the life of its record.
func (c *controller) warnOnce(v *view, problem policy.Problem) {
	c.eventOnce(v, corev1.EventTypeWarning, problem.Reason, problem.Text)
}

// eventOnce records an Event on the federated object, once in the life of its record.
func (c *controller) eventOnce(v *view, eventType, reason, text string) {
	c.mu.Lock()
	record, event := c.ensureRecord(v.key), reason+" "+text
	emitted := slices.Contains(record.events, event)
	if !emitted {
		record.events = append(record.events, event)
	}
	c.mu.Unlock()
	if !emitted {
		c.recordEvent(v, eventType, reason, text)
	}
}

// recordEvent records an Event on the federated object.
func (c *controller) recordEvent(v *view, eventType, reason, text string) {
	c.host.Events.Event(&corev1.ObjectReference{APIVersion: v.Federated.APIVersion(), Kind: v.Federated.Kind,
		Namespace: v.key.Namespace, Name: v.key.Name, UID: v.object.GetUID()}, eventType, reason, text)
}

// dropRecord drops the record of a key if all that it says is on the host.
func (c *controller) dropRecord(v *view) {
	c.mu.Lock()
	defer c.mu.Unlock()
	record := c.records[v.key]
	if record == nil {
		return
	}
	record.statusPaced = false
	if record.dirty || v.collects || // collected statuses are written at intervals, for which the record has the last time
		record.fingerprint != v.fingerprint || len(record.events) > 0 {
		return
	}
	for _, result := range record.results {
		if result.fingerprint == v.fingerprint && !result.reconciled || result.status != "" {
			return
		}
	}
	delete(c.records, v.key)
	if len(c.records) == 0 {
		c.records = map[key]*keyRecord{} // a map does not shrink
	}
}

// dropResults drops the results of a cluster for some types.
func (c *controller) dropResults(cluster string, matches func(*federatedType) bool) {
	c.mu.Lock()
	for k, record := range c.records {
		if t := c.federatedTypes[k.typeName]; t != nil && matches(t) {
			delete(record.results, cluster)
		}
	}
	c.mu.Unlock()
}

// readyCluster returns the loop of a cluster, or nil if the cluster is not ready.
func (c *controller) readyCluster(name string) *readyCluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readyByName[name]
}

// readyClusters returns the clusters that are ready, by name.
func (c *controller) readyClusters() map[string]*readyCluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.readyByName)
}

func describeTarget(v *view) string { return fmt.Sprintf("%s %q", v.Target.Kind, v.targetName(v.key)) }
