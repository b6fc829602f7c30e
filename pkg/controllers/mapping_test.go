// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	fcache "k8s.io/client-go/tools/cache/testing"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2/textlogger"
)

// mappings records the calls of a mapping that fails for objects called "bad".
type mappings struct {
	mu     sync.Mutex
	broken func() // called for these; may be nil
	bad    []string
}

func (m *mappings) keys(e Event[*corev1.ConfigMap]) []cache.ObjectName {
	obj := e.New
	if obj == nil {
		obj = e.Old
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if obj.Name == "bad" {
		m.bad = append(m.bad, version(e.Old)+"->"+version(e.New))
		if m.broken != nil {
			m.broken()
		}
	}
	return []cache.ObjectName{cache.MetaObjectToName(obj)}
}

func (m *mappings) mend() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken = nil
}

// version is what a test has written into the ConfigMap.
func version(cm *corev1.ConfigMap) string {
	if cm == nil {
		return "none"
	}
	return cm.Data["version"]
}

// mapped runs a loop that watches through m and records what it reconciles.
type mapped struct {
	*harness
	*mappings
	log        bytes.Buffer
	reconciled []string
}

func newMapped(t *testing.T, broken func(), names ...string) *mapped {
	t.Helper()
	m := &mapped{mappings: &mappings{broken: broken}}
	m.harness = newHarness(t, reconciling{
		Reconcile: func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
			m.reconciled = append(m.reconciled, key.Name+" after "+time.Since(m.begun).String())
			return 0, nil
		},
	}, names...)
	m.logger = textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&m.log)))
	m.runWith(t, WatchMapped(m.informer, m.keys))
	return m
}

func (m *mapped) panics(t *testing.T) float64 {
	t.Helper()
	values, err := testutil.GetCounterValuesFromGatherer(m.registry, "quartermaster_controller_panics_total", nil, "controller")
	if err != nil {
		t.Fatal(err)
	}
	return values["test"]
}

func TestAnEventWhoseMappingPanicsIsMappedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMapped(t, func() { panic("cannot map this") }, "bad", "good")
		if got := m.loop.Status(); got.Unmapped != 1 || got.Panics != 1 || got.LastError == nil || got.LastError.Key != "shop/bad" {
			t.Errorf("status = %+v, want one panic on shop/bad, which is not mapped", got)
		}
		pass(2500 * time.Millisecond) // retries after 1 and 2 s more
		m.mend()
		pass(time.Hour)
		if diff := cmp.Diff([]string{"good after 0s", "bad after 3s"}, m.reconciled); diff != "" {
			t.Errorf("reconciles (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"none->", "none->", "none->"}, m.bad); diff != "" {
			t.Errorf("mappings of the bad object (-want +got):\n%s", diff)
		}
		if got := m.loop.Status(); got.Unmapped != 0 || got.Panics != 2 {
			t.Errorf("status = %+v, want nothing unmapped after two panics", got)
		}
		if n := m.panics(t); n != 2 {
			t.Errorf("%v panics counted, want 2", n)
		}
		log := m.log.String()
		if n := strings.Count(log, "could not be mapped"); n != 1 {
			t.Errorf("logged %d times, want once:\n%s", n, log)
		}
		if strings.Contains(log, "cannot map this") {
			t.Errorf("the log has the panic's value, which may be part of a Secret:\n%s", log)
		}
		for _, want := range []string{`object="shop/bad"`, "mapping_test.go", "panic: a value of type string"} {
			if !strings.Contains(log, want) {
				t.Errorf("the log lacks %q:\n%s", want, log)
			}
		}
		m.stop()
		if err := <-m.stopped; err != nil {
			t.Error(err)
		}
	})
}

func TestEventsOfAnObjectThatCannotBeMappedJoin(t *testing.T) {
	put := func(t *testing.T, m *mapped, v string) {
		t.Helper()
		var err error
		if configMaps := m.client.CoreV1().ConfigMaps("shop"); v == "" {
			err = configMaps.Delete(t.Context(), "bad", metav1.DeleteOptions{})
		} else {
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "bad"}, Data: map[string]string{"version": v}}
			_, err = configMaps.Update(t.Context(), cm, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
	}
	for name, tc := range map[string]struct {
		seen bool     // the object was mapped once before the mapping broke
		do   []string // changes of the object; "" removes it
		want string   // the event that is mapped in the end
	}{
		"two changes are one, from the first to the last": {true, []string{"1", "2"}, "->2"},
		"a change of a new object makes an addition":      {false, []string{"1"}, "none->1"},
		"a deletion is one of what was mapped last":       {true, []string{"1", ""}, "->none"},
		"an initial object that went is deleted":          {false, []string{"1", ""}, "1->none"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broken := func() { panic("cannot map this") }
				first := broken
				if tc.seen {
					first = nil
				}
				m := newMapped(t, first, "bad")
				m.mu.Lock()
				m.broken = broken
				m.mu.Unlock()
				for _, v := range tc.do {
					put(t, m, v)
				}
				if got := m.loop.Status().Unmapped; got != 1 {
					t.Errorf("%d objects unmapped, want 1", got)
				}
				m.mend()
				pass(time.Hour)
				if last := m.bad[len(m.bad)-1]; last != tc.want {
					t.Errorf("mapped %s in the end, want %s; all: %v", last, tc.want, m.bad)
				}
				if got := m.loop.Status().Unmapped; got != 0 {
					t.Errorf("%d objects still unmapped", got)
				}
				m.stop()
				if err := <-m.stopped; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestALoopThatStopsForgetsWhatCouldNotBeMapped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMapped(t, func() { panic("cannot map this") }, "bad")
		m.stop()
		if err := <-m.stopped; err != nil {
			t.Error(err)
		}
		called := len(m.bad)
		pass(time.Hour)
		if len(m.bad) != called {
			t.Error("it was mapped again after Run had returned")
		}
		m.mend()
		ctx, stop := context.WithCancel(t.Context())
		go func() { m.stopped <- m.loop.Run(ctx) }()
		synctest.Wait()
		if got := m.loop.Status(); got.Unmapped != 0 || len(m.reconciled) != 1 {
			t.Errorf("status %+v, reconciled %v: the next run gets every object again", got, m.reconciled)
		}
		stop()
		if err := <-m.stopped; err != nil {
			t.Error(err)
		}
	})
}

