// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/cache"
)

// slowHandler records what it sees and works as long as block is open.
type slowHandler struct {
	name  string
	block chan struct{}
	seen  []string
}

func (h *slowHandler) Name() string { return h.name }

func (h *slowHandler) see(what string) {
	if h.block != nil {
		<-h.block
	}
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
		informer, _ := f.Informer(Secrets)
		h := &slowHandler{name: "reload"}
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
		if diff := cmp.Diff(want, h.seen); diff != "" {
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
				informer, _ := f.Informer(Secrets)
				h := &slowHandler{name: "reload"}
				if _, err := informer.AddEventHandler(h); err != nil {
					t.Fatal(err)
				}
				pass(tc.period - time.Second)
				if n := secretsStatus(f).Handlers[0].Handled; n != 2 {
					t.Errorf("%d notifications before the period is over", n)
				}
				before := c.count()
				pass(21*time.Hour - tc.period)
				n := (len(h.seen) - 2) / 2
				if n < tc.least || n > tc.most {
					t.Errorf("%d resyncs: %v", n, h.seen)
				}
				for _, seen := range h.seen[2:] {
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

func TestTheBacklogOfASlowHandlerShowsAndDelaysNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		defer f.Shutdown()
		informer, _ := f.Informer(Secrets)
		slow, fast := &slowHandler{name: "slow", block: make(chan struct{})}, &slowHandler{name: "fast"}
		registration, err := informer.AddEventHandler(slow)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := informer.AddEventHandler(fast); err != nil {
			t.Fatal(err)
		}
		for range 9 {
			c.put(named("a", "2"))
		}
		synctest.Wait()
		want := []HandlerStatus{{Name: "fast", Handled: 10}, {Name: "slow", Backlog: 10}}
		if diff := cmp.Diff(want, secretsStatus(f).Handlers); diff != "" {
			t.Errorf("handlers (-want +got):\n%s", diff)
		}
		if registration.HasSynced() {
			t.Error("a handler has synced that has not handled the initial list")
		}
		slow.block <- struct{}{}
		synctest.Wait()
		if !registration.HasSynced() {
			t.Error("a handler has not synced that has handled the initial list")
		}
		close(slow.block)
		synctest.Wait()
		want = []HandlerStatus{{Name: "fast", Handled: 10}, {Name: "slow", Handled: 10}}
		if diff := cmp.Diff(want, secretsStatus(f).Handlers); diff != "" {
			t.Errorf("handlers (-want +got):\n%s", diff)
		}
	})
}

func TestARemovedHandlerIsCalledNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"), named("b", "1"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		defer f.Shutdown()
		informer, _ := f.Informer(Secrets)
		h := &slowHandler{name: "reload", block: make(chan struct{})}
		registration, err := informer.AddEventHandler(h)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		done := make(chan error)
		go func() { done <- cache.ShutDownEventHandler(informer, registration) }()
		synctest.Wait()
		select {
		case err := <-done:
			t.Error("shut down while the handler was running", err)
		default:
		}
		close(h.block)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		c.put(named("c", "1"))
		synctest.Wait()
		if len(h.seen) != 1 {
			t.Errorf("notifications %v, want the one that was running", h.seen)
		}
		if s := secretsStatus(f); len(s.Handlers) != 0 {
			t.Errorf("handlers %v", s.Handlers)
		}
		if err := informer.RemoveEventHandler(registration); err != nil {
			t.Errorf("second removal: %v", err)
		}
	})
}

func TestHandlersEndWithTheInformer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestFactory(t, newCluster(named("a", "1")), reloadNeed)
		startSynced(t, f)
		informer, _ := f.Informer(Secrets)
		registration, err := informer.AddEventHandler(&slowHandler{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		f.Shutdown()
		<-registration.(interface{ ShutdownChan() <-chan struct{} }).ShutdownChan()
		if _, err := informer.AddEventHandler(&slowHandler{}); err == nil {
			t.Error("a handler was added to a stopped informer")
		}
	})
}

func TestShutdownWaitsForARunningHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestFactory(t, newCluster(named("a", "1")), reloadNeed)
		startSynced(t, f)
		informer, _ := f.Informer(Secrets)
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
	informer, _ := f.Informer(Secrets)
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
