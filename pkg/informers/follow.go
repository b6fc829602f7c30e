// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"k8s.io/client-go/tools/cache"
)

// Following is a resource that a controller has asked for at run time.
type Following struct {
	cluster  *ClusterCache
	informer *informer
	cancel   context.CancelFunc
}

// Follow shows handler the objects of a resource that the need chooses, until Stop or until ctx ends;
// call Stop in any case. It may be called before Start. lists, if not nil, limits the lists that are
// taken at once: each holds a place in it. Two controllers that follow the same resource have a watch
// each. Failures are no problem of the controller: see Status. They are retried ever more seldom, in
// another cluster at least once a minute.
func (f *ClusterCache) Follow(ctx context.Context, need Need, lists chan struct{}, handler cache.ResourceEventHandler) (*Following, error) {
	return f.follow(ctx, need, f.clients.sourceFor, lists, handler)
}

func (f *ClusterCache) follow(
	ctx context.Context, need Need, sourceFor func(*plan, string) (source, error), lists chan struct{}, handler cache.ResourceEventHandler,
) (*Following, error) {
	if need.whole() {
		return nil, errors.New("what is followed has the form Reduced or Metadata")
	}
	plans, err := newPlans([]Need{need}, f.clients.scheme)
	if err != nil {
		return nil, err
	}
	i, err := f.newInformer(plans[0], sourceFor)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", need.For, err)
	}
	for _, feed := range i.feeds {
		feed.lists, feed.resync = lists, 0
		if f.cfg.Cluster == "" {
			feed.backoff = followBackoff
		}
	}
	i.listen(need.For, func(e event) {
		switch {
		case e.old == nil:
			handler.OnAdd(e.new, e.initial)
		case e.new == nil:
			handler.OnDelete(e.old)
		default:
			handler.OnUpdate(e.old, e.new)
		}
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return nil, errors.New("the informers have been shut down")
	}
	w := &Following{cluster: f, informer: i}
	ctx, w.cancel = context.WithCancel(ctx)
	f.followed = append(f.followed, w)
	f.start(ctx, i)
	return w, nil
}

// Stop gives the resource back and ends its watch. It does not wait for the handler, which may call it,
// so one more event can reach the handler while Stop returns.
func (w *Following) Stop() {
	w.cancel()
	w.informer.stopListeners()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.cluster.followed = slices.DeleteFunc(w.cluster.followed, func(other *Following) bool { return other == w })
}

// Get returns an object of the resource, and whether there is one.
func (w *Following) Get(name cache.ObjectName) (*Object, bool) {
	o := w.informer.get(name.String())
	return o, o != nil
}

// All returns all objects of the resource, in no order.
func (w *Following) All() iter.Seq[*Object] {
	return func(yield func(*Object) bool) {
		for _, obj := range w.informer.objects.List() {
			if !yield(obj.(*Object)) {
				return
			}
		}
	}
}

// Status returns what is known of the resource and of the requests for it. With --namespaces, it is
// that of the first namespace with a problem.
func (w *Following) Status() ResourceStatus {
	all := w.informer.status()
	at := max(0, slices.IndexFunc(all, func(s ResourceStatus) bool { return s.Problem != "" }))
	return all[at]
}
