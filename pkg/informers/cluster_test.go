// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// cluster is an API server with one resource, Secrets. Its lists, watches and streamed lists have
// the semantics that reflectors rely on.
type cluster struct {
	mu        sync.Mutex
	version   int
	compacted int // watches from before this version get 410
	objects   map[string]*corev1.Secret
	history   []watch.Event
	changed   chan struct{} // closed at every change
	watches   []watch.Interface
	fail      func(verb string) error
	requests  []string // verb and options of all requests
	noStreams bool
	endless   bool        // streamed lists lack the bookmark that ends them
	slow      bool        // pages after the first get 410, and streamed lists begin after 10 s
	last      watch.Event // if it has a type, watches and streamed lists end with it
}

func newCluster(objects ...*corev1.Secret) *cluster {
	c := &cluster{version: 100, objects: map[string]*corev1.Secret{}, changed: make(chan struct{})}
	for _, o := range objects {
		c.put(o)
	}
	return c
}

func (c *cluster) source(*plan, string) (source, error) {
	return source{
		list:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return c.list(ctx, o) },
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) { return c.watch(ctx, o) },
	}, nil
}

// record makes a new version and appends the event.
func (c *cluster) record(kind watch.EventType, s *corev1.Secret) {
	c.version++
	s.ResourceVersion = strconv.Itoa(c.version)
	c.history = append(c.history, watch.Event{Type: kind, Object: s})
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *cluster) put(s *corev1.Secret) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s = s.DeepCopy()
	key := s.Namespace + "/" + s.Name
	kind := watch.Added
	if _, ok := c.objects[key]; ok {
		kind = watch.Modified
	}
	c.objects[key] = s
	c.record(kind, s)
}

func (c *cluster) remove(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.objects[key].DeepCopy()
	delete(c.objects, key)
	c.record(watch.Deleted, s)
}

func (c *cluster) bookmark() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record(watch.Bookmark, &corev1.Secret{})
}

// breakWatches ends all watches. With compact, they cannot be resumed either.
func (c *cluster) breakWatches(compact bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if compact {
		c.version++
		c.compacted = c.version
	}
	for _, w := range c.watches {
		w.Stop()
	}
	c.watches = nil
}

// failWith makes requests fail until it is called with nil.
func (c *cluster) failWith(fail func(verb string) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = fail
}

func (c *cluster) request(verb string, o metav1.ListOptions) error {
	c.requests = append(c.requests, fmt.Sprintf("%s rv=%s match=%s limit=%d selector=%s labels=%s", verb, o.ResourceVersion,
		o.ResourceVersionMatch, o.Limit, o.FieldSelector, o.LabelSelector))
	if c.fail != nil {
		if err := c.fail(verb); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) list(ctx context.Context, o metav1.ListOptions) (*corev1.SecretList, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.request("list", o); err != nil {
		return nil, err
	}
	if c.slow && o.Continue != "" {
		return nil, apierrors.NewResourceExpired("the version of the first page is gone")
	}
	list := &corev1.SecretList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(c.version)}}
	keys := slices.Sorted(maps.Keys(c.objects))
	for i, key := range keys {
		if o.Continue != "" && key < o.Continue {
			continue
		}
		if o.Limit > 0 && len(list.Items) == int(o.Limit) {
			list.Continue = keys[i]
			break
		}
		list.Items = append(list.Items, *c.objects[key].DeepCopy())
	}
	return list, ctx.Err()
}

func (c *cluster) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch err := c.request("watch", o); {
	case errors.Is(err, io.ErrUnexpectedEOF):
		// client-go's REST client does this after ten attempts at intervals of a second.
		c.mu.Unlock()
		select {
		case <-time.After(10 * time.Second):
		case <-ctx.Done():
		}
		c.mu.Lock()
		return watch.NewEmptyWatch(), nil
	case err != nil:
		return nil, err
	}
	stream := o.SendInitialEvents != nil && *o.SendInitialEvents
	if stream && c.noStreams {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("ListOptions").GroupKind(), "", nil)
	}
	from, _ := strconv.Atoi(o.ResourceVersion)
	if from != 0 && from < c.compacted && !stream {
		return nil, apierrors.NewResourceExpired("too old resource version")
	}
	var first []watch.Event
	if stream || from == 0 {
		for _, key := range slices.Sorted(maps.Keys(c.objects)) {
			first = append(first, watch.Event{Type: watch.Added, Object: c.objects[key].DeepCopy()})
		}
		from = c.version
	}
	if stream && !c.endless {
		first = append(first, watch.Event{Type: watch.Bookmark, Object: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(from), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}})
	}
	ends := c.last.Type != ""
	if ends {
		first = append(first, c.last)
	}
	result := make(chan watch.Event)
	w := watch.NewProxyWatcher(result)
	context.AfterFunc(ctx, w.Stop)
	c.watches = append(c.watches, w)
	wait := map[bool]time.Duration{true: 10 * time.Second}[stream && c.slow]
	time.AfterFunc(wait, func() { c.send(result, w.StopChan(), first, from, ends) })
	return w, nil
}

// send sends these events and what happens after a version, until the watch is stopped or ends.
func (c *cluster) send(result chan<- watch.Event, stopped <-chan struct{}, events []watch.Event, from int, ends bool) {
	defer close(result)
	for {
		for _, e := range events {
			select {
			case result <- e:
			case <-stopped:
				return
			}
		}
		if ends {
			<-time.After(100 * time.Millisecond)
			return
		}
		var changed chan struct{}
		events, from, changed = c.since(from)
		if len(events) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-time.After(time.Minute):
			events = []watch.Event{{Type: watch.Bookmark, Object: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(from)}}}}
		case <-stopped:
			return
		}
	}
}

// since returns what happened after a version, and the present version.
func (c *cluster) since(from int) ([]watch.Event, int, chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var events []watch.Event
	for _, e := range c.history {
		m, _ := meta.Accessor(e.Object)
		if v, _ := strconv.Atoi(m.GetResourceVersion()); v > from {
			events = append(events, watch.Event{Type: e.Type, Object: e.Object.DeepCopyObject()})
		}
	}
	return events, c.version, c.changed
}

// newTestCache builds a cache whose only source is the cluster.
func newTestCache(t *testing.T, c *cluster, needs ...Need) *ClusterCache {
	t.Helper()
	return newTestCacheWith(t, CacheConfig{}, c.source, needs...)
}

// newTestCacheWith builds a cache on sources of any kind, which is shut down at the end. What the server says
// is not found is not there in another version either.
func newTestCacheWith(t *testing.T, cfg CacheConfig, sources func(*plan, string) (source, error), needs ...Need) *ClusterCache {
	t.Helper()
	f := &ClusterCache{cfg: cfg, clients: readers{scheme: scheme.Scheme}, sourceFor: sources, countPanic: func(string) {}, listSlots: map[string]chan struct{}{}}
	f.caches = &Caches{all: []*ClusterCache{f}, ended: map[seriesLabels]ResourceStatus{}}
	plans, err := newPlans(needs, scheme.Scheme, cfg.Namespaces)
	assert.NoError(t, err)
	for _, p := range plans {
		i, err := f.buildInformer(p, klog.Background())
		assert.NoError(t, err)
		for _, feed := range i.feeds {
			feed.discover = func(context.Context) error { return notFound }
		}
		f.informers = append(f.informers, i)
	}
	t.Cleanup(f.Shutdown)
	return f
}

var notFound = apierrors.NewNotFound(Secrets.GroupResource(), "")
