// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is an informer of ConfigMaps that a test fills. It tells its handlers of a change later than Get and
// List show it, and of one change after the other.
type memory struct {
	synced   chan struct{}
	listed   func()                 // is called after each list, if it is set
	unlisted func(name string) bool // if it is set: of a namespace, and of an object that is left out

	mu       sync.Mutex
	version  int
	objects  map[cache.ObjectName]*corev1.ConfigMap
	mappings []*func(old, current *corev1.ConfigMap, replayed bool) bool
	untold   []func()
	calls    atomic.Int32 // of mappings that have not returned
	panicked []string     // names of the objects on which a mapping panicked
	problems []string     // those that have not been mapped since
}

func newMemory(text string, names ...string) *memory {
	m := &memory{synced: closed(), objects: map[cache.ObjectName]*corev1.ConfigMap{}}
	m.put(text, names...)
	return m
}

func (m *memory) put(text string, names ...string) {
	for _, name := range names {
		key := keyOf(name)
		m.set(key, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}, Data: map[string]string{"text": text}})
	}
}

// set sets a ConfigMap, or removes it if it is nil.
func (m *memory) set(key cache.ObjectName, current *corev1.ConfigMap) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version++
	old := m.objects[key]
	if delete(m.objects, key); current != nil {
		current.ResourceVersion = fmt.Sprint(m.version)
		m.objects[key] = current
	}
	for _, mapping := range m.mappings {
		m.tell(func() { (*mapping)(old, current, false) })
	}
}

// tell lets a goroutine call f, after what is untold yet.
func (m *memory) tell(f func()) {
	if m.untold = append(m.untold, f); len(m.untold) > 1 {
		return // there is one
	}
	go func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		for len(m.untold) > 0 {
			next := m.untold[0]
			m.mu.Unlock()
			next()
			m.mu.Lock()
			m.untold = m.untold[1:]
		}
	}()
}

// AddMapping contains the panics of a mapping, as the real one does.
func (m *memory) AddMapping(mapEvent func(old, current *corev1.ConfigMap, replayed bool) bool) (replay func(cache.ObjectName), remove func()) {
	mapping := func(old, current *corev1.ConfigMap, replayed bool) (mapped bool) {
		m.calls.Add(1)
		stack, _ := panics.Recover(func() error { mapped = mapEvent(old, current, replayed); return nil })
		m.calls.Add(-1)
		m.mu.Lock()
		defer m.mu.Unlock()
		name := objectOf(Event[*corev1.ConfigMap]{old, current}).Name
		if mapped {
			m.problems = slices.DeleteFunc(m.problems, func(other string) bool { return other == name })
		} else if stack != nil {
			m.panicked, m.problems = append(m.panicked, name), append(m.problems, name)
		}
		return mapped
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mappings = append(m.mappings, &mapping)
	return func(key cache.ObjectName) {
			m.mu.Lock()
			current := m.objects[key]
			m.mu.Unlock()
			if current != nil {
				mapping(nil, current, true)
			}
		}, func() {
			m.mappings = slices.DeleteFunc(m.mappings, func(other *func(old, current *corev1.ConfigMap, replayed bool) bool) bool { return other == &mapping })
		}
}

func (m *memory) Get(key cache.ObjectName) (*corev1.ConfigMap, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := m.objects[key]
	if textOf(o) == "of another Go type" {
		panic("cannot convert this")
	}
	return o, o != nil
}

func (m *memory) Objects() (list []metav1.Object) {
	m.mu.Lock()
	for _, o := range m.objects {
		list = append(list, o)
	}
	m.mu.Unlock()
	if m.listed != nil {
		m.listed()
	}
	return list
}

func (m *memory) Synced() <-chan struct{} { return m.synced }

// self returns what WatchSelf returns, and mapped what WatchMapped returns.
func (m *memory) self() Watch[cache.ObjectName] {
	watch := m.mapped(ownName[*corev1.ConfigMap])
	watch.leftOut = func(name cache.ObjectName) bool { return m.Unlisted(name.String()) }
	return watch
}

func (m *memory) mapped(
	keys func(Event[*corev1.ConfigMap]) []cache.ObjectName, only ...func(Event[*corev1.ConfigMap]) bool,
) Watch[cache.ObjectName] {
	return newWatch(m, true, keys, only)
}

func (m *memory) Unlisted(namespace string) bool { return m.unlisted != nil && m.unlisted(namespace) }

// fixture is a loop over ConfigMaps, in a bubble of fake time. Their informer has synced before, as on a warm
// standby. A name without a namespace is of the namespace shop.
type fixture struct {
	*testing.T
	opts       LoopOptions
	configMaps *memory
	// reconcile is what the loop calls; unless it is set, it says the name.
	reconcile func(context.Context, cache.ObjectName) (time.Duration, error)
	registry  metrics.KubeRegistry
	work      context.Context // see lifetime.NewContext
	leading   chan struct{}   // closed when the replica leads
	logger    klog.Logger
	begun     time.Time
	loop      *Loop[cache.ObjectName] // by build
	stop      context.CancelFunc      // by run
	stopped   func() error            // by run: what Run returns, once it does

	mu  sync.Mutex
	log []string
}

func newFixture(t *testing.T, names ...string) *fixture {
	t.Helper()
	f := &fixture{T: t, configMaps: newMemory("1", names...), registry: metrics.NewKubeRegistry(), work: context.Background(),
		leading: closed(), logger: klog.Background(), begun: time.Now()}
	f.opts = LoopOptions{Name: "test", Metrics: loopmetrics.New(f.registry)}
	f.reconcile = func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
		f.say("%s", key.Name)
		return 0, nil
	}
	return f
}

