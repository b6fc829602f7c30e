// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

const (
	// retryDiscovery is when groups that did not answer are asked again.
	retryDiscovery = 30 * time.Second
	// settle is how long to wait after a change of a definition: it takes the API server a moment to
	// serve the type, and there is seldom only one.
	settle = 2 * time.Second
)

// Wish says what to follow of a type.
type Wish struct {
	Resource      schema.GroupVersionResource
	ClusterScoped bool
	// Annotations are kept of the objects for which When returns true, with owners and creationTimestamp.
	Annotations []string
	When        func(metav1.Object) bool
	// Lists has a place for each list that may be taken at once.
	Lists chan struct{}
}

// Follow shows handler the objects of a type until Stop or until ctx ends. It may keep them.
type Follow func(ctx context.Context, w Wish, handler cache.ResourceEventHandler) (Following, error)

// Following is a type that is followed.
type Following interface {
	// Stop returns when the handler is not called any more.
	Stop()
	// Status returns whether all objects have been shown once, how many requests have failed, and what is
	// wrong now.
	Status() (synced bool, failures int64, problem string)
}

// discovered is what the API server has.
type discovered struct {
	types  []policy.Type // one version each
	failed []string      // groups that did not answer
}

// discover returns the types that can be followed and whose objects can be deleted.
func (c *Controller) discover() (found discovered, err error) {
	lists, err := discovery.ServerPreferredResources(c.client.Discovery())
	if failed := (*discovery.ErrGroupDiscoveryFailed)(nil); errors.As(err, &failed) {
		for gv := range failed.Groups {
			found.failed = append(found.failed, gv.Group)
		}
	} else if err != nil {
		return found, err
	}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue // no request could name it
		}
		for i := range list.APIResources {
			r := &list.APIResources[i]
			if strings.Contains(r.Name, "/") || !containsAll(r.Verbs, "get", "list", "watch", "delete") {
				continue
			}
			found.types = append(found.types, policy.Type{GroupVersionResource: gv.WithResource(r.Name), Kind: r.Kind, Namespaced: r.Namespaced})
		}
	}
	return found, nil
}

func containsAll(verbs []string, wanted ...string) bool {
	return !slices.ContainsFunc(wanted, func(verb string) bool { return !slices.Contains(verbs, verb) })
}

// followTypes follows the types of the API server as they come and go, until ctx ends.
func (c *Controller) followTypes(ctx context.Context) error {
	f := &follower{Controller: c, lists: make(chan struct{}, c.cfg.ListConcurrency), changed: make(chan struct{}, 1)}
	defer f.stop()
	timer := c.clock.NewTimer(0)
	defer timer.Stop()
	<-timer.C()
	if len(c.cfg.Scope) == 0 {
		f.followDefinitions(ctx)
	}
	for {
		if next := f.update(ctx); next > 0 {
			timer.Reset(next)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C():
			continue
		case <-f.changed:
		}
		timer.Reset(settle)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C():
		}
		select {
		case <-f.changed: // before this look
		default:
		}
	}
}

// follower follows types during one run.
type follower struct {
	*Controller
	lists       chan struct{}
	changed     chan struct{} // a definition has
	definitions []Following
	down        string // the groups that did not answer last
}

func (f *follower) stop() {
	for _, d := range f.definitions {
		d.Stop()
	}
	for _, k := range f.book.types() {
		f.book.drop(k)
	}
}

// followDefinitions makes a look due when the definition of a type changes.
func (f *follower) followDefinitions(ctx context.Context) {
	due := func() {
		select {
		case f.changed <- struct{}{}:
		default: // it is already
		}
	}
	for _, resource := range []schema.GroupVersionResource{definitions, apiServices} {
		following, err := f.follow(ctx, Wish{
			Resource: resource, ClusterScoped: true, Lists: f.lists, When: func(metav1.Object) bool { return true },
		}, cache.ResourceEventHandlerDetailedFuncs{
			AddFunc: func(_ any, initial bool) {
				if !initial {
					due()
				}
			},
			UpdateFunc: func(_, _ any) { due() },
			DeleteFunc: func(any) { due() },
		})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot watch definitions of types", "resource", resource.GroupResource())
			continue
		}
		f.definitions = append(f.definitions, following)
	}
}

