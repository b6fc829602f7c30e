// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// The indexes. A workload that does not opt in is in none of them.
const (
	// bySource finds workloads by a source that they reference or name.
	bySource = Name + "/source"
	// byPatterns finds workloads that name sources by a pattern, by namespace.
	byPatterns = Name + "/patterns"
)

func contains(list []string, item string) bool { return slices.Contains(list, item) }

func (c *Controller) addIndexers() error {
	for name, k := range c.kinds {
		err := k.informer.AddIndexers(cache.Indexers{
			bySource:   func(obj any) ([]string, error) { return c.indexBySource(name, obj), nil },
			byPatterns: func(obj any) ([]string, error) { return c.indexByPatterns(name, obj), nil },
		})
		if err != nil {
			return fmt.Errorf("add indexers of %s: %w", name, err)
		}
	}
	for _, informer := range c.sources {
		if informer == nil {
			continue
		}
		if _, has := informer.GetIndexer().GetIndexers()[cache.NamespaceIndex]; has {
			continue // shared with another controller that added it
		}
		err := informer.AddIndexers(cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		if err != nil {
			return fmt.Errorf("add index of sources by namespace: %w", err)
		}
	}
	return nil
}

func sourceIndexValue(namespace string, key sourceKey) string { return namespace + "/" + key.String() }

// indexBySource never returns an error, because the cache would panic. An object that cannot be
// read is not indexed; its reconcile reports it.
func (c *Controller) indexBySource(kind string, obj any) []string {
	w, err := newWorkload(kind, obj)
	if err != nil {
		return nil
	}
	r, _ := c.keys.rules(w)
	var values []string
	for _, key := range w.references() {
		if t := &r.types[key.typ]; t.auto || t.search {
			values = append(values, sourceIndexValue(w.Namespace, key))
		}
	}
	for _, t := range sourceTypes {
		for _, p := range r.types[t].named {
			if p.literal {
				values = append(values, sourceIndexValue(w.Namespace, sourceKey{t, p.text}))
			}
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

func (c *Controller) indexByPatterns(kind string, obj any) []string {
	w, err := newWorkload(kind, obj)
	if err != nil {
		return nil
	}
	r, _ := c.keys.rules(w)
	if r.patterns(configMap) || r.patterns(secret) {
		return []string{w.Namespace}
	}
	return nil
}

// patterns reports whether a source may be named by anything but its exact name.
func (r *rules) patterns(t sourceType) bool {
	return slices.ContainsFunc(r.types[t].named, func(p pattern) bool { return p.re != nil || p.dots })
}

// lookUp returns the cached sources that may concern w.
func (c *Controller) lookUp(w *workload, r *rules, recorded state) map[sourceKey]source {
	found := map[sourceKey]source{}
	get := func(key sourceKey) {
		informer := c.sources[key.typ]
		if informer == nil {
			return
		}
		obj, exists, err := informer.GetIndexer().GetByKey(w.Namespace + "/" + key.name)
		if err != nil || !exists {
			return
		}
		found[key] = c.keys.source(obj.(Source))
	}
	for _, key := range w.references() {
		get(key)
	}
	for key := range recorded {
		get(key)
	}
	for _, t := range sourceTypes {
		for _, p := range r.types[t].named {
			if p.literal {
				get(sourceKey{t, p.text})
			}
		}
		if c.sources[t] == nil || !r.patterns(t) {
			continue
		}
		// Fails only without the index.
		objs, _ := c.sources[t].GetIndexer().ByIndex(cache.NamespaceIndex, w.Namespace)
		for _, obj := range objs {
			key := sourceKey{t, obj.(Source).GetName()}
			if matchesAny(r.types[t].named, key.name) {
				get(key)
			}
		}
	}
	return found
}

// watches returns the watches of all kinds, types and namespaces.
func (c *Controller) watches() []controllers.Watch[workloadKey] {
	var list []controllers.Watch[workloadKey]
	for name, k := range c.kinds {
		list = append(list, controllers.WatchMapped(k.informer, func(event controllers.Event[metav1.Object]) []workloadKey {
			return c.workloadChanged(name, event)
		}))
	}
	for t, informer := range c.sources {
		if informer != nil {
			list = append(list, controllers.WatchMapped(informer, func(event controllers.Event[Source]) []workloadKey {
				return c.sourceChanged(sourceType(t), event)
			}))
		}
	}
	if c.cfg.needsNamespaces() {
		list = append(list, controllers.WatchMapped(c.in.Namespaces, c.namespaceChanged))
	}
	return list
}

// sourceChanged returns the workloads that a source concerns and notes the change for each of them.
func (c *Controller) sourceChanged(t sourceType, event controllers.Event[Source]) []workloadKey {
	before, after := c.keys.source(event.Old), c.keys.source(event.New)
	c.metrics.sourceSeen(t, before, after, event.Initial)
	before.version = after.version // a new version alone is no change
	// All workloads are enqueued when the run begins, so sources that were in the cache by then are
	// compared with them.
	if event.Initial || before == after {
		return nil
	}
	obj := event.New
	if obj == nil {
		obj = event.Old
	}
	namespace, key := obj.GetNamespace(), sourceKey{t, obj.GetName()}
	if !c.selected(namespace) {
		return nil
	}
	var list []workloadKey
	indexed := sourceIndexValue(namespace, key)
	for name, k := range c.kinds {
		for _, obj := range k.concerned(namespace, indexed) {
			w, err := newWorkload(name, obj)
			if err != nil {
				continue
			}
			if c.noteChange(w, key, before, after) {
				list = append(list, w.workloadKey)
			}
		}
	}
	return list
}

// concerned returns the cached workloads that a source in the namespace may concern. indexed is its
// sourceIndexValue.
func (k *kind) concerned(namespace, indexed string) []any {
	indexer := k.informer.GetIndexer()
	// Fails only without the index.
	list, _ := indexer.ByIndex(bySource, indexed)
	more, _ := indexer.ByIndex(byPatterns, namespace)
	for _, obj := range more {
		if !slices.Contains(list, obj) {
			list = append(list, obj)
		}
	}
	return list
}

// noteChange reports whether a change of a source matters to w. If it does, it opens or extends the
// window of w.
func (c *Controller) noteChange(w *workload, key sourceKey, before, after source) bool {
	r, _ := c.keys.rules(w)
	referenced := slices.Contains(w.references(), key)
	concerns := func(s source) match {
		m := r.match(key, s)
		if m == auto && !referenced {
			return no // the workload was found by its patterns
		}
		return m
	}
	was, is := concerns(before), concerns(after)
	switch {
	case !before.exists():
		was = is
	case !after.exists():
		is = was
	}
	recorded, _, _ := c.recorded(w) // the error is reported when the workload is reconciled
	_, known := recorded[key]
	if was == no && is == no {
		return known
	}
	if before.hash == after.hash {
		return true // an annotation of the source changed, so what is recorded may have to change
	}
	now := c.clock.Now()
	oldMark := c.hasOldMark(&facts{workload: w, rules: r}, &reload{key: key, match: is, hash: after.hash}, after)
	c.memory.update(w.workloadKey, w.uid, now, func(e *entry) {
		if !e.touch(key, change{now, oldMark}) {
			c.metrics.coalesced.Inc()
		}
		if e.kept != nil {
			_, known = e.kept[key]
		}
		if !known {
			e.see(key, before.short())
		}
	})
	return true
}

// hasOldMark reports whether the workload carried the mark of the source's data before the source
// had it. Any later write to the workload, such as a status update, hides this.
func (c *Controller) hasOldMark(f *facts, r *reload, after source) bool {
	var ok bool
	r.container, ok = f.workload.chooseContainer(r.key, r.match)
	return ok && f.changedSince(after) && c.cfg.marked(f, r)
}

// workloadChanged enqueues the workload itself. It notes what only a change shows: that somebody
// removed our annotation or changed the template.
func (c *Controller) workloadChanged(kind string, event controllers.Event[metav1.Object]) []workloadKey {
	obj := event.New
	if obj == nil {
		obj = event.Old
	}
	key := workloadKey{kind: kind, ObjectName: cache.MetaObjectToName(obj)}
	if event.Old == nil || event.New == nil || event.Old.GetUID() != event.New.GetUID() {
		return []workloadKey{key}
	}
	before, after := event.Old.GetAnnotations(), event.New.GetAnnotations()
	c.noteRemoval(key, obj.GetUID(), before, after)
	if c.cfg.AbsorbRollouts && !bytes.Equal(cachedDigest(kind, event.Old), cachedDigest(kind, event.New)) {
		c.memory.update(key, obj.GetUID(), c.clock.Now(), func(e *entry) {
			if e.written != obj.GetResourceVersion() {
				e.rolled = obj.GetResourceVersion()
			}
		})
	}
	return []workloadKey{key}
}

// cachedDigest returns the digest of a cached workload's template; nil if it has none.
func cachedDigest(kind string, obj metav1.Object) []byte {
	if whole, ok := obj.(runtime.Object); ok {
		if digest := digestTemplate(whole); digest != nil {
			return digest
		}
	}
	w, err := newWorkload(kind, obj)
	if err != nil {
		return nil
	}
	return w.Digest
}

// noteRemoval keeps the recorded state in memory if somebody removed the annotation.
func (c *Controller) noteRemoval(key workloadKey, uid types.UID, before, after map[string]string) {
	if !c.readsState(key.kind) {
		return
	}
	recorded, err := parseState(before[nativeState])
	if err != nil {
		return
	}
	if _, err := parseState(after[nativeState]); err == nil {
		return
	}
	c.memory.update(key, uid, c.clock.Now(), func(e *entry) {
		e.removed = true
		for source, value := range recorded {
			e.see(source, value)
		}
	})
}

// namespaceChanged enqueues the workloads of a namespace that begins or ceases to be selected.
func (c *Controller) namespaceChanged(event controllers.Event[metav1.Object]) []workloadKey {
	was := event.Old != nil && c.selects(event.Old)
	is := event.New != nil && c.selects(event.New)
	if was == is || event.Initial || event.New == nil {
		return nil
	}
	var list []workloadKey
	for name, k := range c.kinds {
		for _, key := range k.informer.GetIndexer().ListKeys() {
			object, err := cache.ParseObjectName(key)
			if err == nil && object.Namespace == event.New.GetName() {
				list = append(list, workloadKey{kind: name, ObjectName: object})
			}
		}
	}
	return list
}

func (c *Controller) selects(namespace any) bool {
	m, err := meta.Accessor(namespace)
	return err == nil && c.selector.Matches(labels.Set(m.GetLabels()))
}

// workloadLogger returns a logger with the workload's name.
func workloadLogger(ctx context.Context, w *workload) klog.Logger {
	return klog.FromContext(ctx).WithValues("kind", w.kind, "workload", w.ObjectName)
}