// build makes the loop, which registers the watches.
func (f *fixture) build(watches ...Watch[cache.ObjectName]) {
	f.Helper()
	var err error
	if f.loop, err = NewLoop(f.opts, f.reconcile, watches...); err != nil {
		f.Fatal(err)
	}
}

// run calls Run, of a loop that watches the ConfigMaps themselves unless there is one. It ends with the test.
func (f *fixture) run() {
	f.Helper()
	if f.loop == nil {
		f.build(f.configMaps.self())
	}
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), f.logger.WithValues("key", "of the reconcile that runs the loop")))
	stopped := make(chan error, 1)
	f.stop, f.stopped = stop, sync.OnceValue(func() error { return <-stopped })
	go func() { stopped <- f.loop.Run(lifetime.NewContext(ctx, klog.NewContext(f.work, f.logger), f.leading)) }()
	f.Cleanup(f.end)
	synctest.Wait()
}

// end lets Run end, which must return no error.
func (f *fixture) end() {
	f.Helper()
	f.stop()
	if err := f.stopped(); err != nil {
		f.Errorf("Run returned %v", err)
	}
}

// put adds or changes a ConfigMap, and waits for what comes of it.
func (f *fixture) put(text string, names ...string) {
	f.configMaps.put(text, names...)
	synctest.Wait()
}

func (f *fixture) say(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

// said returns what has happened since the last call.
func (f *fixture) said() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	log := f.log
	f.log = nil
	return log
}

// expect compares what has happened since the last call with want.
func (f *fixture) expect(want ...string) {
	f.Helper()
	assert.Equal(f, "what happened", want, f.said())
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func pass(d time.Duration) { <-time.After(d) }

func keyOf(name string) cache.ObjectName {
	namespace, name, found := strings.Cut(name, "/")
	if !found {
		namespace, name = "shop", namespace
	}
	return cache.NewObjectName(namespace, name)
}

// textOf returns what a test has written into a ConfigMap.
func textOf(cm *corev1.ConfigMap) string {
	if cm == nil {
		return "none"
	}
	return cm.Data["text"]
}

func nothing(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil }
