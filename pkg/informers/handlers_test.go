// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/cache"
)

// slowHandler records what it is called with. If block is set, each call waits for it.
type slowHandler struct {
	block chan struct{}

	mu   sync.Mutex
	seen []string
}

// all returns what it has seen.
func (h *slowHandler) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.seen)
}

func (h *slowHandler) see(what string) {
	if h.block != nil {
		<-h.block
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen = append(h.seen, what)
}

func (h *slowHandler) OnAdd(obj any, initial bool) {
	if initial {
		h.see("initial " + keyOf(obj))
		return
	}
	h.see("add " + keyOf(obj))
}
func (h *slowHandler) OnUpdate(old, obj any) {
	if old == obj {
		h.see("resync " + keyOf(obj))
		return
	}
	h.see("update " + keyOf(obj))
}
func (h *slowHandler) OnDelete(obj any) { h.see("delete " + keyOf(obj)) }

func keyOf(obj any) string {
	key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
	if err != nil {
		return err.Error()
	}
	return key
}

func TestAHandlerSeesEverythingInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		f := newTestFactory(t, c, reloadNeed)
		informer, _ := f.Informer("reload", Secrets)
		h := &slowHandler{}
		if _, err := informer.AddEventHandler(h); err != nil {
			t.Fatal(err)
		}
		startSynced(t, f)
		defer f.Shutdown()
		synctest.Wait()
		c.put(named("b", "1"))
		c.put(named("b", "2"))
		c.remove("shop/a")
		c.remove("shop/b")
		synctest.Wait()
		c.breakWatches(true) // b comes and goes unseen, c is found by the relist
		c.put(named("c", "1"))
		pass(time.Minute)
		c.breakWatches(true)
		c.remove("shop/c")
		pass(time.Minute)
		want := []string{"initial shop/a", "add shop/b", "update shop/b", "delete shop/a", "delete shop/b", "add shop/c", "delete shop/c"}
		if diff := cmp.Diff(want, h.all()); diff != "" {
			t.Errorf("notifications (-want +got):\n%s", diff)
		}
	})
}

func TestAResyncShowsEachObjectAgainWithoutARequest(t *testing.T) {
	cases := map[string]struct {
		period time.Duration
		least  int // resyncs in 21 hours
		most   int
	}{
		"at a random time between the period and twice the period": {10 * time.Hour, 1, 2},
		"never": {0, 0, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(named("a", "1"), named("b", "1"))
				f := newTestFactoryWith(t, Config{MinResyncPeriod: tc.period}, c, reloadNeed)
				startSynced(t, f)
				defer f.Shutdown()
				informer, _ := f.Informer("reload", Secrets)
				h := &slowHandler{}
				if _, err := informer.AddEventHandler(h); err != nil {
					t.Fatal(err)
				}
				pass(tc.period - time.Second)
				synctest.Wait()
				if n := len(h.all()); n != 2 {
					t.Errorf("%d notifications before the period is over", n)
				}
				before := c.count()
				pass(21*time.Hour - tc.period)
				n := (len(h.all()) - 2) / 2
				if n < tc.least || n > tc.most {
					t.Errorf("%d resyncs: %v", n, h.all())
				}
				for _, seen := range h.all()[2:] {
					if seen != "resync shop/a" && seen != "resync shop/b" {
						t.Errorf("seen %q", seen)
					}
				}
				if c.count() != before {
					t.Error("a resync made a request")
				}
			})
		})
	}
}

func TestShutdownWaitsForARunningHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestFactory(t, newCluster(named("a", "1")), reloadNeed)
		startSynced(t, f)
		informer, _ := f.Informer("reload", Secrets)
		h := &slowHandler{block: make(chan struct{})}
		if _, err := informer.AddEventHandler(h); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		done := make(chan struct{})
		go func() { f.Shutdown(); close(done) }()
		pass(time.Hour)
		select {
		case <-done:
			t.Error("Shutdown returned while a handler was running")
		default:
		}
		close(h.block)
		<-done
	})
}

func TestSeveralControllersMayAddTheIndexByNamespace(t *testing.T) {
	f := newTestFactory(t, newCluster(), reloadNeed)
	informer, _ := f.Informer("reload", Secrets)
	byNamespace := cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}
	for range 2 {
		if err := informer.AddIndexers(byNamespace); err != nil {
			t.Fatal(err)
		}
	}
	if len(byNamespace) != 1 {
		t.Error("the caller's indexers were changed")
	}
	if err := informer.SetTransform(func(obj any) (any, error) { return obj, nil }); err == nil {
		t.Error("a transform was accepted")
	}
}
