// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	fcache "k8s.io/client-go/tools/cache/testing"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// gated is a loop whose informers run before it does, as on a warm standby. The loop reconciles
// ConfigMaps; a Secret concerns the ConfigMap of its name.
type gated struct {
	configMaps, secrets *fcache.FakeControllerSource
	primary, secondary  cache.SharedIndexInformer
	loop                *Loop[cache.ObjectName]
	stop                context.CancelFunc
	stopped             chan error

	mu  sync.Mutex
	log []string
	// during is called in each reconcile; may be nil.
	during func(cache.ObjectName)
	// mapped is called with each ConfigMap that is mapped; may be nil.
	mapped func(*corev1.ConfigMap)
	// listed is called after the ConfigMaps have been listed from the cache; may be nil.
	listed func()
}

// hooked is an informer whose list from the cache is followed by a call.
type hooked struct {
	informers.Informer[*corev1.ConfigMap]
	g *gated
}

func (h hooked) List(namespace string, selector labels.Selector) []*corev1.ConfigMap {
	list := h.Informer.List(namespace, selector)
	if h.g.listed != nil {
		h.g.listed()
	}
	return list
}

func newGated(t *testing.T, names ...string) *gated {
	t.Helper()
	g := &gated{
		configMaps: fcache.NewFakeControllerSource(), secrets: fcache.NewFakeControllerSource(),
		stopped: make(chan error, 1),
	}
	for _, name := range names {
		g.configMaps.Add(configMap(name, "1"))
		g.secrets.Add(secret(name, "1"))
	}
	g.primary = cache.NewSharedIndexInformer(g.configMaps, &corev1.ConfigMap{}, 0, cache.Indexers{})
	g.secondary = cache.NewSharedIndexInformer(g.secrets, &corev1.Secret{}, 0, cache.Indexers{})
	var err error
	g.loop, err = NewLoop(LoopOptions{Name: "test", Metrics: NewMetrics(metrics.NewKubeRegistry())}, g.reconcile,
		WatchMapped(hooked{asInformer[*corev1.ConfigMap](g.primary), g}, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
			obj := e.New
			if obj == nil {
				obj = e.Old
			}
			g.say("map %s %s->%s", obj.Name, version(e.Old), version(e.New))
			if g.mapped != nil {
				g.mapped(obj)
			}
			return []cache.ObjectName{cache.MetaObjectToName(obj)}
		}),
		WatchChanges(asInformer[*corev1.Secret](g.secondary), func(e Event[*corev1.Secret]) []cache.ObjectName {
			obj := e.New
			if obj == nil {
				obj = e.Old
			}
			g.say("secret %s", obj.Name)
			return []cache.ObjectName{cache.MetaObjectToName(obj)}
		}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { g.primary.RunWithContext(ctx) })
	wg.Go(func() { g.secondary.RunWithContext(ctx) })
	t.Cleanup(func() {
		stop()
		wg.Wait()
		g.configMaps.Shutdown()
		g.secrets.Shutdown()
	})
	synctest.Wait()
	return g
}

func configMap(name, version string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Data: map[string]string{"version": version}}
}

func secret(name, version string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, StringData: map[string]string{"version": version}}
}

// cached returns the versions of a ConfigMap and its Secret in the caches.
func (g *gated) cached(key cache.ObjectName) string {
	var configMap, secret string
	if obj, ok, _ := g.primary.GetStore().GetByKey(key.String()); ok {
		configMap = obj.(*corev1.ConfigMap).Data["version"]
	}
	if obj, ok, _ := g.secondary.GetStore().GetByKey(key.String()); ok {
		secret = obj.(*corev1.Secret).StringData["version"]
	}
	return configMap + "/" + secret
}

func (g *gated) reconcile(_ context.Context, key cache.ObjectName) (time.Duration, error) {
	g.say("reconcile %s %s", key.Name, g.cached(key))
	if g.during != nil {
		g.during(key)
	}
	return 0, nil
}

func (g *gated) say(format string, args ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.log = append(g.log, fmt.Sprintf(format, args...))
}

// said returns what has happened since the last call, sorted.
func (g *gated) said() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	log := slices.Sorted(slices.Values(g.log))
	g.log = nil
	return log
}

// lead calls Run. resign ends it.
func (g *gated) lead(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	g.stop = stop
	t.Cleanup(stop)
	go func() { g.stopped <- g.loop.Run(ctx) }()
}

func (g *gated) resign(t *testing.T) {
	t.Helper()
	g.stop()
	if err := <-g.stopped; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what happened (-want +got):\n%s", diff)
	}
}

// TestLeaderLooksAtEveryPrimaryObject also checks that a standby drops events.
func TestLeaderLooksAtEveryPrimaryObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b")
		g.configMaps.Modify(configMap("a", "2"))
		g.secrets.Modify(secret("b", "2"))
		g.configMaps.Add(configMap("c", "1"))
		synctest.Wait()
		expect(t, g.said())
		if s := g.loop.Status(); s.Phase != PhaseStopped || s.QueueDepth != 0 || s.Reconciles != 0 {
			t.Errorf("status of a standby: %+v", s)
		}

		g.lead(t)
		synctest.Wait()
		expect(t, g.said(), "map a none->2", "map b none->1", "map c none->1",
			"reconcile a 2/1", "reconcile b 1/2", "reconcile c 1/")
		g.secrets.Modify(secret("a", "3"))
		g.configMaps.Modify(configMap("b", "3"))
		synctest.Wait()
		expect(t, g.said(), "map b 1->3", "reconcile a 2/3", "reconcile b 3/2", "secret a")

		// It is a standby again, and then leads once more.
		g.resign(t)
		g.configMaps.Delete(configMap("a", "2"))
		g.secrets.Modify(secret("b", "4"))
		synctest.Wait()
		expect(t, g.said())
		g.lead(t)
		synctest.Wait()
		expect(t, g.said(), "map b none->3", "map c none->1", "reconcile b 3/4", "reconcile c 1/")
		if err := g.loop.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "already running") {
			t.Errorf("a second Run at the same time returned %v", err)
		}
		g.resign(t)
	})
}

