// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"bytes"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// watches returns the watches of all kinds, types and namespaces. All events enter here. When a run
// begins, all workloads are enqueued, and each is compared with the sources that are in the cache by
// then: only later changes of sources matter.
func (c *Controller) watches() []controllers.Watch[policy.Key] {
	var list []controllers.Watch[policy.Key]
	for _, k := range c.kinds {
		list = append(list, controllers.WatchMapped(k.informer, func(event controllers.Event[metav1.Object]) []policy.Key {
			return c.workloadChanged(k, event)
		}))
	}
	if k := c.kinds["Job"]; c.in.Jobs != nil && k == nil {
		// What the CronJobs' Jobs do is read from the cache, which has to be synced.
		list = append(list, controllers.WatchChanges(c.in.Jobs, func(controllers.Event[metav1.Object]) []policy.Key { return nil }))
	}
	for t, informer := range c.sources {
		if informer != nil {
			list = append(list, controllers.WatchChanges(informer, func(event controllers.Event[Source]) []policy.Key {
				return c.sourceChanged(t, event)
			}))
		}
	}
	if c.cfg.needsNamespaces() {
		list = append(list, controllers.WatchChanges(c.in.Namespaces, c.namespaceChanged))
	}
	return list
}

// workloadChanged enqueues a workload, unless it asks for nothing and never did.
func (c *Controller) workloadChanged(k *kind, event controllers.Event[metav1.Object]) []policy.Key {
	obj := event.New
	if obj == nil {
		obj = event.Old
	}
	key := policy.Key{Kind: k.Name, ObjectName: cache.MetaObjectToName(obj)}
	if w, err := policy.NewWorkload(&k.Kind, obj, Name); err == nil && !c.memory.has(key) && c.keys.AsksForNothing(w) {
		return nil
	}
	return []policy.Key{key}
}

// sourceChanged returns the workloads that a source concerns and notes the change for each of them.
func (c *Controller) sourceChanged(t policy.SourceType, event controllers.Event[Source]) []policy.Key {
	was, is := digestOf(event.Old), digestOf(event.New)
	c.metrics.sourceChanged(t, was, is)
	if bytes.Equal(was, is) && (is == nil || c.sameFlags(event.Old, event.New)) {
		return nil // a new version alone is no change
	}
	obj := event.New
	if obj == nil {
		obj = event.Old
	}
	namespace, key := obj.GetNamespace(), policy.SourceKey{Type: t, Name: sourceName(t, obj)}
	if key.Name == "" || !c.selected(namespace) {
		return nil
	}
	concerned := c.concerned(namespace, key)
	if len(concerned) == 0 {
		return nil // as most are, so the rest is read only now
	}
	before, after := c.source(event.Old), c.source(event.New)
	var list []policy.Key
	for _, w := range concerned {
		if c.noteChange(w, key, before, after) {
			list = append(list, w.Key)
		}
	}
	return list
}

func (c *Controller) sameFlags(a, b Source) bool {
	ignoredA, matchedA := c.keys.Flags(a.GetAnnotations())
	ignoredB, matchedB := c.keys.Flags(b.GetAnnotations())
	return ignoredA == ignoredB && matchedA == matchedB
}

// noteChange reports whether a change of a source matters to w. If its data changed, or if it begins to
// count with the data that it has, it opens or extends the window of w.
func (c *Controller) noteChange(w *policy.Workload, key policy.SourceKey, before, after policy.Source) bool {
	r := c.keys.Rules(w)
	if !policy.Concerns(w, r, key, before, after) {
		e := c.memory.get(w.Key, w.UID)
		recorded, _ := c.recorded(w, &e) // the error is reported when the workload is reconciled
		_, known := recorded[key]
		return known
	}
	// If an annotation of the source changed, what is recorded may have to change.
	if before.Hash == after.Hash && policy.Concerns(w, r, key, before, policy.Source{}) {
		return true
	}
	if key.Type == policy.SecretProviderClass && (!before.Exists() || !after.Exists()) {
		return true // of one of many pods, see policy
	}
	now := c.clock.Now()
	c.memory.update(w.Key, w.UID, now, func(e *entry) {
		if !e.window.Add(key, before.Recorded(), now) {
			c.metrics.coalesced.Inc()
		}
		if ran, ok := e.job.ranFor[key]; ok && ran != after.Hash {
			e.job.ranFor = nil
		}
	})
	return true
}

// noteAll notes the data with which the sources of w begin to count.
func (c *Controller) noteAll(w *policy.Workload) {
	now := c.clock.Now()
	sources := c.lookUp(w, c.keys.Rules(w), nil)
	c.memory.update(w.Key, w.UID, now, func(e *entry) {
		for key, s := range sources {
			e.window.Add(key, s.Recorded(), now)
		}
	})
}

// namespaceChanged enqueues the workloads of a namespace that begins or ceases to be selected.
func (c *Controller) namespaceChanged(event controllers.Event[metav1.Object]) []policy.Key {
	was := event.Old != nil && c.selects(event.Old)
	is := event.New != nil && c.selects(event.New)
	if was == is || event.New == nil {
		return nil
	}
	var list []policy.Key
	for _, k := range c.kinds {
		for _, obj := range k.informer.GetIndexer().List() {
			if obj.(metav1.Object).GetNamespace() != event.New.GetName() {
				continue
			}
			if w, err := policy.NewWorkload(&k.Kind, obj, Name); err == nil && is && !c.keys.AsksForNothing(w) {
				c.noteAll(w)
			}
			list = append(list, policy.Key{Kind: k.Name, ObjectName: cache.MetaObjectToName(obj.(metav1.Object))})
		}
	}
	return list
}

func (c *Controller) selects(namespace any) bool {
	m, err := meta.Accessor(namespace)
	return err == nil && c.selector.Matches(labels.Set(m.GetLabels()))
}
