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
	subjectTarget    subject = ""          // decide on it, and write it
	subjectSource    subject = "source"    // enqueue its targets
	subjectNamespace subject = "namespace" // enqueue the targets in it, of pushes to it and of sources in it
)

func (t task) String() string { return strings.TrimSpace(string(t.subject) + " " + t.Key.String()) }

// Tenant returns the namespace in whose turn the task is done, unless EnqueueFor names another.
func (t task) Tenant() string { return t.Namespace }

// The name of the index of participants, and the prefixes of the index's values.
const (
	participantsIndex = Name + "/keys"
	// pushPrefix finds the sources that push, by name; without a name, all of them.
	pushPrefix = "push/"
	// copyPrefix and pullPrefix find copies and pull targets by their source, namespace/name.
	copyPrefix, pullPrefix = "copy-of/", "pull-of/"
	// sourceNamespacePrefix finds copies and pull targets by the namespace of their source.
	sourceNamespacePrefix = "from-in/"
	// namespacePrefix finds participants by namespace.
	namespacePrefix = "in/"
)

func (c *controller) indexFunc(kind policy.Kind) func(policy.Cached) []string {
	return func(obj policy.Cached) (values []string) {
		if !policy.Participates(obj, Name) {
			return nil // most objects
		}
		head := policy.DecodeHead(kind, obj, Name)
		values = append(values, namespacePrefix+head.Namespace)
		switch source, mode := c.evaluator.SourceOf(head); mode {
		case policy.Push:
			values = append(values, copyPrefix+source.String(), sourceNamespacePrefix+source.Namespace)
		case policy.Pull:
			values = append(values, pullPrefix+source.String(), sourceNamespacePrefix+source.Namespace)
		}
		if c.evaluator.Pushes(head) {
			values = append(values, pushPrefix, pushPrefix+head.Name)
		}
		return values
	}
}

// indexedKeys returns the keys of the objects that the index has under a value.
func (c *controller) indexedKeys(kind policy.Kind, value string) (keys []policy.Key) {
	for _, obj := range c.informers.Objects[kind].ByIndex(participantsIndex, value) {
		keys = append(keys, policy.NewKey(kind, obj.GetNamespace(), obj.GetName()))
	}
	return keys
}

// watches returns the watches of all kinds and of namespaces. All events enter here.
func (c *controller) watches() (list []controllers.Watch[task]) {
	for kind, informer := range c.informers.Objects {
		list = append(list, controllers.WatchMapped(informer, func(event controllers.Event[policy.Cached]) []task {
			return c.objectChanged(kind, event)
		}))
	}
	if c.informers.Namespaces != nil {
		// Only later changes: when a run begins, the events of the sources enqueue their copies.
		list = append(list, controllers.WatchChanges(c.informers.Namespaces, namespaceChanged))
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
		return []task{{subjectTarget, key}, {subjectSource, key}}
	}
	var tasks []task // for most objects, none
	if len(c.indexedKeys(kind, pushPrefix+key.Name)) > 0 {
		tasks = append(tasks, task{subjectTarget, key})
	}
	if len(c.indexedKeys(kind, pullPrefix+key.NamespacedName.String())) > 0 {
		tasks = append(tasks, task{subjectSource, key})
	}
	return tasks
}

// namespaceChanged returns a namespace if a change of it matters to decisions.
func namespaceChanged(event controllers.Event[metav1.Object]) []task {
	obj := cmp.Or(event.New, event.Old)
	if event.Old != nil && event.New != nil && reflect.DeepEqual(namespaceOf(event.Old), namespaceOf(event.New)) {
		return nil
	}
	return []task{{subjectNamespace, policy.NewKey("", obj.GetName(), "")}}
}

// expandSource enqueues the targets of a source: the copies that it makes or has made, and the pull targets
// that name it. Each pull target is enqueued in the turn of its own namespace.
func (c *controller) expandSource(ctx context.Context, key policy.Key, now time.Time) (after time.Duration) {
	var namespaces []string
	if obj := c.Get(key); obj == nil || !c.evaluator.Pushes(obj) {
		c.memory.forgetSource(key)
	} else {
		s := c.survey(obj, now)
		c.report(s.Problems)
		namespaces, after = s.Namespaces, s.RequeueAfter
	}
	for _, copied := range c.indexedKeys(key.Kind, copyPrefix+key.NamespacedName.String()) {
		namespaces = append(namespaces, copied.Namespace)
	}
	slices.Sort(namespaces)
	for _, ns := range slices.Compact(namespaces) {
		c.loop.EnqueueFor(ctx, key.Namespace, task{subjectTarget, policy.NewKey(key.Kind, ns, key.Name)})
	}
	for _, pull := range c.indexedKeys(key.Kind, pullPrefix+key.NamespacedName.String()) {
		c.loop.EnqueueFor(ctx, pull.Namespace, task{subjectTarget, pull})
	}
	return after
}

// survey evaluates a source for all namespaces, and remembers for how many namespaces the source counts.
func (c *controller) survey(obj *policy.Object, now time.Time) policy.Survey {
	s := c.evaluator.Survey(c, obj, c.namespaces(), now)
	c.memory.setSource(obj.Key, s.Spread)
	return s
}

// expandNamespace enqueues the targets in a namespace. A copy that a source may push there is enqueued in the
// source's turn; the copy's reconcile finds out whether the source pushes there. The labels and the end of a
// namespace also matter to targets elsewhere, so the targets of the namespace's sources are enqueued too.
func (c *controller) expandNamespace(ctx context.Context, name string) {
	for kind := range c.informers.Objects {
		for _, pusher := range c.indexedKeys(kind, pushPrefix) {
			c.loop.EnqueueFor(ctx, pusher.Namespace, task{subjectTarget, policy.NewKey(kind, name, pusher.Name)})
		}
		for _, key := range c.indexedKeys(kind, namespacePrefix+name) {
			c.loop.EnqueueFor(ctx, name, task{subjectTarget, key}, task{subjectSource, key})
		}
		for _, key := range c.indexedKeys(kind, sourceNamespacePrefix+name) { // also of sources that are gone
			c.loop.EnqueueFor(ctx, key.Namespace, task{subjectTarget, key})
		}
	}
}
