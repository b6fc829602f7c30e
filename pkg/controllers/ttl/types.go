// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const (
	// retryDiscovery is when groups that did not answer are asked again.
	retryDiscovery = 30 * time.Second
	// discoveryInterval is how often to look for new types where their definitions cannot be watched.
	discoveryInterval = 5 * time.Minute
	// settle is how long to wait after a change of a definition: it takes the API server a moment to
	// serve the type, and there is seldom only one.
	settle = 2 * time.Second
)

// definitions are the types whose objects define types.
var definitions = []schema.GroupVersionResource{
	{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
	{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
}

// followFunc shows handler the objects that the need chooses, reduced to what the need names, until Stop.
// handler may keep them.
type followFunc func(need informers.Need, handler func(old, current metav1.Object, initial bool)) (*informers.Following[metav1.Object], error)

// discover returns the types that can be followed and whose objects can be deleted, in one version each.
// down are the groups that did not answer. If there are no types either, no group has answered.
func discover(client discovery.DiscoveryInterface) (types []policy.Type, down []string, err error) {
	lists, err := discovery.ServerPreferredResources(client)
	failed, _ := discovery.GroupDiscoveryFailedErrorGroups(err)
	for gv := range failed {
		down = append(down, gv.Group)
	}
	for _, list := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"get", "list", "watch", "delete"}}, lists) {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		for i := range list.APIResources {
			if r := &list.APIResources[i]; err == nil && !strings.Contains(r.Name, "/") {
				types = append(types, policy.Type{GroupVersionResource: gv.WithResource(r.Name), Kind: r.Kind, Namespaced: r.Namespaced})
			}
		}
	}
	return types, down, err
}

// followTypes follows the types of the API server as they come and go, until ctx ends, and looks through
// their objects for what becomes due.
func (c *controller) followTypes(ctx context.Context) error {
	f := &follower{controller: c}
	defer f.apply(ctx, nil, nil)
	timer := time.NewTimer(f.look(ctx))
	defer timer.Stop()
	f.followDefinitions(ctx, timer)
	ticker := time.NewTicker(horizon / 2)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			c.lookAhead()
		case <-timer.C:
			if next := f.look(ctx); next > 0 {
				timer.Reset(next)
			}
		}
	}
}

// follower follows types during one run.
type follower struct {
	*controller
	definitions []*informers.Following[metav1.Object]
	problems    string // what was last logged
}

// followDefinitions sets the timer when the definition of a type changes, and when it is first seen.
func (f *follower) followDefinitions(ctx context.Context, timer *time.Timer) {
	if len(f.cfg.Scope) > 0 {
		return
	}
	var mu sync.Mutex
	var due time.Time
	// Later events do not put off the look that the first event has asked for.
	look := func() {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); !due.After(now) {
			due = now.Add(settle)
			timer.Reset(settle)
		}
	}
	for _, resource := range definitions {
		following, err := f.follow(informers.Need{Resource: resource, ClusterScoped: true, Form: informers.Metadata},
			func(_, _ metav1.Object, _ bool) { look() })
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot watch CustomResourceDefinitions or APIServices", "resource", resource.GroupResource())
			continue
		}
		f.definitions = append(f.definitions, following)
	}
}

// look follows the existing types, and returns when to look again; 0 means at the next change.
func (f *follower) look(ctx context.Context) time.Duration {
	types, down, err := discover(f.client.Discovery())
	problems := strings.Join(append(f.options.Unmatched(types), f.rules.Missing(f.wanted(types))...), ", ")
	if err != nil {
		problems = err.Error()
	}
	if problems != f.problems {
		f.problems = problems
		klog.FromContext(ctx).Info("Cannot discover some types; watched types stay watched", "problem", problems)
	}
	if err == nil || len(down) > 0 {
		f.apply(ctx, types, down)
	}
	if err != nil {
		return retryDiscovery
	}
	if len(f.definitions) < len(definitions) || slices.ContainsFunc(f.definitions, func(d *informers.Following[metav1.Object]) bool {
		s := d.Status()
		return !s.Synced || s.Problem != ""
	}) {
		return discoveryInterval
	}
	return 0
}

// wanted returns which of the types are to be followed.
func (c *controller) wanted(types []policy.Type) (wanted []policy.Type) {
	for _, t := range types {
		if c.options.Watches(t) && (t.Namespaced || len(c.cfg.Scope) == 0) {
			wanted = append(wanted, t)
		}
	}
	return wanted
}

// apply follows the given types and, of groups that are down, the types that it already follows.
func (f *follower) apply(ctx context.Context, types []policy.Type, down []string) {
	wanted := map[schema.GroupResource]policy.Type{}
	for _, t := range f.wanted(types) {
		wanted[t.GroupResource()] = f.rules.InVersion(t)
	}
	for name, followed := range f.types { // nobody else writes it
		if t, there := wanted[name]; there && t == followed.Type || slices.Contains(down, name.Group) {
			delete(wanted, name)
			continue
		}
		klog.FromContext(ctx).V(2).Info("Stopped watching a type", "resource", name)
		followed.stop()
		f.mu.Lock()
		delete(f.types, name)
		f.mu.Unlock()
	}
	for name, t := range wanted {
		followed, err := f.begin(ctx, t)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot watch a type", "resource", name)
			continue
		}
		klog.FromContext(ctx).V(2).Info("Watching a type", "resource", name, "version", t.Version)
		f.mu.Lock()
		f.types[name] = followed
		f.mu.Unlock()
	}
}

// begin follows a type.
func (f *follower) begin(ctx context.Context, of policy.Type) (_ *followedType, err error) {
	t := &followedType{Type: of, rules: f.rulesFor(of), records: map[cache.ObjectName]*dueRecord{}, expiring: map[uint8]int{}}
	t.following, err = f.follow(need(f.options, of, t.rules), func(old, current metav1.Object, _ bool) {
		f.changed(ctx, t, old, current)
	})
	return t, err
}
