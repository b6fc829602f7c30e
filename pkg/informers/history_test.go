// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"
)

func TestAnObjectKnowsWhenItCameAndWhenItsDigestChanged(t *testing.T) {
	type step struct {
		version, uid, value string
		deleted             bool
		stored              bool // the store has it before the next step
		listed              bool // it comes by a list, not by a watch
		first, changed      string
		created             bool // by a watch, at first
	}
	for name, steps := range map[string][]step{
		"one that came has not changed": {
			{version: "5", uid: "a", value: "1", first: "5"},
		},
		"its data change": {
			{version: "5", uid: "a", value: "1", stored: true, first: "5"},
			{version: "7", uid: "a", value: "2", stored: true, first: "5", changed: "7"},
		},
		"a later change of something else leaves the version of the data": {
			{version: "5", uid: "a", value: "1", stored: true, first: "5"},
			{version: "7", uid: "a", value: "2", stored: true, first: "5", changed: "7"},
			{version: "9", uid: "a", value: "2", stored: true, first: "5", changed: "7"},
		},
		"the store is late": {
			{version: "5", uid: "a", value: "1", first: "5"},
			{version: "7", uid: "a", value: "2", first: "5", changed: "7"},
			{version: "9", uid: "a", value: "2", first: "5", changed: "7"},
		},
		"so is one of a list that the store does not have yet": {
			{version: "5", uid: "a", value: "1", stored: true, first: "5"},
			{version: "7", uid: "a", value: "2", listed: true, first: "5", changed: "7"},
			{version: "9", uid: "a", value: "1", listed: true, first: "5", changed: "9"},
		},
		"another object of the name is new": {
			{version: "5", uid: "a", value: "1", stored: true, first: "5"},
			{version: "7", uid: "b", value: "2", stored: true, first: "7"},
		},
		"so it is if the store still has the one that was deleted": {
			{version: "5", uid: "a", value: "1", stored: true, first: "5"},
			{version: "6", uid: "a", value: "1", deleted: true, first: "5"},
			{version: "7", uid: "b", value: "2", first: "7"},
		},
		"data that come or go are no change, and hide what was before": {
			{version: "4", uid: "a", value: "1", stored: true, created: true, first: "4"},
			{version: "5", uid: "a", stored: true, first: "4"},
			{version: "7", uid: "a", value: "2", stored: true, first: "4"},
			{version: "9", uid: "a", value: "3", stored: true, first: "4", changed: "9"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := map[objectName]*Object{}
			var stored uint64
			r := &reducer{
				plan: mustPlan(t, Need{For: "a", Resource: Secrets, History: true, Digest: func(o runtime.Object) []byte {
					return o.(*corev1.Secret).Data["value"]
				}}, Need{For: "b", Resource: Secrets, Digest: func(o runtime.Object) []byte {
					return []byte(o.(*corev1.Secret).ResourceVersion) // always another one
				}}),
				panics: newPanics("", clock.RealClock{}, nil),
				history: &history{
					cached: func(n objectName) *Object { return store[n] },
					stored: func() uint64 { return stored },
					filled: closed,
				},
			}
			for _, s := range steps {
				reduced, err := r.reduce(&corev1.Secret{
					ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db", UID: types.UID(s.uid), ResourceVersion: s.version},
					Data:       map[string][]byte{"value": []byte(s.value)},
				})
				if err != nil {
					t.Fatal(err)
				}
				o := reduced.(*Object)
				if o.FirstVersion() != s.first || o.ChangedVersion() != s.changed {
					t.Errorf("version %s came at %q and changed at %q, want %q and %q", s.version, o.FirstVersion(), o.ChangedVersion(), s.first, s.changed)
				}
				if s.created {
					o.created()
				}
				if created := o.CreatedVersion() != ""; created != s.created {
					t.Errorf("version %s knows that it was created: %t", s.version, created)
				}
				if s.deleted {
					r.history.deleted(o)
				}
				if !s.listed {
					r.history.deliver(o)
				}
				if s.stored {
					store[o.objectName()], stored = o, o.version
				}
			}
			r.history.settle()
			if len(r.history.recent) > 0 && len(store) > 0 && steps[len(steps)-1].stored {
				t.Errorf("%d objects are remembered that the store has", len(r.history.recent))
			}
		})
	}
}

