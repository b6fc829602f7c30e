// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// standby is a fixture with a second informer, of others, each of which concerns the ConfigMap of its name.
type standby struct {
	*fixture
	others *memory
	// during is called in each reconcile, and mapped with each ConfigMap that is mapped, if they are set.
	during func(cache.ObjectName)
	mapped func()
}

func newStandby(t *testing.T, names ...string) *standby {
	t.Helper()
	s := &standby{fixture: newFixture(t, names...), others: newMemory("1", names...)}
	s.reconcile = func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
		cm, _ := s.configMaps.Get(key)
		other, _ := s.others.Get(key)
		s.say("reconcile %s %s/%s", key.Name, textOf(cm), textOf(other))
		if s.during != nil {
			s.during(key)
		}
		return 0, nil
	}
	s.build(s.configMaps.mapped(func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
		s.say("map %s %s->%s", objectOf(e).Name, textOf(e.Old), textOf(e.New))
		if s.mapped != nil {
			s.mapped()
		}
		return ownName(e)
	}), newWatch(s.others, false, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
		s.say("other %s", objectOf(e).Name)
		return ownName(e)
	}, nil))
	return s
}

// expectAll compares what has happened since the last call with want, in any order.
func (s *standby) expectAll(want ...string) {
	s.Helper()
	synctest.Wait()
	slices.Sort(s.log)
	s.expect(want...)
}

func TestLeaderLooksAtEveryPrimaryObjectAndAStandbyDropsEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStandby(t, "a", "b")
		s.put("2", "a")
		s.others.put("2", "b")
		s.put("1", "c")
		s.expectAll()
		status := s.loop.Status()
		assert.Equal(t, "status of a standby", []any{PhaseStopped, 0, uint64(0)}, []any{status.Phase, status.QueueDepth, status.Reconciles})
		s.run()
		s.expectAll("map a none->2", "map b none->1", "map c none->1", "reconcile a 2/1", "reconcile b 1/2", "reconcile c 1/none")
		s.others.put("3", "a")
		s.put("3", "b")
		s.expectAll("map b 1->3", "other a", "reconcile a 2/3", "reconcile b 3/2")

		// It is a standby again, and then leads once more.
		s.end()
		s.configMaps.set(keyOf("a"), nil)
		s.others.put("4", "b")
		s.expectAll()
		s.run()
		s.expectAll("map b none->3", "map c none->1", "reconcile b 3/4", "reconcile c 1/none")
		if err := s.loop.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "already running") {
			t.Errorf("a second Run at the same time returned %v", err)
		}
	})
}

func letOthersRun() {
	for range 1000 {
		runtime.Gosched()
	}
}

// TestLeaderBeginsWithoutLosingChanges changes an object at each point at which its notification may
// be dropped by mistake. The last reconcile must have seen the change.
func TestLeaderBeginsWithoutLosingChanges(t *testing.T) {
	moments := map[string]func(*standby, func()){
		"just before Run":                     func(_ *standby, change func()) { change() },
		"after the cache was listed":          func(s *standby, change func()) { s.configMaps.listed = change },
		"while the first ConfigMap is mapped": func(s *standby, change func()) { s.mapped = change },
		"after the first reconcile has read a": func(s *standby, change func()) {
			s.during = func(key cache.ObjectName) {
				if key.Name == "a" {
					change()
				}
			}
		},
	}
	for change, tc := range map[string]struct {
		of   func(*standby)
		want string // the last reconcile of the object
	}{
		"a change of the ConfigMap a": {func(s *standby) { s.configMaps.put("2", "a") }, "reconcile a 2/1"},
		"a change of the other a":     {func(s *standby) { s.others.put("2", "a") }, "reconcile a 1/2"},
		"a new ConfigMap":             {func(s *standby) { s.configMaps.put("1", "new") }, "reconcile new 1/none"},
	} {
		for moment, at := range moments {
			subtest.InBubble(t, change+" "+moment, func(t *testing.T) {
				s := newStandby(t, "a", "b", "c")
				at(s, sync.OnceFunc(func() {
					tc.of(s)
					letOthersRun() // the notification arrives
				}))
				s.run()
				last, log := "", s.said()
				for _, line := range log {
					if strings.HasPrefix(line, tc.want[:strings.LastIndex(tc.want, " ")+1]) {
						last = line
					}
				}
				assert.Equal(t, fmt.Sprint("the last one of ", log), tc.want, last)
			})
		}
	}
}

func TestLeaderBeginsWithTheLastChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a", "b", "c", "d")
		f.put("2", "b")
		f.run()
		f.expect("b", "d", "c", "a")
	})
}

func TestLeaderMapsNoStateOlderThanTheCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStandby(t, "a", "b")
		s.mapped = sync.OnceFunc(func() { s.configMaps.put("2", "a") }) // when b is mapped
		s.run()
		s.log = slices.DeleteFunc(s.log, func(line string) bool { return strings.HasPrefix(line, "reconcile") })
		s.expectAll("map a 1->2", "map a none->2", "map b none->1")
	})
}

func TestLeaderStopsWhileItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStandby(t, "a", "b", "c")
		s.mapped = func() { s.stop() }
		s.run()
		s.end()
		s.expect("map c none->1") // one object is mapped, and nothing reconciled
	})
}

func TestLeaderIsNotIdleBeforeTheReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a", "b", "c")
		var s Status
		f.configMaps.listed = func() { letOthersRun(); s = f.loop.Status() }
		f.run()
		if s.Name == "" || s.Phase == PhaseRunning && s.QueueDepth+s.ToReplay == 0 {
			t.Errorf("status while the cache is listed: %+v", s)
		}
	})
}

func TestLoopMistakesAreErrors(t *testing.T) {
	m := loopmetrics.New(metrics.NewKubeRegistry())
	fine := LoopOptions{Name: "x", Metrics: m}
	caches, err := informers.NewCaches(metrics.NewKubeRegistry())
	assert.NoError(t, err)
	cfg := informers.CacheConfig{Scheme: scheme.Scheme}
	cfg.Declare("x", informers.Need{Resource: informers.Jobs})
	cluster, err := caches.AddCluster(cfg, &rest.Config{}, func(string) {})
	assert.NoError(t, err)
	jobs := informers.For[metav1.Object](cluster.ForController("x"), informers.Jobs)
	for _, loop := range []LoopOptions{{Name: "two", Loop: "a", Metrics: m}, {Name: "two", Cluster: "far", Metrics: m}} {
		_, err := NewLoop(loop, nothing)
		assert.NoError(t, err)
	}
	for name, tc := range map[string]struct {
		opts      LoopOptions
		reconcile func(context.Context, cache.ObjectName) (time.Duration, error)
		watches   []Watch[cache.ObjectName]
		want      string
	}{
		"no name":                       {LoopOptions{Metrics: m}, nothing, nil, "loop without LoopOptions.Name"},
		"no function":                   {fine, nil, nil, "loop x: reconcile is nil"},
		"a back-off that ends too soon": {LoopOptions{Name: "x", Metrics: m, MaxBackoff: 1}, nothing, nil, "loop x: LoopOptions.MaxBackoff 1ns must be at least MinBackoff, which is 1s"},
		"a drain that ended before":     {LoopOptions{Name: "x", Metrics: m, DrainTimeout: -1}, nothing, nil, "loop x: no duration of LoopOptions may be negative"},
		"a short back-off is fine":      {LoopOptions{Name: "x", Metrics: m, MaxBackoff: minBackoff}, nothing, nil, ""},
		"a second loop of a controller": {LoopOptions{Name: "two", Loop: "b", Metrics: m}, nothing, nil, ""},
		"a second loop of one name":     {LoopOptions{Name: "two", Loop: "a", Metrics: m}, nothing, nil, "loop two/a: there is a loop of this name; each has a LoopOptions.Loop of its own, and one that has ended must be closed"},
		"a cluster of a loop's name":    {LoopOptions{Name: "two", Cluster: "a", Metrics: m}, nothing, nil, ""},
		"a second loop of one cluster":  {LoopOptions{Name: "two", Cluster: "far", Metrics: m}, nothing, nil, "loop two@far: there is a loop of this name; each has a LoopOptions.Loop of its own, and one that has ended must be closed"},
		"a watch without an informer":   {fine, nothing, []Watch[cache.ObjectName]{WatchSelf[metav1.Object](nil)}, "loop x: watch: the informer is nil"},
		"no informer of owned objects":  {fine, nothing, []Watch[cache.ObjectName]{WatchOwner[metav1.Object](nil, jobs, schema.GroupKind{})}, "loop x: watch: the informer is nil"},
		"a watch without a function":    {fine, nothing, []Watch[cache.ObjectName]{WatchMapped[metav1.Object, cache.ObjectName](jobs, nil)}, "loop x: watch: a function that maps or chooses events is nil"},
		"a filter without a function":   {fine, nothing, []Watch[cache.ObjectName]{WatchSelf(jobs, nil)}, "loop x: watch: a function that maps or chooses events is nil"},
		"no informer of owners":         {fine, nothing, []Watch[cache.ObjectName]{WatchOwner(jobs, (*informers.Informer[metav1.Object])(nil), schema.GroupKind{})}, "loop x: watch: the informer of the owners is nil"},
		"owners that the cache lacks":   {fine, nothing, []Watch[cache.ObjectName]{WatchOwner(jobs, jobs, schema.GroupKind{})}, "loop x: watch: WatchOwner needs owner references, but the controller's need has no Fields: OwnerReferences"},
	} {
		_, err := NewLoop(tc.opts, tc.reconcile, tc.watches...)
		assert.Equal(t, "mistake: "+name, cmp.Or(tc.want, "<nil>"), fmt.Sprint(err))
	}
}

