// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"bytes"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// The index, and the prefixes of its values.
const (
	index = Name + "/keys"
	// pushers finds the sources that push, by name; without a name, all of them.
	pushers = "push/"
	// refersTo finds pull targets and copies by their source, namespace/name.
	refersTo = "from/"
	// within finds what participates by namespace.
	within = "in/"
)

func (c *Controller) indexOf(kind policy.Kind) cache.IndexFunc {
	return func(obj any) (values []string, _ error) {
		o := policy.Decode(kind, obj.(policy.Cached), Name)
		if len(o.Annotations) == 0 {
			return nil, nil
		}
		values = append(values, within+o.Namespace)
		if source, refers := c.rules.Refers(o); refers {
			values = append(values, refersTo+source.String())
		}
		if c.rules.Pushes(o) {
			values = append(values, pushers, pushers+o.Name)
		}
		return values, nil
	}
}

func (c *Controller) indexed(kind policy.Kind, value string) (list []policy.Cached) {
	found, err := c.in.Objects[kind].GetIndexer().ByIndex(index, value)
	if err != nil {
		return nil // the index exists
	}
	for _, obj := range found {
		list = append(list, obj.(policy.Cached))
	}
	return list
}

// watches returns the watches of all kinds and of namespaces. All events enter here.
func (c *Controller) watches() (list []controllers.Watch[policy.Key]) {
	for kind, informer := range c.in.Objects {
		list = append(list, controllers.WatchMapped(informer, func(event controllers.Event[policy.Cached]) []policy.Key {
			return c.objectChanged(kind, event)
		}))
	}
	if c.in.Namespaces != nil {
		// The sources that push to them are mapped when a run begins.
		list = append(list, controllers.WatchChanges(c.in.Namespaces, c.namespaceChanged))
	}
	return list
}

// keys is a set of targets.
type keys map[policy.Key]struct{}

func (k keys) add(key policy.Key) { k[key] = struct{}{} }

func (k keys) list() []policy.Key {
	return slices.Collect(maps.Keys(k))
}

// objectChanged returns the targets that an object concerns: itself, what it pushes to or did, and
// what has its data.
func (c *Controller) objectChanged(kind policy.Kind, event controllers.Event[policy.Cached]) []policy.Key {
	if event.Old != nil && event.New != nil && event.Old.GetResourceVersion() != event.New.GetResourceVersion() && alike(event.Old, event.New) {
		return nil
	}
	found := keys{}
	var key policy.Key
	for _, cached := range []policy.Cached{event.Old, event.New} {
		if cached == nil {
			continue
		}
		o := policy.Decode(kind, cached, Name)
		key = o.Key
		if c.rules.IsTarget(o) {
			found.add(key)
		}
		if c.rules.Pushes(o) {
			c.addPushed(found, o)
		}
	}
	if len(c.indexed(kind, pushers+key.Name)) > 0 {
		found.add(key)
	}
	c.addDependants(found, key)
	if event.New != nil {
		c.memory.exists(key)
	}
	list := found.list()
	if !event.Initial {
		c.memory.waits(key, list, c.clock.Now())
	}
	return list
}

// alike reports whether no decision can tell the two apart.
func alike(a, b policy.Cached) bool {
	return a.GetUID() == b.GetUID() && (a.GetDeletionTimestamp() == nil) == (b.GetDeletionTimestamp() == nil) &&
		bytes.Equal(a.Digest(Name), b.Digest(Name))
}

func (c *Controller) addPushed(found keys, source *policy.Object) {
	add := func(ns *policy.Namespace) {
		if c.rules.MayPush(source, ns) {
			found.add(policy.NewKey(source.Kind, ns.Name, source.Name))
		}
	}
	for _, namespace := range c.cfg.Scope {
		add(&policy.Namespace{Name: namespace})
	}
	if c.in.Namespaces != nil {
		for _, obj := range c.in.Namespaces.GetIndexer().List() {
			add(namespaceOf(obj.(metav1.Object)))
		}
	}
}

func (c *Controller) addDependants(found keys, source policy.Key) {
	for _, obj := range c.indexed(source.Kind, refersTo+source.NamespacedName.String()) {
		found.add(policy.NewKey(source.Kind, obj.GetNamespace(), obj.GetName()))
	}
}

// namespaceChanged returns what is in the namespace or may be pushed to it and, since labels of a
// namespace also count for what its objects push, the targets of those.
func (c *Controller) namespaceChanged(event controllers.Event[metav1.Object]) []policy.Key {
	if event.New == nil {
		return nil // its objects are deleted one by one
	}
	before, after := namespaceOf(event.Old), namespaceOf(event.New)
	created := before == nil
	if !created && event.Old.GetResourceVersion() != event.New.GetResourceVersion() &&
		maps.Equal(before.Labels, after.Labels) && before.Terminating == after.Terminating {
		return nil
	}
	found := keys{}
	for kind := range c.in.Objects {
		for _, obj := range c.indexed(kind, pushers) {
			source := policy.Decode(kind, obj, Name)
			if c.rules.MayPush(source, after) || !created && c.rules.MayPush(source, before) {
				found.add(policy.NewKey(kind, after.Name, source.Name))
			}
		}
		for _, obj := range c.indexed(kind, within+after.Name) {
			o := policy.Decode(kind, obj, Name)
			if c.rules.IsTarget(o) {
				found.add(o.Key)
			}
			if c.rules.Pushes(o) {
				c.addPushed(found, o)
			}
			c.addDependants(found, o.Key)
		}
	}
	return found.list()
}
