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
	// discoveryRetryDelay is when groups that did not answer are asked again.
	discoveryRetryDelay = 30 * time.Second
	// discoveryInterval is how often to look for new types where their definitions cannot be watched.
	discoveryInterval = 5 * time.Minute
	// definitionDelay is how long to wait after a change of a definition: it takes the API server a moment to
	// serve the type, and several definitions often change together.
	definitionDelay = 2 * time.Second
)

// definitionResources are the types whose objects define types.
var definitionResources = []schema.GroupVersionResource{
	{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
	{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
}

// followFunc shows handler the objects that the need chooses, reduced to what the need names, until Stop.
// handler may keep them.
type followFunc func(need informers.Need, handler func(old, current metav1.Object, initial bool)) (*informers.Following[metav1.Object], error)

// discover returns the types that can be followed and whose objects can be deleted, in one version each.
// downGroups are the groups that did not answer. If there are no types either, no group has answered.
func discover(client discovery.DiscoveryInterface) (types []policy.Type, downGroups []string, err error) {
	lists, err := discovery.ServerPreferredResources(client)
	failedGroups, _ := discovery.GroupDiscoveryFailedErrorGroups(err)
	for gv := range failedGroups {
		downGroups = append(downGroups, gv.Group)
	}
	for _, list := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"get", "list", "watch", "delete"}}, lists) {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		for i := range list.APIResources {
			if r := &list.APIResources[i]; err == nil && !strings.Contains(r.Name, "/") {
				types = append(types, policy.Type{GroupVersionResource: gv.WithResource(r.Name), Kind: r.Kind, Namespaced: r.Namespaced})
			}
		}
	}
	return types, downGroups, err
}

// followTypes follows the types of the API server as they come and go, until ctx ends, and looks through
// their objects for what becomes due.
func (c *controller) followTypes(ctx context.Context) error {
	f := &follower{controller: c}
	defer f.apply(ctx, nil, nil)
	timer := time.NewTimer(f.discoverTypes(ctx))
	defer timer.Stop()
	f.followDefinitions(ctx, timer)
	ticker := time.NewTicker(horizon / 2)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			c.recordUpcoming()
		case <-timer.C:
			if next := f.discoverTypes(ctx); next > 0 {
				timer.Reset(next)
			}
		}
	}
}

// follower follows types during one run.
type follower struct {
	*controller
	definitionWatches []*informers.Following[metav1.Object]
	loggedProblems    string // what was last logged
}

// followDefinitions sets the timer when the definition of a type changes, and when it is first seen.
func (f *follower) followDefinitions(ctx context.Context, timer *time.Timer) {
	if len(f.cfg.Scope) > 0 {
		return
	}
	var mu sync.Mutex
	var due time.Time
	// Later events do not put off the discovery that the first event has asked for.
	scheduleDiscovery := func() {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); !due.After(now) {
			due = now.Add(definitionDelay)
			timer.Reset(definitionDelay)
		}
	}
	for _, resource := range definitionResources {
		following, err := f.follow(informers.Need{Resource: resource, ClusterScoped: true, Form: informers.Metadata},
			func(_, _ metav1.Object, _ bool) { scheduleDiscovery() })
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot watch CustomResourceDefinitions or APIServices", "resource", resource.GroupResource())
			continue
		}
		f.definitionWatches = append(f.definitionWatches, following)
	}
}

// discoverTypes follows the existing types, and returns when to look again; 0 means at the next change.
func (f *follower) discoverTypes(ctx context.Context) time.Duration {
	types, downGroups, err := discover(f.client.Discovery())
	problems := strings.Join(append(f.options.Unmatched(types), f.rules.MissingTypes(f.selectTypes(types))...), ", ")
	if err != nil {
		problems = err.Error()
	}
	if problems != f.loggedProblems {
		f.loggedProblems = problems
		klog.FromContext(ctx).Info("Cannot discover some types; watched types stay watched", "problem", problems)
	}
	if err == nil || len(downGroups) > 0 {
		f.apply(ctx, types, downGroups)
	}
	if err != nil {
		return discoveryRetryDelay
	}
	unsynced := func(d *informers.Following[metav1.Object]) bool {
		s := d.Status()
		return !s.Synced || s.Problem != ""
	}
	if len(f.definitionWatches) < len(definitionResources) || slices.ContainsFunc(f.definitionWatches, unsynced) {
		return discoveryInterval
	}
	return 0
}

// selectTypes returns which of the types are to be followed.
func (c *controller) selectTypes(types []policy.Type) (selected []policy.Type) {
	for _, t := range types {
		if c.options.Watches(t) && (t.Namespaced || len(c.cfg.Scope) == 0) {
			selected = append(selected, t)
		}
	}
	return selected
}

// apply follows the given types and, of groups that do not answer, the types that it already follows.
func (f *follower) apply(ctx context.Context, types []policy.Type, downGroups []string) {
	wanted := map[schema.GroupResource]policy.Type{}
	for _, t := range f.selectTypes(types) {
		wanted[t.GroupResource()] = f.rules.PinVersion(t)
	}
	for resource, followed := range f.types { // only this goroutine writes f.types
		if t, found := wanted[resource]; found && t == followed.Type || slices.Contains(downGroups, resource.Group) {
			delete(wanted, resource)
			continue
		}
		klog.FromContext(ctx).V(2).Info("Stopped watching a type", "resource", resource)
		followed.stop()
		f.mu.Lock()
		delete(f.types, resource)
		f.mu.Unlock()
	}
	for resource, t := range wanted {
		followed, err := f.followType(ctx, t)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot watch a type", "resource", resource)
			continue
		}
		klog.FromContext(ctx).V(2).Info("Watching a type", "resource", resource, "version", t.Version)
		f.mu.Lock()
		f.types[resource] = followed
		f.mu.Unlock()
	}
}

// followType follows a type.
func (f *follower) followType(ctx context.Context, typ policy.Type) (_ *followedType, err error) {
	followed := &followedType{
		Type: typ, rules: f.rulesFor(typ), records: map[cache.ObjectName]*dueRecord{}, ruleCounts: map[uint8]int{},
	}
	followed.following, err = f.follow(typeNeed(f.options, typ, followed.rules), func(old, current metav1.Object, _ bool) {
		f.handleChange(ctx, followed, old, current)
	})
	return followed, err
}
