// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var reloadNeed = Need{controller: "reload", Resource: Secrets, FieldSelector: NotHelm, Annotations: []string{"match"}, Digest: DigestOf(digestSHA1), History: true}

func named(name, value string) *corev1.Secret { return in("shop", name, value) }

func in(namespace, name, value string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: map[string][]byte{"value": []byte(value)}}
}

// names returns the keys in the first cache.
func names(f *ClusterCache) (names []string) {
	for _, o := range f.informers[0].objects.list() {
		names = append(names, o.key())
	}
	return slices.Sorted(slices.Values(names))
}

// cached returns a Secret of the namespace shop in the first cache, or nil.
func cached(f *ClusterCache, name string) *Object { return f.informers[0].objects.get("shop/" + name) }

func wantNames(t *testing.T, f *ClusterCache, want ...string) {
	t.Helper()
	synctest.Wait()
	assert.Equal(t, "cached Secrets", want, names(f), cmpopts.EquateEmpty())
}

func secretsStatus(f *ClusterCache) ResourceStatus { return f.Status().Resources[0] }

// wantProblem looks for a text in the problem of a controller.
func wantProblem(t testing.TB, f *ClusterCache, controller, want string) {
	t.Helper()
	if err := f.Problem(controller); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("problem of %s: %v, want one with %q", controller, err, want)
	}
}

// startSynced waits in a synctest bubble until a cache has synced and watches.
func startSynced(t *testing.T, f *ClusterCache) {
	t.Helper()
	f.Start(t.Context())
	for _, i := range f.informers {
		<-i.lists.synced
	}
	synctest.Wait()
}

// hasSynced reports whether all informers of the controller have.
func hasSynced(f *ClusterCache, controller string) bool {
	return !slices.ContainsFunc(f.informers, func(i *informer) bool { return i.plan.need(controller) != nil && !i.hasSynced() })
}

// pass waits in a synctest bubble until d has passed and all goroutines are blocked again.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// verbs returns the verbs of the recorded requests.
func verbs(c *cluster) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var vs []string
	for _, r := range c.requests {
		vs = append(vs, strings.Fields(r)[0])
	}
	return vs
}

func (c *cluster) count() int { return len(verbs(c)) }

func TestListWithoutStreamsIsPaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		for i := range 2*pageSize + 1 {
			c.put(secret(i, 1))
		}
		c.noStreams = true
		f := newTestCache(t, c, reloadNeed)
		startSynced(t, f)
		assert.Equal(t, "objects in the cache", 2*pageSize+1, len(names(f)))
		c.breakWatches(true)
		pass(2 * time.Minute)
		for i, v := range c.requests {
			if strings.HasPrefix(v, "list") && !strings.Contains(v, "limit=250") || strings.Contains(v, "rv=0 ") {
				t.Errorf("request %d may be answered at once: %s", i, v)
			}
		}
		s := secretsStatus(f)
		assert.Equal(t, "lists, relists and failures", []int64{2, 1, 1}, []int64{s.Lists, s.Relists, s.Failures})
	})
}

func TestCacheAgeShowsASilentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		f := newTestCache(t, c, reloadNeed)
		assert.Equal(t, "age before the start", nil, secretsStatus(f).LastActivityAge)
		startSynced(t, f)
		c.put(named("b", "1"))
		pass(time.Minute)
		c.bookmark()
		pass(30 * time.Second)
		s := secretsStatus(f)
		assert.Equal(t, "age of activity", 30*time.Second, s.LastActivityAge.Duration)
		assert.Equal(t, "resourceVersion, which is the bookmark's", "103", s.ResourceVersion)
	})
}

func TestCacheNotStartedShutsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestCache(t, newCluster(), reloadNeed)
		assert.Equal(t, "ready without having been started", false, f.CheckSync(nil) == nil)
		assert.NoError(t, f.Problem("reload"))
		f.Shutdown()
		f.Start(t.Context()) // after Shutdown: nothing
		assert.Equal(t, "synced after Shutdown", false, hasSynced(f, "reload"))
	})
}

var ttlNeed = Need{controller: "ttl", Annotations: []string{"ttl"}, Fields: CreationTimestamp,
	Filter: func(m metav1.Object) bool { return m.GetAnnotations()["ttl"] != "" }}

func expiring(name, ttl string) *corev1.Secret {
	s := named(name, "1")
	s.Annotations = map[string]string{"ttl": ttl, "other": "x"}
	return s
}

// recorder records the calls of a handler.
type recorder struct {
	mu    sync.Mutex
	lines []string
}

