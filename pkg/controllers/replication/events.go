// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
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
	// sourceIn finds them by the namespace of their source.
	sourceIn = "from-in/"
	// within finds what participates by namespace.
	within = "in/"
)

func (c *Controller) indexOf(kind policy.Kind) cache.IndexFunc {
	return func(obj any) (values []string, _ error) {
		if len(obj.(policy.Cached).Digest(Name)) == 0 {
			return nil, nil // most objects
		}
		o := policy.Decode(kind, obj.(policy.Cached), Name)
		values = append(values, within+o.Namespace)
		if source, refers := c.rules.Refers(o); refers {
			values = append(values, refersTo+source.String(), sourceIn+source.Namespace)
		}
		if c.rules.Pushes(o) {
			values = append(values, pushers, pushers+o.Name)
		}
		return values, nil
	}
}

func (c *Controller) indexed(kind policy.Kind, value string) (list []*policy.Object) {
	found, err := c.in.Objects[kind].GetIndexer().ByIndex(index, value)
	if err != nil {
		return nil // the index exists
	}
	for _, obj := range found {
		list = append(list, policy.Decode(kind, obj.(policy.Cached), Name))
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

// objectChanged returns the targets that an object concerns: itself, what it pushes to or did, and
// what has its data.
func (c *Controller) objectChanged(kind policy.Kind, event controllers.Event[policy.Cached]) (found []policy.Key) {
	var key policy.Key
	for _, cached := range []policy.Cached{event.Old, event.New} {
		if cached == nil {
			continue
		}
		key = policy.NewKey(kind, cached.GetNamespace(), cached.GetName())
		if len(cached.Digest(Name)) == 0 {
			continue // most objects, of which nothing else need be looked at
		}
		o := policy.Decode(kind, cached, Name)
		if c.rules.IsTarget(o) {
			found = append(found, key)
		}
		if c.rules.Pushes(o) {
			found = c.appendPushed(found, o)
		}
	}
	if len(c.indexed(kind, pushers+key.Name)) > 0 {
		found = append(found, key)
	}
	if event.New != nil {
		c.memory.exists(key)
	}
	for _, o := range c.indexed(kind, refersTo+key.NamespacedName.String()) {
		found = append(found, o.Key)
	}
	return found
}

func (c *Controller) appendPushed(found []policy.Key, source *policy.Object) []policy.Key {
	for _, ns := range c.namespaces() {
		if c.rules.MayPush(source, ns) {
			found = append(found, policy.NewKey(source.Kind, ns.Name, source.Name))
		}
	}
	return found
}

// namespaceChanged returns what is in the namespace or may be pushed to it and, since its labels and
// its end also count for what comes from it, the targets of that.
func (c *Controller) namespaceChanged(event controllers.Event[metav1.Object]) (found []policy.Key) {
	var versions []*policy.Namespace
	for _, obj := range []metav1.Object{event.Old, event.New} {
		if obj != nil {
			versions = append(versions, namespaceOf(obj))
		}
	}
	name := versions[0].Name
	for kind := range c.in.Objects {
		for _, source := range c.indexed(kind, pushers) {
			if slices.ContainsFunc(versions, func(ns *policy.Namespace) bool { return c.rules.MayPush(source, ns) }) {
				found = append(found, policy.NewKey(kind, name, source.Name))
			}
		}
		for _, o := range c.indexed(kind, within+name) {
			if c.rules.IsTarget(o) {
				found = append(found, o.Key)
			}
			if c.rules.Pushes(o) {
				found = c.appendPushed(found, o)
			}
		}
		for _, o := range c.indexed(kind, sourceIn+name) { // also of sources that are gone
			found = append(found, o.Key)
		}
	}
	return found
}
