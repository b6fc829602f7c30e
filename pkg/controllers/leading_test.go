// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
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
	s.build(WatchMapped(s.configMaps, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
		s.say("map %s %s->%s", nameOf(e).Name, textOf(e.Old), textOf(e.New))
		if s.mapped != nil {
			s.mapped()
		}
		return []cache.ObjectName{nameOf(e)}
	}), WatchChanges(s.others, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
		s.say("other %s", nameOf(e).Name)
		return []cache.ObjectName{nameOf(e)}
	}))
	return s
}

// expectAll compares what has happened since the last call with want, in any order.
func (s *standby) expectAll(want ...string) {
	s.Helper()
	synctest.Wait()
	slices.Sort(s.log)
	s.expect(want...)
}

// TestLeaderLooksAtEveryPrimaryObject also checks that a standby drops events.
func TestLeaderLooksAtEveryPrimaryObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStandby(t, "a", "b")
		s.put("2", "a")
		s.others.put("2", "b")
		s.put("1", "c")
		s.expectAll()
		if s := s.loop.Status(); s.Phase != PhaseStopped || s.QueueDepth != 0 || s.Reconciles != 0 {
			t.Errorf("status of a standby: %+v", s)
		}
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
			inBubble(t, change+" "+moment, func(t *testing.T) {
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
				if last != tc.want {
					t.Errorf("the last one was %q, want %q; all: %v", last, tc.want, log)
				}
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
		if s.Name == "" || s.Phase == PhaseRunning && s.QueueDepth == 0 {
			t.Errorf("status while the cache is listed: %+v", s)
		}
	})
}
