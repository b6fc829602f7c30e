// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

func TestAnErrorOfAnIndexFunctionIsContained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("fine", "1"))
		f := newTestFactory(t, c, reloadNeed)
		informer, _ := f.Informer("reload", Secrets)
		if err := informer.AddIndexers(cache.Indexers{"x": func(obj any) ([]string, error) {
			if obj.(metav1.Object).GetName() == "bad" {
				return nil, errors.New("cannot parse the annotation")
			}
			return []string{"all"}, nil
		}}); err != nil {
			t.Fatal(err)
		}
		startSynced(t, f)
		defer f.Shutdown()
		c.put(named("bad", "1"))
		synctest.Wait()
		wantNames(t, f, "shop/bad", "shop/fine")
		if all, err := informer.GetIndexer().ByIndex("x", "all"); err != nil || len(all) != 1 {
			t.Errorf("%d indexed, %v", len(all), err)
		}
		if err := f.Problem("reload"); err == nil || !strings.Contains(err.Error(), "index x panics") {
			t.Errorf("problem %v", err)
		}
	})
}

func TestAListAfterAPanicDoesNotBlockTheCache(t *testing.T) {
	c := newCluster(named("fine", "1"))
	f := newTestFactory(t, c, reloadNeed)
	informer, _ := f.Informer("reload", Secrets)
	inIndex, goOn := make(chan struct{}), make(chan struct{})
	if err := informer.AddIndexers(cache.Indexers{"x": func(obj any) ([]string, error) {
		if obj.(metav1.Object).GetName() == "slow" { // under the lock of the cache
			close(inIndex)
			<-goOn
		}
		return nil, nil
	}}); err != nil {
		t.Fatal(err)
	}
	startSynced(t, f)
	defer f.Shutdown()
	r := f.resources[0]
	r.panics.contain("x", "reload", "Digest", named("bad", "1"))
	c.put(named("slow", "1"))
	<-inIndex
	asked := make(chan struct{})
	relisted := make(chan struct{})
	go func() {
		defer close(relisted)
		r.panics.relisting(func(key string) bool { close(asked); return r.inCache(key) })
	}()
	<-asked
	close(goOn)
	<-relisted // a deadlock ends the test by its time-out
}

func TestListsAfterAPanicGoOnThoughWatchesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &refusal{}
		c := newCluster(named("bad", "1"))
		f := newTestFactory(t, c, Need{For: "bad", Resource: Secrets, Digest: func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) }})
		startSynced(t, f)
		defer f.Shutdown()
		goOn := func(minutes int) {
			for i := range minutes {
				if i%7 == 6 {
					c.breakWatches(false) // reflectors end a watch after 5 to 10 minutes
				}
				c.bookmark()
				pass(time.Minute)
			}
		}
		goOn(12 * 60)
		if n := secretsStatus(f).Lists; n < 12 || n > 25 {
			t.Errorf("%d lists in 12 hours", n)
		}
		r.mended = true
		goOn(2 * 60)
		if err := f.Problem("bad"); err != nil {
			t.Errorf("after the mend: %v", err)
		}
	})
}

func TestHandlersThatPanicAreNoReasonToListAndTakeNoPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &refusal{}
		c := newCluster()
		for i := range maxPanicking {
			c.put(named(fmt.Sprint("h", i), "1"))
		}
		f := newTestFactory(t, c, Need{For: "reload", Resource: Secrets, Digest: func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) }})
		informer, _ := f.Informer("reload", Secrets)
		handler := cache.ResourceEventHandlerFuncs{AddFunc: func(any) { panic("x") }, DeleteFunc: func(any) { panic("y") }}
		if _, err := informer.AddEventHandler(handler); err != nil {
			t.Fatal(err)
		}
		startSynced(t, f)
		defer f.Shutdown()
		lists := secretsStatus(f).Lists
		for range 120 {
			c.bookmark()
			pass(time.Minute)
		}
		if n := secretsStatus(f).Lists; n != lists {
			t.Errorf("%d lists for handlers", n-lists)
		}
		c.put(named("bad", "1"))
		synctest.Wait()
		r.mended = true
		c.bookmark()
		pass(2 * time.Minute)
		if obj, _, _ := informer.GetStore().GetByKey("shop/bad"); obj.(*Object).Digest("reload") == nil {
			t.Error("no digest after the mend")
		}
		for i := range maxPanicking {
			c.remove(fmt.Sprint("shop/h", i))
		}
		c.remove("shop/bad")
		synctest.Wait()
		if err := f.Problem("reload"); err != nil {
			t.Errorf("when all objects are gone: %v", err)
		}
	})
}

// shortStream ends after some events.
type shortStream struct {
	stream
	left int
}

func (s *shortStream) next() (watch.Event, bool) {
	if s.left--; s.left < 0 {
		s.stop()
	}
	return s.stream.next()
}