// arrived returns a function that makes a change, once, and lets its notification arrive.
func arrived(g *gated, change func(*gated)) func() {
	var once sync.Once
	return func() {
		once.Do(func() {
			change(g)
			letOthersRun()
		})
	}
}

func letOthersRun() {
	for range 1000 {
		runtime.Gosched()
	}
}

func mapping(g *gated, change func()) { g.mapped = func(*corev1.ConfigMap) { change() } }

// TestLeaderBeginsWithoutLosingChanges changes an object at each point at which its notification may
// be dropped by mistake. The last reconcile must have seen the change.
func TestLeaderBeginsWithoutLosingChanges(t *testing.T) {
	object := func(g *gated) { g.configMaps.Modify(configMap("a", "2")) }
	other := func(g *gated) { g.secrets.Modify(secret("a", "2")) }
	add := func(g *gated) { g.configMaps.Add(configMap("new", "1")) }
	reconcile := func(g *gated, change func()) {
		g.during = func(k cache.ObjectName) {
			if k.Name == "a" {
				change()
			}
		}
	}
	for name, tc := range map[string]struct {
		prepare func(g *gated)
		want    string // the last reconcile of the object
	}{
		"a change of the ConfigMap just before Run":                       {object, "reconcile a 2/1"},
		"a change of the Secret just before Run":                          {other, "reconcile a 1/2"},
		"a new ConfigMap just before Run":                                 {add, "reconcile new 1/"},
		"a change of the ConfigMap after it was listed from the cache":    {func(g *gated) { g.listed = arrived(g, object) }, "reconcile a 2/1"},
		"a change of the Secret after the ConfigMap was listed":           {func(g *gated) { g.listed = arrived(g, other) }, "reconcile a 1/2"},
		"a new ConfigMap after the cache was listed":                      {func(g *gated) { g.listed = arrived(g, add) }, "reconcile new 1/"},
		"a change of the ConfigMap while the first ConfigMap is mapped":   {func(g *gated) { mapping(g, arrived(g, object)) }, "reconcile a 2/1"},
		"a change of the Secret while the first ConfigMap is mapped":      {func(g *gated) { mapping(g, arrived(g, other)) }, "reconcile a 1/2"},
		"a new ConfigMap while the first ConfigMap is mapped":             {func(g *gated) { mapping(g, arrived(g, add)) }, "reconcile new 1/"},
		"a change of the ConfigMap after its first reconcile has read it": {func(g *gated) { reconcile(g, arrived(g, object)) }, "reconcile a 2/1"},
		"a change of the Secret after the first reconcile has read it":    {func(g *gated) { reconcile(g, arrived(g, other)) }, "reconcile a 1/2"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGated(t, "a", "b", "c")
				tc.prepare(g)
				g.lead(t)
				synctest.Wait()
				g.mu.Lock()
				last := ""
				for _, line := range g.log {
					if strings.HasPrefix(line, tc.want[:strings.LastIndex(tc.want, " ")+1]) {
						last = line
					}
				}
				g.mu.Unlock()
				if last != tc.want {
					t.Errorf("the last one was %q, want %q; all: %v", last, tc.want, g.said())
				}
				g.resign(t)
			})
		})
	}
}

// order returns the names of the ConfigMaps in the order in which they were reconciled first.
func (g *gated) order() (names []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, line := range g.log {
		if f := strings.Fields(line); f[0] == "reconcile" && !slices.Contains(names, f[1]) {
			names = append(names, f[1])
		}
	}
	return names
}

func TestLeaderBeginsWithTheLastChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b", "c", "d")
		g.configMaps.Modify(configMap("b", "2"))
		synctest.Wait()
		g.lead(t)
		synctest.Wait()
		expect(t, g.order(), "b", "d", "c", "a")
		g.resign(t)
	})
}

func TestLeaderMapsNoStateOlderThanTheCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b")
		mapping(g, sync.OnceFunc(func() { // when b is mapped
			g.configMaps.Modify(configMap("a", "2"))
			for g.cached(cache.NewObjectName("shop", "a")) != "2/1" {
				runtime.Gosched()
			}
		}))
		g.lead(t)
		synctest.Wait()
		expect(t, slices.DeleteFunc(g.said(), func(line string) bool { return strings.HasPrefix(line, "reconcile") }),
			"map a 1->2", "map a none->2", "map b none->1")
		g.resign(t)
	})
}

func TestLeaderStopsWhileItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b", "c")
		g.mapped = func(*corev1.ConfigMap) { g.stop() }
		g.lead(t)
		if err := <-g.stopped; err != nil {
			t.Errorf("Run returned %v", err)
		}
		if log := g.said(); len(log) != 1 {
			t.Errorf("%v: want one object mapped and nothing reconciled", log)
		}
	})
}

func TestLeaderIsNotIdleBeforeTheReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b", "c")
		var s Status
		g.listed = func() { letOthersRun(); s = g.loop.Status() }
		g.lead(t)
		synctest.Wait()
		if s.Name == "" || s.Phase == PhaseRunning && s.QueueDepth == 0 {
			t.Errorf("status while the cache is listed: %+v", s)
		}
		g.resign(t)
	})
}