func TestLoopTakesKeysFromOutside(t *testing.T) {
	for cluster, want := range map[string][]string{"": {"one", "two"}, "far": {"early", "one", "two"}} {
		subtest.InBubble(t, "cluster "+cluster, func(t *testing.T) {
			f := newFixture(t)
			f.opts.Cluster = cluster
			f.build()
			f.loop.Enqueue(keyOf("early"))
			f.run()
			f.loop.Enqueue(keyOf("one"), keyOf("two"))
			synctest.Wait()
			f.end()
			f.loop.Enqueue(keyOf("too-late"))
			synctest.Wait()
			f.expect(want...)
		})
	}
}

func owned(apiVersion, kind, name string, controller bool) *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "ConfigMap", Name: "other"},
		{APIVersion: apiVersion, Kind: kind, Name: name, Controller: ptr.To(controller)},
	}}}
}

func TestWatchOwner(t *testing.T) {
	type changed = Event[metav1.Object]
	widget := schema.GroupKind{Group: "example.com", Kind: "Widget"}
	mine := owned("example.com/v1", "Widget", "a", true)
	for name, tc := range map[string]struct {
		event changed
		want  []string
	}{
		"an object is added":                                  {changed{New: mine}, []string{"shop/a"}},
		"an object is changed":                                {changed{Old: mine, New: mine}, []string{"shop/a"}},
		"an object is deleted":                                {changed{Old: mine}, []string{"shop/a"}},
		"an owner in another version of the API":              {changed{New: owned("example.com/v2", "Widget", "a", true)}, []string{"shop/a"}},
		"an object gets another owner":                        {changed{Old: mine, New: owned("example.com/v1", "Widget", "b", true)}, []string{"shop/a", "shop/b"}},
		"an object loses its owner":                           {changed{Old: mine, New: &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}}, []string{"shop/a"}},
		"an owner that does not control it":                   {changed{New: owned("example.com/v1", "Widget", "a", false)}, nil},
		"an owner of another group":                           {changed{New: owned("example.org/v1", "Widget", "a", true)}, nil},
		"an owner of another kind":                            {changed{New: owned("example.com/v1", "Gadget", "a", true)}, nil},
		"an owner whose version is no version":                {changed{New: owned("a/b/c", "Widget", "a", true)}, nil},
		"an object without a namespace, whose owner has none": {changed{New: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x", OwnerReferences: mine.OwnerReferences}}}, []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got, ofCluster, wantOfCluster []string
			for _, key := range ownersOf(tc.event, widget, false) {
				got = append(got, key.String())
				wantOfCluster = append(wantOfCluster, key.Name)
			}
			for _, key := range ownersOf(tc.event, widget, true) {
				ofCluster = append(ofCluster, key.String())
			}
			assert.Equal(t, "keys", tc.want, got)
			assert.Equal(t, "keys of owners without a namespace", wantOfCluster, ofCluster)
		})
	}
}

func TestGenerationChangedLeavesOutStatusChanges(t *testing.T) {
	type changed = Event[*appsv1.Deployment]
	with := func(generation int64, status int32) *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Generation: generation}, Status: appsv1.DeploymentStatus{Replicas: status}}
	}
	for name, tc := range map[string]struct {
		event changed
		kept  bool
	}{
		"an addition":             {changed{New: with(1, 0)}, true},
		"a deletion":              {changed{Old: with(1, 0)}, true},
		"a change of the spec":    {changed{Old: with(1, 0), New: with(2, 0)}, true},
		"a change of the status":  {changed{Old: with(1, 0), New: with(1, 1)}, false},
		"no change":               {changed{Old: with(1, 0), New: with(1, 0)}, false},
		"one without generations": {changed{Old: with(0, 0), New: with(0, 0)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, "kept with the Go type", tc.kept, GenerationChanged(tc.event))
			var untyped Event[metav1.Object]
			for from, to := range map[*appsv1.Deployment]*metav1.Object{tc.event.Old: &untyped.Old, tc.event.New: &untyped.New} {
				if from != nil {
					*to = from
				}
			}
			assert.Equal(t, "kept with the interface", tc.kept, GenerationChanged(untyped))
		})
	}
}
