// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"cmp"
	"context"
	"reflect"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// task is what a worker does at once.
type task struct {
	subject
	policy.Key
}

// subject is what a task is about.
type subject string

// The subjects. An event enqueues at most two tasks, however many objects depend on its object. A worker
// finds the dependants, in the turn of the object's namespace.
const (
	theTarget    subject = ""          // decide on it, and write it
	theSource    subject = "source"    // enqueue its targets
	theNamespace subject = "namespace" // enqueue the targets in it, of pushes to it and of sources in it
)

func (t task) String() string { return strings.TrimSpace(string(t.subject) + " " + t.Key.String()) }

// Tenant returns the namespace in whose turn the task is done, unless EnqueueFor names another.
func (t task) Tenant() string { return t.Namespace }

// The name of the index of participants, and the prefixes of the index's values.
const (
	participantsIndex = Name + "/keys"
	// pushers finds the sources that push, by name; without a name, all of them.
	pushers = "push/"
	// copiesOf and pullsOf find copies and pull targets by their source, namespace/name.
	copiesOf, pullsOf = "copy-of/", "pull-of/"
	// sourceIn finds copies and pull targets by the namespace of their source.
	sourceIn = "from-in/"
	// within finds participants by namespace.
	within = "in/"
)

func (c *controller) indexOf(kind policy.Kind) func(policy.Cached) []string {
	return func(obj policy.Cached) (values []string) {
		if !policy.Participates(obj, Name) {
			return nil // most objects
		}
		o := policy.DecodeHead(kind, obj, Name)
		values = append(values, within+o.Namespace)
		switch from, mode := c.evaluator.Refers(o); mode {
		case policy.Push:
			values = append(values, copiesOf+from.String(), sourceIn+from.Namespace)
		case policy.Pull:
			values = append(values, pullsOf+from.String(), sourceIn+from.Namespace)
		}
		if c.evaluator.Pushes(o) {
			values = append(values, pushers, pushers+o.Name)
		}
		return values
	}
}

// indexed returns the keys of the objects that the index has under a value.
func (c *controller) indexed(kind policy.Kind, value string) (keys []policy.Key) {
	for _, obj := range c.in.Objects[kind].ByIndex(participantsIndex, value) {
		keys = append(keys, policy.NewKey(kind, obj.GetNamespace(), obj.GetName()))
	}
	return keys
}

// watches returns the watches of all kinds and of namespaces. All events enter here.
func (c *controller) watches() (list []controllers.Watch[task]) {
	for kind, informer := range c.in.Objects {
		list = append(list, controllers.WatchMapped(informer, func(event controllers.Event[policy.Cached]) []task {
			return c.objectChanged(kind, event)
		}))
	}
	if c.in.Namespaces != nil {
		// The sources that push to them are mapped when a run begins.
		list = append(list, controllers.WatchChanges(c.in.Namespaces, namespaceChanged))
	}
	return list
}

// objectChanged returns the object as a target and as a source, as far as it may be one.
func (c *controller) objectChanged(kind policy.Kind, event controllers.Event[policy.Cached]) []task {
	var key policy.Key
	participates := false
	for _, cached := range []policy.Cached{event.Old, event.New} {
		if cached != nil {
			key = policy.NewKey(kind, cached.GetNamespace(), cached.GetName())
			participates = participates || policy.Participates(cached, Name)
		}
	}
	if participates {
		return []task{{theTarget, key}, {theSource, key}}
	}
	var found []task // for most objects, none
	if len(c.indexed(kind, pushers+key.Name)) > 0 {
		found = append(found, task{theTarget, key})
	}
	if len(c.indexed(kind, pullsOf+key.NamespacedName.String())) > 0 {
		found = append(found, task{theSource, key})
	}
	return found
}

// namespaceChanged returns a namespace if a change of it matters to decisions.
func namespaceChanged(event controllers.Event[metav1.Object]) []task {
	obj := cmp.Or(event.New, event.Old)
	if event.Old != nil && event.New != nil && reflect.DeepEqual(namespaceOf(event.Old), namespaceOf(event.New)) {
		return nil
	}
	return []task{{theNamespace, policy.NewKey("", obj.GetName(), "")}}
}

// expandSource enqueues the targets of a source: the copies that it makes or has made, and the pull targets
// that name it. Each pull target is enqueued in the turn of its own namespace.
func (c *controller) expandSource(ctx context.Context, key policy.Key, now time.Time) (after time.Duration) {
	var namespaces []string
	if o := c.Get(key); o == nil || !c.evaluator.Pushes(o) {
		c.memory.forgetSource(key)
	} else {
		s := c.survey(o, now)
		c.report(s.Problems)
		namespaces, after = s.Wanted, s.After
	}
	for _, copied := range c.indexed(key.Kind, copiesOf+key.NamespacedName.String()) {
		namespaces = append(namespaces, copied.Namespace)
	}
	slices.Sort(namespaces)
	for _, ns := range slices.Compact(namespaces) {
		c.loop.EnqueueFor(ctx, key.Namespace, task{theTarget, policy.NewKey(key.Kind, ns, key.Name)})
	}
	for _, pull := range c.indexed(key.Kind, pullsOf+key.NamespacedName.String()) {
		c.loop.EnqueueFor(ctx, pull.Namespace, task{theTarget, pull})
	}
	return after
}

// survey evaluates a source for all namespaces, and remembers for how many it counts.
func (c *controller) survey(o *policy.Object, now time.Time) policy.Survey {
	s := c.evaluator.Survey(c, o, c.namespaces(), now)
	c.memory.setSource(o.Key, s.Spread)
	return s
}

// expandNamespace enqueues the targets in a namespace. A copy that a source may push there is enqueued in
// the source's turn; its reconcile finds out whether the source does. The labels and the end of a namespace
// also matter to targets elsewhere, so the targets of the namespace's sources are enqueued too.
func (c *controller) expandNamespace(ctx context.Context, name string) {
	for kind := range c.in.Objects {
		for _, pusher := range c.indexed(kind, pushers) {
			c.loop.EnqueueFor(ctx, pusher.Namespace, task{theTarget, policy.NewKey(kind, name, pusher.Name)})
		}
		for _, key := range c.indexed(kind, within+name) {
			c.loop.EnqueueFor(ctx, name, task{theTarget, key}, task{theSource, key})
		}
		for _, key := range c.indexed(kind, sourceIn+name) { // also of sources that are gone
			c.loop.EnqueueFor(ctx, key.Namespace, task{theTarget, key})
		}
	}
}
