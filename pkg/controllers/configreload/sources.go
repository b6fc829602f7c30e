// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// change is what happened to a source until a workload knows it: events of one source are merged.
type change struct {
	before, after policy.Source
	first, last   time.Time
}

// merge returns the change merged with a later change. A source that is the same again as before the first
// change has not changed.
func (c change) merge(later change) change {
	if !c.before.Same(c.after) {
		later.before = c.before
	}
	later.first = c.first
	return later
}

// changes holds what happened to sources. A handler adds the change of a source. The reconcile of the
// source hands the change to the workloads that it may concern. The reconcile of a workload takes its
// changes. So no event handler evaluates the annotations of workloads. Handlers and workers use it
// concurrently.
type changes struct {
	mu          sync.Mutex
	pending     map[policy.QueueKey]change                      // by source
	distributed map[policy.QueueKey]map[policy.SourceKey]change // by workload
}

func newChanges() *changes {
	c := &changes{}
	c.clear()
	return c
}

func (c *changes) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending, c.distributed = map[policy.QueueKey]change{}, map[policy.QueueKey]map[policy.SourceKey]change{}
}

// add notes an event. It returns true if the event is merged with others.
func (c *changes) add(key policy.QueueKey, latest change) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	earlier, merged := c.pending[key]
	if merged {
		latest = earlier.merge(latest)
	}
	c.pending[key] = latest
	return merged
}

// distribute hands the pending change of a source to workloads. It returns false if there is none.
func (c *changes) distribute(key policy.QueueKey, source policy.SourceKey, workloads []policy.QueueKey) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, ok := c.pending[key]
	delete(c.pending, key)
	for _, w := range workloads {
		if ok && c.distributed[w] == nil {
			c.distributed[w] = map[policy.SourceKey]change{}
		}
		if earlier, has := c.distributed[w][source]; has {
			c.distributed[w][source] = earlier.merge(next)
		} else if ok {
			c.distributed[w][source] = next
		}
	}
	return ok
}

// take returns the changes that a workload was handed, and the pending changes of the watched sources. The
// reconcile of such a source may hand the same change to the workload again.
func (c *changes) take(workload policy.QueueKey, watched map[policy.SourceKey]bool) map[policy.SourceKey]change {
	c.mu.Lock()
	defer c.mu.Unlock()
	result := c.distributed[workload]
	delete(c.distributed, workload)
	for source := range watched {
		e, ok := c.pending[sourceKey(workload.Namespace, source)]
		if !ok {
			continue
		}
		if result == nil {
			result = map[policy.SourceKey]change{}
		}
		if earlier, has := result[source]; has {
			e = earlier.merge(e)
		}
		result[source] = e
	}
	return result
}

// sourceKey returns the key of a source in the queue.
func sourceKey(namespace string, source policy.SourceKey) policy.QueueKey {
	return policy.QueueKey{Kind: source.Type.Kind(), ObjectName: cache.NewObjectName(namespace, source.Name)}
}

// reconcileSource hands a change of a source to the workloads that it may concern.
func (c *controller) reconcileSource(ctx context.Context, key policy.QueueKey) {
	i := slices.IndexFunc(policy.SourceTypes, func(typ policy.SourceType) bool { return typ.Kind() == key.Kind })
	source := policy.SourceKey{Type: policy.SourceTypes[i], Name: key.Name}
	workloads := slices.Collect(c.affectedWorkloads(key.Namespace, source))
	if c.changes.distribute(key, source, workloads) {
		c.loop.EnqueueFor(ctx, key.Namespace, workloads...)
	}
}

// extendWindow opens or extends the window of the workload, if a change of a source matters to it: the
// source's data changed, or the source begins to count with the data that it has.
func (c *controller) extendWindow(workload *policy.Workload, selection *policy.Selection, source policy.SourceKey, e change) {
	if !policy.Concerns(workload, selection, source, e.before, e.after) ||
		// If an annotation of the source changed, the record may have to change.
		e.before.Hash == e.after.Hash && policy.Concerns(workload, selection, source, e.before, policy.Source{}) {
		return
	}
	c.memory.update(workload.QueueKey, workload.UID, time.Now(), func(current *entry) {
		if current.window.Add(source, e.before.RecordedHash(), e.first, e.last) {
			c.metrics.coalescedChanges.Inc()
		}
		if ranHash, ok := current.lastRun.hashes[source]; ok && ranHash != e.after.Hash {
			current.lastRun.hashes = nil
		}
	})
}

// affectedWorkloads yields the cached workloads that a source may concern.
func (c *controller) affectedWorkloads(namespace string, source policy.SourceKey) iter.Seq[policy.QueueKey] {
	return func(yield func(policy.QueueKey) bool) {
		for _, value := range []string{sourceIndexValue(namespace, source), namespace + "/" + patternValue} {
			for _, k := range c.kinds {
				for _, obj := range k.informer.ByIndex(sourceIndex, value) {
					if !yield(policy.QueueKey{Kind: k.Name, ObjectName: cache.MetaObjectToName(obj)}) {
						return
					}
				}
			}
		}
	}
}

// affectsAny reports whether a source may concern any cached workload.
func (c *controller) affectsAny(namespace string, source policy.SourceKey) bool {
	for range c.affectedWorkloads(namespace, source) {
		return true
	}
	return false
}

// namespaceKind is the kind of the key of a namespace.
const namespaceKind = "Namespace"

// reconcileNamespace enqueues the workloads of a namespace.
func (c *controller) reconcileNamespace(ctx context.Context, key policy.QueueKey) {
	for _, k := range c.kinds {
		var list []policy.QueueKey
		for _, obj := range k.informer.List(key.Namespace, nil) {
			list = append(list, policy.QueueKey{Kind: k.Name, ObjectName: cache.MetaObjectToName(obj)})
		}
		c.loop.EnqueueFor(ctx, key.Namespace, list...)
	}
}