func TestAWatchOfAnotherTypeIsAFailureAndNoPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				return 0, errors.New("not to be called")
			},
		}, "a")
		h.runWith(t, WatchMapped(h.informer, func(Event[*corev1.Secret]) []cache.ObjectName { return nil }))
		if got := h.loop.Status(); got.Unmapped != 1 || got.Panics != 0 || got.Errors != 1 || !strings.Contains(got.LastError.Text, "*v1.ConfigMap, not a *v1.Secret") {
			t.Errorf("status = %+v", got)
		}
		h.stop()
		if err := <-h.stopped; err != nil {
			t.Error(err)
		}
	})
}

// neverMapped runs a loop whose mapping always fails.
func neverMapped(t *testing.T, names ...string) *mapped {
	t.Helper()
	m := newMapped(t, func() { panic("cannot map this") }, names...)
	t.Cleanup(func() {
		m.stop()
		if err := <-m.stopped; err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *mapped) remove(t *testing.T, name string) {
	t.Helper()
	if err := m.client.CoreV1().ConfigMaps("shop").Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

func TestADeletedObjectThatCannotBeMappedIsForgotten(t *testing.T) {
	for name, tc := range map[string]struct {
		initial  bool // the object was there when the watch began
		want     []string
		unmapped int // right after the deletion
	}{
		"at once if it came and went": {false, []string{"none->"}, 0},
		"after five tries if it was there before": {true,
			[]string{"none->", "->none", "->none", "->none", "->none", "->none"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var names []string
				if tc.initial {
					names = []string{"bad"}
				}
				m := neverMapped(t, names...)
				if !tc.initial {
					create(t, m.client, "bad")
					synctest.Wait()
				}
				m.remove(t, "bad")
				if got := m.loop.Status().Unmapped; got != tc.unmapped {
					t.Errorf("%d objects unmapped after the deletion, want %d", got, tc.unmapped)
				}
				pass(time.Hour)
				if diff := cmp.Diff(tc.want, m.bad); diff != "" {
					t.Errorf("mappings (-want +got):\n%s", diff)
				}
				if got := m.loop.Status().Unmapped; got != 0 {
					t.Errorf("%d objects still unmapped", got)
				}
			})
		})
	}
}

func TestNoMoreThanAThousandObjectsAreMappedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const objects = maxUnmapped + 10
		source := fcache.NewFakeControllerSource() // much faster than a clientset
		t.Cleanup(source.Shutdown)                 // after the informer has stopped: Shutdown blocks whoever watches again
		object := func(i int) *corev1.ConfigMap {
			return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint("o", i)}}
		}
		for i := range objects {
			source.Add(object(i))
		}
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil },
		})
		h.informer = cache.NewSharedIndexInformer(source, &corev1.ConfigMap{}, 0, cache.Indexers{})
		var log bytes.Buffer
		h.logger = textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
		var broken atomic.Bool
		broken.Store(true)
		mapped := map[string]bool{}
		h.runWith(t, WatchMapped(h.informer, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
			if broken.Load() {
				panic("cannot map this")
			}
			mapped[e.New.Name] = true
			return nil
		}))
		if got := h.loop.Status(); got.Unmapped != maxUnmapped || got.Panics != objects {
			t.Errorf("%d unmapped after %d panics, want %d and %d", got.Unmapped, got.Panics, maxUnmapped, objects)
		}
		if n := strings.Count(log.String(), "could not be mapped"); n != maxUnmapped {
			t.Errorf("logged %d objects, want %d", n, maxUnmapped)
		}
		broken.Store(false)
		pass(time.Hour)
		if got := h.loop.Status().Unmapped; got != 0 || len(mapped) != maxUnmapped {
			t.Errorf("%d mapped again, %d still unmapped; want %d and 0", len(mapped), got, maxUnmapped)
		}
		for i := range objects { // the next event brings the others
			source.Modify(object(i))
		}
		synctest.Wait()
		if len(mapped) != objects {
			t.Errorf("%d objects mapped, want all %d", len(mapped), objects)
		}
		h.stop()
		if err := <-h.stopped; err != nil {
			t.Error(err)
		}
	})
}

func TestRunWaitsForAMapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil },
		})
		var returned atomic.Bool
		h.runWith(t, WatchMapped(h.informer, func(Event[*corev1.ConfigMap]) []cache.ObjectName {
			h.stop()
			for range 1000 {
				runtime.Gosched() // lets Run return if it does not wait
			}
			returned.Store(true)
			return nil
		}))
		create(t, h.client, "late")
		if err := <-h.stopped; err != nil || !returned.Load() {
			t.Errorf("Run returned (error %v) while its mapping was called", err)
		}
	})
}