func (r *recorder) add(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

func (r *recorder) handle(old, current *Object, _ bool) {
	switch {
	case current == nil:
		r.add("-%s", old.GetName())
	case old == nil:
		r.add("+%s=%s", current.GetName(), current.GetAnnotations()["ttl"])
	default:
		r.add("~%s=%s", current.GetName(), current.GetAnnotations()["ttl"])
	}
}

// want compares the calls since the last time, sorted: a list names its objects in no order.
func (r *recorder) want(t testing.TB, want ...string) {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.lines)
	slices.Sort(want)
	assert.Equal(t, "calls of the handler", want, r.lines, cmpopts.EquateEmpty())
	r.lines = nil
}

// followSecrets follows the Secrets of a cluster.
func followSecrets(t testing.TB, f *ClusterCache, c *cluster, need Need, lists chan struct{}, handler func(old, current *Object, initial bool)) *Following[*Object] {
	t.Helper()
	f.sourceFor = c.source
	need.Resource = Secrets
	f.listSlots = map[string]chan struct{}{need.controller: lists}
	w, err := Follow[*Object](f.ForController(need.controller), need)
	assert.NoError(t, err)
	w.AddHandler(handler)
	f.Start(context.Background()) // unless it has started
	return w
}

func TestFollowKeepsOnlyWhatIsWanted(t *testing.T) {
	for name, noStreams := range map[string]bool{"by streamed lists": false, "by paged lists": true} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(named("plain", "1"), expiring("a", "1h"), expiring("b", "1h"))
			c.noStreams = noStreams
			f, h := newTestCache(t, c), &recorder{}
			w := followSecrets(t, f, c, ttlNeed, make(chan struct{}, 1), h.handle)
			h.want(t, "+a=1h", "+b=1h")
			assert.Equal(t, "synced, and objects", []any{true, 2}, []any{w.Status().Synced, w.Status().Objects})
			c.put(named("plain", "2"))
			c.put(named("new", "1"))
			c.remove("shop/plain")
			h.want(t)
			c.put(expiring("new", "2h"))
			c.put(expiring("a", "3h"))
			c.put(named("b", "1"))
			h.want(t, "+new=2h", "~a=3h", "-b")
			c.breakWatches(true)
			c.remove("shop/a")
			c.put(named("new", "1"))
			c.put(expiring("c", "1h"))
			pass(2 * time.Minute)
			h.want(t, "+c=1h", "-a", "-new")
			if o, ok := w.Get(cache.NewObjectName("shop", "c")); !ok || len(o.GetAnnotations()) != 1 {
				t.Errorf("kept %v", o)
			}
			assert.Equal(t, "all objects", "[shop/c]", fmt.Sprint(w.List("", nil)))
			requests := c.count()
			w.Stop()
			w.AddHandler(h.handle)
			c.put(expiring("late", "1h"))
			pass(time.Hour)
			h.want(t)
			assert.Equal(t, "requests after Stop, and informers", []int{0, 0}, []int{c.count() - requests, len(f.followed)})
		})
	}
}

// bubble is the test of a row, in fake time of its own.
type bubble struct{ *testing.T }