// update follows the types that there are, and returns when to look again; 0 is at the next change.
func (f *follower) update(ctx context.Context) time.Duration {
	found, err := f.discover()
	if err != nil {
		if f.down != err.Error() {
			f.down = err.Error()
			klog.FromContext(ctx).Error(err, "Cannot discover types")
		}
		return retryDiscovery
	}
	return f.apply(ctx, found)
}

// apply follows the types that were found, and returns when to look again.
func (f *follower) apply(ctx context.Context, found discovered) time.Duration {
	logger := klog.FromContext(ctx)
	slices.Sort(found.failed)
	found.failed = slices.Compact(found.failed)
	if down := strings.Join(found.failed, ","); down != f.down {
		f.down = down
		logger.Info("API groups that do not answer; what is watched of them stays", "groups", down)
	}
	wanted := map[schema.GroupResource]policy.Type{}
	var all []schema.GroupResource
	for _, t := range found.types {
		all = append(all, t.GroupResource())
		if f.rules.Watches(t) && (t.Namespaced || len(f.cfg.Scope) == 0) {
			wanted[t.GroupResource()] = t
		}
	}
	for _, k := range f.book.types() {
		t, there := wanted[k.GroupResource()]
		if there && t == k.Type || slices.Contains(found.failed, k.Group) {
			delete(wanted, k.GroupResource())
			continue
		}
		logger.V(2).Info("Type is gone or has changed", "resource", k.GroupResource())
		f.book.drop(k)
	}
	for _, t := range wanted {
		f.begin(ctx, t)
	}
	if len(found.failed) > 0 {
		return retryDiscovery
	}
	f.unlisted.Do(func() {
		if items := f.rules.Unmatched(all); len(items) > 0 {
			logger.Info("Warning: Items of --ttl-include-resources match no type", "items", items)
		}
	})
	for _, d := range f.definitions {
		if synced, _, problem := d.Status(); !synced || problem != "" {
			return f.cfg.DiscoveryInterval
		}
	}
	if len(f.definitions) < 2 {
		return f.cfg.DiscoveryInterval
	}
	return 0
}

// begin follows a type.
func (f *follower) begin(ctx context.Context, t policy.Type) {
	k := f.book.add(t)
	note := func(obj any) {
		if name, changed := f.book.put(k, obj.(metav1.Object), f.keys); changed {
			f.loop.Enqueue(name)
		}
	}
	w := f.cfg.Wish()
	w.Resource, w.ClusterScoped, w.Lists = t.GroupVersionResource, !t.Namespaced, f.lists
	following, err := f.follow(ctx, w, cache.ResourceEventHandlerFuncs{
		AddFunc:    note,
		UpdateFunc: func(_, obj any) { note(obj) },
		DeleteFunc: func(obj any) {
			if name, err := cache.DeletionHandlingObjectToName(obj); err == nil {
				f.book.remove(k, name)
			}
		},
	})
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot watch a type", "resource", t.GroupResource())
		f.book.drop(k)
		return
	}
	f.book.began(k, following)
	klog.FromContext(ctx).V(2).Info("Type is watched", "resource", t.GroupResource(), "version", t.Version)
}

// Wish returns what the controller follows of every type.
func (c *Config) Wish() Wish {
	rules := c.rules()
	keys := policy.Keys(rules.Families)
	return Wish{Annotations: append(keys, corev1.MirrorPodAnnotationKey), When: func(obj metav1.Object) bool { return annotated(obj, keys) }}
}

// annotated reports whether an object has an annotation that counts.
func annotated(obj metav1.Object, keys []string) bool {
	annotations := obj.GetAnnotations()
	if len(annotations) == 0 {
		return false
	}
	return slices.ContainsFunc(keys, func(key string) bool {
		_, has := annotations[key]
		return has && key != policy.TwinRefreshed
	})
}
