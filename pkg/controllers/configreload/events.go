// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"bytes"
	"cmp"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// watches returns the watches of all kinds, types and namespaces. All events enter here. A handler only
// notes the event and enqueues the key of its object, since a slow handler delays everybody's events, and
// tenants decide what an event costs. When a run begins, all workloads are enqueued, and each is compared
// with the cached sources: only later changes of sources matter.
func (c *controller) watches() []controllers.Watch[policy.QueueKey] {
	var list []controllers.Watch[policy.QueueKey]
	for _, k := range c.kinds {
		list = append(list, controllers.WatchMapped(k.informer, func(event controllers.Event[metav1.Object]) []policy.QueueKey {
			return []policy.QueueKey{{Kind: k.Name, ObjectName: cache.MetaObjectToName(cmp.Or(event.New, event.Old))}}
		}))
	}
	for typ, informer := range c.sources {
		list = append(list, controllers.WatchChanges(informer, func(event controllers.Event[cachedSource]) []policy.QueueKey {
			return c.sourceChanged(typ, event)
		}))
	}
	if c.cfg.needsNamespaces() {
		list = append(list, controllers.WatchChanges(c.informers.Namespaces, c.namespaceChanged))
	}
	return list
}

// sourceChanged notes a change of a source, and enqueues the source.
func (c *controller) sourceChanged(typ policy.SourceType, event controllers.Event[cachedSource]) []policy.QueueKey {
	oldDigest, newDigest := digestOf(event.Old), digestOf(event.New)
	c.metrics.sourceChanged(typ, oldDigest, newDigest)
	obj := cmp.Or(event.New, event.Old)
	name := sourceName(typ, obj)
	if name == "" || !c.isSelected(obj.GetNamespace()) {
		return nil
	}
	before, after := c.readSource(event.Old), c.readSource(event.New)
	if bytes.Equal(oldDigest, newDigest) && (newDigest == nil || before.Same(after)) {
		return nil // a new version alone is not a change
	}
	if typ == policy.SecretProviderClass {
		// A pod that comes or goes changes no data of the class, see decideSource in policy.
		if !before.Exists() {
			before = after
		} else if !after.Exists() {
			after = before
		}
	}
	// Most sources concern no workload. A workload that begins to use the source later compares it with its
	// record.
	if !c.affectsAny(obj.GetNamespace(), policy.SourceKey{Type: typ, Name: name}) {
		return nil
	}
	key := policy.QueueKey{Kind: typ.Kind(), ObjectName: cache.NewObjectName(obj.GetNamespace(), name)}
	now := time.Now()
	if c.changes.add(key, change{before, after, now, now}) {
		c.metrics.coalescedChanges.Inc()
	}
	return []policy.QueueKey{key}
}

// namespaceChanged enqueues a namespace that begins or ceases to be selected.
func (c *controller) namespaceChanged(event controllers.Event[metav1.Object]) []policy.QueueKey {
	wasSelected := event.Old != nil && c.selectorMatches(event.Old)
	isSelected := event.New != nil && c.selectorMatches(event.New)
	if event.New == nil {
		c.memory.setSelected(event.Old.GetName(), "")
		return nil
	}
	if wasSelected == isSelected {
		return nil
	}
	c.memory.setSelected(event.New.GetName(), event.New.GetResourceVersion())
	return []policy.QueueKey{{Kind: namespaceKind, ObjectName: cache.NewObjectName(event.New.GetName(), "")}}
}

func (c *controller) selectorMatches(namespace metav1.Object) bool {
	return c.selector.Matches(labels.Set(namespace.GetLabels()))
}