func TestAChangeRightAfterTheFirstListIsSeenOnceTheStoreHasTheList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"), named("b", "1"))
		store, filled := map[objectName]*Object{}, make(chan struct{})
		h := &history{
			cached: func(n objectName) *Object { return store[n] },
			stored: func() uint64 { return 0 },
			filled: func() <-chan struct{} { return filled },
		}
		l := &reducingListWatch{
			reducer: reducer{plan: mustPlan(t, reloadNeed), panics: newPanics("", clock.RealClock{}, nil), history: h},
			scopes:  []*scope{{source: c.source()}}, state: newState("secrets", clock.RealClock{}), clock: clock.RealClock{}, wg: &sync.WaitGroup{},
		}
		defer l.wg.Wait()
		w, err := l.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: ptrTo(true)})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for e := range w.ResultChan() {
			if isEndOfList(e) {
				break
			}
			store[e.Object.(*Object).objectName()] = e.Object.(*Object)
		}
		if n := len(h.recent); n > 0 {
			t.Errorf("%d objects of the first list are remembered", n)
		}
		c.put(named("a", "2"))
		synctest.Wait()
		select {
		case e := <-w.ResultChan():
			t.Fatalf("%s before the store has the list", e.Type)
		default:
		}
		close(filled)
		o := (<-w.ResultChan()).Object.(*Object)
		if got, want := o.ChangedVersion(), o.GetResourceVersion(); got != want {
			t.Errorf("the digest changed at %q, want %s", got, want)
		}
	})
}

func TestVersionsOfAListAndOfAWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("listed", "1"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		defer f.Shutdown()
		for i := range 3 * minSweep {
			c.put(named("watched", strconv.Itoa(i)))
		}
		c.put(named("listed", "2"))
		synctest.Wait()
		informer, _ := f.Informer("reload", Secrets)
		for name, want := range map[string][2]string{"listed": {"101", "486"}, "watched": {"102", "485"}} {
			obj, _, err := informer.GetStore().GetByKey("shop/" + name)
			if err != nil {
				t.Fatal(err)
			}
			o := obj.(*Object)
			if got := [2]string{o.FirstVersion(), o.ChangedVersion()}; got != want {
				t.Errorf("%s came at and changed at %q, want %q", name, got, want)
			}
		}
		for name, want := range map[string]string{"listed": "", "watched": "102"} {
			obj, _, _ := informer.GetStore().GetByKey("shop/" + name)
			if got := obj.(*Object).CreatedVersion(); got != want {
				t.Errorf("%s was created at %q, want %q", name, got, want)
			}
		}
		c.bookmark()
		synctest.Wait()
		if n := len(f.resources[0].history.recent); n > 0 {
			t.Errorf("%d objects are remembered after a bookmark", n)
		}
		c.breakWatches(true)
		c.put(named("listed", "3"))
		pass(relistAfterPanic)
		obj, _, _ := informer.GetStore().GetByKey("shop/listed")
		o := obj.(*Object)
		if o.FirstVersion() != "101" || o.ChangedVersion() != o.GetResourceVersion() {
			t.Errorf("after another list: came at %s, changed at %s, is at %s", o.FirstVersion(), o.ChangedVersion(), o.GetResourceVersion())
		}
	})
}

// closed is filled of a store that has the first list.
func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// A streamed list brings old versions among new ones. One of them is the last that the store has, which
// does not mean that the store has the list.
func TestAStreamedListIsRememberedUntilItIsStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("changed", "1"))
		for i := range 2 * minRecent {
			if name := fmt.Sprintf("old-%02d", i); i != minRecent {
				c.put(named(name, "1"))
			}
		}
		last := fmt.Sprintf("old-%02d", minRecent) // in the middle of the list
		c.put(named(last, "1"))
		store := map[objectName]*Object{}
		var stored uint64
		l := &reducingListWatch{
			reducer: reducer{plan: mustPlan(t, reloadNeed), panics: newPanics("", clock.RealClock{}, nil), history: &history{
				cached: func(n objectName) *Object { return store[n] },
				stored: func() uint64 { return stored },
				filled: closed,
			}},
			scopes: []*scope{{source: c.source()}}, state: newState("secrets", clock.RealClock{}), clock: clock.RealClock{}, wg: &sync.WaitGroup{},
		}
		defer l.wg.Wait()
		stream := func() watch.Interface {
			w, err := l.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: ptrTo(true)})
			if err != nil {
				t.Fatal(err)
			}
			return w
		}

		first := stream()
		var objects []*Object
		for e := range first.ResultChan() {
			if isEndOfList(e) {
				break
			}
			objects = append(objects, e.Object.(*Object))
		}
		first.Stop()
		synctest.Wait()
		for _, o := range objects {
			store[o.objectName()], stored = o, max(stored, o.version)
		}

		c.put(named("changed", "2"))
		second := stream() // the store has nothing of it
		defer second.Stop()
		for e := range second.ResultChan() {
			if isEndOfList(e) {
				break
			}
		}
		c.put(named("changed", "1"))
		o := (<-second.ResultChan()).Object.(*Object)
		if got, want := o.ChangedVersion(), o.GetResourceVersion(); got != want {
			t.Errorf("the digest changed at %q, want %s", got, want)
		}
	})
}