func TestAnOptionalResourceThatAppearsIsListed(t *testing.T) {
	need := reloadNeed
	need.Optional = true
	absent := func(string) error { return apierrors.NewNotFound(Secrets.GroupResource(), "") }
	t.Run("so nothing is missed when its first watch breaks", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			c.failWith(absent)
			f := newTestFactory(t, c, need)
			startSynced(t, f)
			defer f.Shutdown()
			c.put(named("x", "1"))
			c.put(named("y", "1"))
			c.failWith(nil)
			pass(2 * time.Minute)
			wantNames(t, f, "shop/x", "shop/y")
			c.failWith(func(string) error { return io.ErrUnexpectedEOF })
			c.breakWatches(false)
			c.remove("shop/y")
			c.failWith(nil)
			pass(2 * time.Minute)
			wantNames(t, f, "shop/x")
		})
	})
	t.Run("also in chosen namespaces", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a, b := newCluster(), newCluster()
			a.failWith(absent)
			b.failWith(absent)
			f := newTestFactory(t, newCluster())
			cut := true
			source := a.source()
			watchOf := source.watch
			source.watch = func(ctx context.Context, o metav1.ListOptions) (stream, error) {
				w, err := watchOf(ctx, o)
				if err != nil || !cut {
					return w, err
				}
				cut = false
				return &shortStream{stream: w, left: 1}, nil
			}
			if err := f.add(mustPlan(t, need), []*scope{{source: source, namespace: "a"}, {source: b.source(), namespace: "b"}}); err != nil {
				t.Fatal(err)
			}
			startSynced(t, f)
			defer f.Shutdown()
			for _, name := range []string{"old", "middle", "first"} {
				a.put(in("a", name, "1"))
			}
			a.failWith(nil)
			b.failWith(nil)
			pass(5 * time.Minute)
			wantNames(t, f, "a/first", "a/middle", "a/old")
		})
	})
}

func TestAPageThatExpiresIsNoReasonToAskForAllAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		for i := range 4 * pageSize {
			c.put(named(fmt.Sprint("h", i), "1"))
		}
		c.noStreams = true
		source := c.source()
		list, most, expired := source.list, 0, false
		source.list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if o.Continue != "" && !expired {
				expired = true
				return nil, apierrors.NewResourceExpired("compacted")
			}
			l, err := list(ctx, o)
			if err == nil {
				most = max(most, len(l.(*corev1.SecretList).Items))
			}
			return l, err
		}
		f := newTestFactory(t, newCluster())
		if err := f.add(mustPlan(t, reloadNeed), []*scope{{source: source}}); err != nil {
			t.Fatal(err)
		}
		startSynced(t, f)
		defer f.Shutdown()
		if most != pageSize || len(names(t, f)) != 4*pageSize {
			t.Errorf("%d objects, at most %d in a page", len(names(t, f)), most)
		}
	})
}

func TestAFailureThatComesBackIsLoggedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		c.failWith(func(string) error { return forbidden })
		f := newTestFactory(t, c, reloadNeed)
		f.Start(t.Context())
		defer f.Shutdown()
		pass(5 * time.Minute)
		c.failWith(nil)
		pass(5 * time.Minute)
		if s := f.resources[0].state; s.logged != "" {
			t.Errorf("still takes %q for logged", s.logged)
		}
	})
}

func TestTheHostReportsTheFailuresOfASharedWatch(t *testing.T) {
	f := newTestFactory(t, newCluster(), reloadNeed)
	informer, _ := f.Informer("reload", Secrets)
	if informer.SetWatchErrorHandler(nil) == nil || informer.SetWatchErrorHandlerWithContext(nil) == nil {
		t.Error("a controller replaced the error handler")
	}
}

func TestTheLiveVersionOfAResourceInAnyVersion(t *testing.T) {
	server := &apiServer{secrets: newCluster(named("a", "1")), widgets: []string{"v1"}}
	f, _ := newFactory(t, serve(t, server), Need{For: "names", Resource: widgets})
	startSynced(t, f)
	// The fake server has no lists of one namespace; what counts is which path is asked.
	if _, err := f.LiveVersion(t.Context(), widgets, cache.NewObjectName("shop", "a")); err == nil {
		t.Error("the fake server answered")
	}
	if paths := server.requests(); !slices.ContainsFunc(paths, func(p string) bool { return strings.HasPrefix(p, "/apis/example.com/v1/namespaces/shop/widgets") }) {
		t.Errorf("asked %v", paths)
	}
}

func TestRelistShowsWhatARestoredStoreHolds(t *testing.T) {
	for name, before := range map[string]func(*cluster){
		"while it watches": func(*cluster) {},
		"while it opens a watch": func(c *cluster) {
			c.failWith(func(string) error { return io.ErrUnexpectedEOF })
			c.breakWatches(false)
			pass(15 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(named("a", "1"), named("b", "1"))
				f := newTestFactory(t, c, reloadNeed)
				startSynced(t, f)
				defer f.Shutdown()
				c.mu.Lock()
				delete(c.objects, "shop/b")
				c.version, c.history = 50, nil
				c.mu.Unlock()
				pass(10 * time.Minute)
				wantNames(t, f, "shop/a", "shop/b") // the watch goes on, and shows nothing
				before(c)
				f.Relist()
				c.failWith(nil)
				pass(time.Minute)
				wantNames(t, f, "shop/a")
				c.put(named("c", "1"))
				pass(time.Second)
				wantNames(t, f, "shop/a", "shop/c")
			})
		})
	}
}