func TestFollow(t *testing.T) {
	for name, run := range map[string]func(t bubble, f *ClusterCache, c *cluster, h *recorder){
		"it keeps the form of the need": func(t bubble, f *ClusterCache, c *cluster, h *recorder) {
			need := Need{controller: "sync", LabelSelector: "managed=true", Form: Metadata, Digest: DigestOf(func(o metav1.Object) []byte {
				return []byte(o.GetResourceVersion())
			})}
			w := followSecrets(t, f, c, need, nil, h.handle)
			h.want(t, "+a=", "+b=")
			if o, ok := w.Get(cache.NewObjectName("shop", "a")); !ok || string(o.Digest("sync")) != "101" {
				t.Errorf("kept %v", o)
			}
			_, exists := w.Get(cache.NewObjectName("shop", "c"))
			assert.Equal(t, "has what is not there, and asks by labels", []bool{false, true}, []bool{exists, strings.Contains(c.requests[0], "labels=managed=true")})
			assert.Equal(t, "form that it asks for", Metadata, w.plan.decodedAs)
		},
		"it returns the type of the need": func(t bubble, f *ClusterCache, _ *cluster, _ *recorder) {
			need := Need{Resource: Secrets, Form: Typed, Content: true, Namespace: "shop"}
			w, err := Follow[*corev1.Secret](f.ForController("sync"), need)
			assert.NoError(t, err)
			f.Start(t.Context())
			<-w.Synced()
			if s, ok := w.Get(cache.NewObjectName("shop", "a")); !ok || string(s.Data["value"]) != "1" {
				t.Errorf("kept %v", s)
			}
			assert.NoError(t, w.feeds[0].Update(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "c"}}))
			assert.Equal(t, "objects, without one of another kind", 2, len(w.List("", nil)))
			_, err = Follow[*corev1.ConfigMap](f.ForController("sync"), need)
			if err == nil || !strings.Contains(err.Error(), "asks for secrets as *v1.ConfigMap") {
				t.Errorf("error %v for another type", err)
			}
			assert.Equal(t, "number that is followed", 1, len(f.followed))
		},
		"it ends with the Run that began it": func(t bubble, f *ClusterCache, c *cluster, h *recorder) {
			followSecrets(t, f, c, ttlNeed, nil, func(_, _ *Object, _ bool) {}) // by Entry.New
			f.Start(t.Context())
			followSecrets(t, f, c, ttlNeed, nil, h.handle)
			followSecrets(t, f, c, reloadNeed, nil, func(_, _ *Object, _ bool) {}) // by another controller
			h.want(t, "+a=1h", "+b=1h")
			f.EndRun(ttlNeed.controller)
			c.put(expiring("c", "1h"))
			h.want(t)
			assert.Equal(t, "number that is followed", 2, len(f.followed))
		},
		"what Entry.New follows counts as if it were declared": func(t bubble, f *ClusterCache, c *cluster, h *recorder) {
			c.failWith(func(string) error { return syscall.ECONNREFUSED })
			w := followSecrets(t, f, c, ttlNeed, nil, h.handle)
			f.Start(t.Context())
			pass(time.Minute)
			wantProblem(t, f, ttlNeed.controller, "cannot list secrets")
			assert.Equal(t, "ready", false, f.CheckSync(nil) == nil)
			c.failWith(nil)
			pass(2 * time.Minute)
			counts := func() []any {
				sum := f.caches.sums()[seriesLabels{"", "", "secrets"}]
				return []any{sum.Synced, sum.Objects, sum.Failures}
			}
			assert.Equal(t, "counts", []any{true, 2, w.Status().Failures}, counts())
			c.failWith(func(string) error { return syscall.ECONNREFUSED })
			late := followSecrets(t, f, c, reloadNeed, nil, h.handle) // while its controller runs
			pass(time.Minute)
			assert.NoError(t, errors.Join(f.CheckSync(nil), f.Problem(reloadNeed.controller)))
			assert.Equal(t, "counts while that fails", []any{true, 2, w.Status().Failures}, counts())
			c.failWith(nil)
			pass(2 * time.Minute)
			assert.Equal(t, "counts when that works", []any{true, 4, w.Status().Failures}, counts())
			late.Stop()
			assert.Equal(t, "counts when that has ended", []any{true, 2, w.Status().Failures}, counts())
		},
		"before Start it asks for nothing, as on a cold standby": func(t bubble, f *ClusterCache, c *cluster, _ *recorder) {
			f.sourceFor = c.source
			for range 2 {
				w, err := Follow[*Object](f.ForController(ttlNeed.controller), Need{Resource: Secrets})
				assert.NoError(t, err)
				pass(time.Hour)
				assert.Equal(t, "requests", 0, c.count())
				assert.NoError(t, f.Problem(ttlNeed.controller))
				w.Stop()
			}
			f.Start(t.Context())
			pass(time.Hour)
			assert.Equal(t, "requests for what was stopped", 0, c.count())
		},
		"it may be stopped by its handler": func(t bubble, f *ClusterCache, c *cluster, _ *recorder) {
			calls, ready := 0, make(chan struct{})
			var w *Following[*Object]
			w = followSecrets(t, f, c, ttlNeed, nil, func(_, _ *Object, _ bool) {
				<-ready
				calls++
				w.Stop()
			})
			close(ready)
			c.put(expiring("c", "1h"))
			pass(time.Minute)
			f.Shutdown()
			assert.Equal(t, "calls", 1, calls)
		},
		"lists wait for each other": func(t bubble, f *ClusterCache, slow *cluster, h *recorder) {
			slow.endless = true
			quick, lists := newCluster(expiring("x", "1h")), make(chan struct{}, 1)
			followSecrets(t, f, slow, ttlNeed, lists, (&recorder{}).handle)
			synctest.Wait()
			followSecrets(t, f, quick, ttlNeed, lists, h.handle)
			pass(listSlotTimeout - time.Second)
			h.want(t)
			pass(2 * time.Second)
			h.want(t, "+x=1h")
			quick.put(expiring("y", "1h"))
			h.want(t, "+y=1h")
		},
		"it contains panics of its handler": func(t bubble, f *ClusterCache, c *cluster, h *recorder) {
			followSecrets(t, f, c, ttlNeed, make(chan struct{}, 1), func(old, current *Object, initial bool) {
				if current.GetName() == "a" {
					panic("a")
				}
				h.handle(old, current, initial)
			})
			f.Start(t.Context())
			h.want(t, "+b=1h")
			wantProblem(t, f, ttlNeed.controller, "panics on 1 objects of secrets, one of them shop/a")
			assert.NoError(t, f.Problem("other"))
		},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(expiring("a", "1h"), expiring("b", "1h"))
			run(bubble{t}, newTestCache(t, c), c, &recorder{})
		})
	}
}
