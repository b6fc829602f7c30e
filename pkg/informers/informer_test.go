// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

// newFeed returns an informer, and its only feed, without a source.
func newFeed(t *testing.T, needs ...Need) (*informer, *feed) {
	t.Helper()
	i := newInformer(mustPlan(t, needs...), klog.Background(), func(string) {})
	f := &feed{informer: i, state: newState("objects", klog.Background())}
	i.feeds = []*feed{f}
	return i, f
}

func TestObjectKnowsWhenItsDigestChanged(t *testing.T) {
	type step struct {
		version, uid, value string
		listed              bool // it comes by a list, not by a watch
		first, changed      string
		created             bool // by a watch, at first
	}
	for name, steps := range map[string][]step{
		"one that came has not changed":  {{version: "5", uid: "a", value: "1", created: true, first: "5"}},
		"one of a list was there before": {{version: "5", uid: "a", value: "1", listed: true, first: "5"}},
		"a later change of something else leaves the version of the data": {
			{version: "5", uid: "a", value: "1", created: true, first: "5"},
			{version: "7", uid: "a", value: "2", created: true, first: "5", changed: "7"},
			{version: "9", uid: "a", value: "2", created: true, first: "5", changed: "7"},
		},
		"a change that a list shows":        {{version: "5", uid: "a", value: "1", created: true, first: "5"}, {version: "7", uid: "a", value: "2", listed: true, created: true, first: "5", changed: "7"}},
		"another object of the name is new": {{version: "5", uid: "a", value: "1", created: true, first: "5"}, {version: "7", uid: "b", value: "2", listed: true, first: "7"}},
		"data that come or go are no change, and hide what was before": {
			{version: "4", uid: "a", value: "1", created: true, first: "4"},
			{version: "5", uid: "a", first: "4"},
			{version: "7", uid: "a", value: "2", first: "4"},
			{version: "9", uid: "a", value: "3", first: "4", changed: "9"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			i, f := newFeed(t, Need{controller: "a", Resource: Secrets, History: true, Digest: DigestOf(func(s *corev1.Secret) []byte {
				return s.Data["value"]
			})}, Need{controller: "b", Resource: Secrets, Digest: DigestOf(func(s *corev1.Secret) []byte {
				return []byte(s.ResourceVersion) // always another one
			})})
			for _, s := range steps {
				obj := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db", UID: types.UID(s.uid), ResourceVersion: s.version},
					Data: map[string][]byte{"value": []byte(s.value)}}
				put := f.Add
				if s.listed {
					put = func(obj any) error { return f.Replace([]any{obj}, "9") }
				}
				err := put(obj)
				o := i.objects.get("shop/db")
				if err != nil || o.FirstVersion() != s.first || o.ChangedVersion() != s.changed || (o.CreatedVersion() != "") != s.created {
					t.Errorf("version %s came at %q, was created at %q, changed at %q: want %+v", s.version, o.FirstVersion(), o.CreatedVersion(), o.ChangedVersion(), s)
				}
			}
		})
	}
}

func TestFirstVersionIsUnknownUnderASelector(t *testing.T) {
	db := func(version string, annotations map[string]string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db", UID: "a", ResourceVersion: version, Annotations: annotations}}
	}
	annotated := func(m metav1.Object) bool { return len(m.GetAnnotations()) > 0 }
	for name, tc := range map[string]struct {
		need   Need
		before *corev1.Secret // an earlier state
		want   string
	}{
		"a need of all objects":               {Need{}, nil, "7"},
		"all but Helm's":                      {Need{FieldSelector: NotHelm}, nil, "7"},
		"a need of one namespace":             {Need{Namespace: "shop"}, nil, "7"},
		"by labels":                           {Need{LabelSelector: "app=x"}, nil, ""},
		"by fields":                           {Need{FieldSelector: "metadata.name=db"}, nil, ""},
		"by a Filter":                         {Need{Filter: annotated}, nil, "7"},
		"by a Filter, only after it was made": {Need{Filter: annotated}, db("5", nil), ""},
	} {
		t.Run(name, func(t *testing.T) {
			need := tc.need
			need.controller, need.Resource = "a", Secrets
			i, f := newFeed(t, need)
			put := f.Add
			if tc.before != nil {
				assert.NoError(t, f.Add(tc.before))
				put = f.Update
			}
			assert.NoError(t, put(db("7", map[string]string{"k": "v"})))
			assert.Equal(t, "created at", tc.want, i.objects.get("shop/db").CreatedVersion())
		})
	}
}

func TestListenerHearsEverythingInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		f := newTestCache(t, c, reloadNeed)
		h, slow, removed, block := &recorder{}, &recorder{}, &recorder{}, make(chan struct{})
		remove := For[*Object](f.ForController("reload"), Secrets).AddHandler(removed.handle)
		For[*Object](f.ForController("reload"), Secrets).AddHandler(func(old, current *Object, initial bool) { <-block; slow.handle(old, current, initial) })
		For[*Object](f.ForController("reload"), Secrets).AddHandler(func(old, current *Object, initial bool) {
			h.handle(old, current, initial)
			if initial {
				h.add("initial")
			}
		})
		startSynced(t, f)
		remove()
		c.put(named("b", "1"))
		c.put(named("b", "2"))
		c.remove("shop/a")
		c.remove("shop/b")
		synctest.Wait()
		c.breakWatches(true) // b comes and goes unseen, c is found by the relist
		c.put(named("c", "1"))
		pass(time.Minute)
		c.mu.Lock()
		c.objects["shop/c"].UID = "of another cluster"
		c.mu.Unlock()
		c.breakWatches(true)
		pass(time.Minute)
		c.breakWatches(true)
		c.remove("shop/c")
		pass(time.Minute)
		want := []string{"+a=", "initial", "+b=", "~b=", "-a", "-b", "+c=", "~c=", "-c"}
		assert.Equal(t, "calls of the other one", want, h.lines)
		assert.Equal(t, "calls of the slow one at first", nil, slow.lines)
		close(block)
		synctest.Wait()
		removed.want(t, "+a=")
		assert.Equal(t, "calls of the slow one", slices.Delete(want, 1, 2), slow.lines)
	})
}

func TestMappingIsToldOfChangesAndReplays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, r, maps := newCluster(named("a", "1"), named("b", "1")), &refusal{mended: true}, true
		f := newTestCache(t, c, Need{controller: "bad", Resource: Secrets, Digest: DigestOf(func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) })})
		told := &recorder{}
		replay, remove := For[*Object](f.ForController("bad"), Secrets).AddMapping(func(old, current *Object, replayed bool) bool {
			if told.handle(old, current, false); replayed {
				told.add("replayed")
			}
			if !maps {
				return false
			}
			r.check(current)
			return true
		})
		startSynced(t, f)
		told.want(t)
		replay(cache.NewObjectName("shop", "a"))
		replay(cache.NewObjectName("shop", "gone"))
		told.want(t, "+a=", "replayed")
		r.mended = false
		c.put(named("bad", "1"))
		synctest.Wait()
		told.want(t, "+bad=")
		r.mended, maps = true, false
		c.breakWatches(true) // the digest of bad is another now, and nothing else has changed
		pass(time.Minute)
		told.want(t, "~bad=")
		wantProblem(t, f, "bad", "shop/bad") // it has not been mapped
		remove()
		replay(cache.NewObjectName("shop", "a"))
		told.want(t)
	})
}

func TestShutdownDoesNotWaitForAFunctionThatHangs(t *testing.T) {
	for function, want := range map[string]time.Duration{"listener": 0, "filter": shutdownTimeout} {
		subtest.InBubble(t, function, func(t *testing.T) {
			block, calls, c, need := make(chan struct{}), 0, newCluster(named("a", "1"), named("b", "1")), reloadNeed
			hang := func(name string) {
				if name == function {
					<-block
				}
			}
			need.Filter = func(o metav1.Object) bool { hang(o.GetName()); return true }
			f := newTestCache(t, c, need)
			startSynced(t, f)
			For[*Object](f.ForController("reload"), Secrets).AddHandler(func(_, _ *Object, _ bool) { hang("listener"); calls++ })
			c.put(named("filter", "1"))
			synctest.Wait()
			begun := time.Now()
			f.Stop()
			assert.Equal(t, "Stop took", 0, time.Since(begun))
			f.Shutdown()
			took := time.Since(begun)
			close(block)
			if synctest.Wait(); took != want || function == "listener" && calls != 1 {
				t.Errorf("Shutdown took %v; the listener was called %d times, want once, before Shutdown", took, calls)
			}
		})
	}
}

// inNamespaces builds a cache that watches namespaces with a server each, and so with versions of
// their own.
func inNamespaces(t *testing.T, clusters map[string]*cluster) *ClusterCache {
	t.Helper()
	return newTestCacheWith(t, CacheConfig{Namespaces: slices.Collect(maps.Keys(clusters))}, func(p *plan, namespace string) (source, error) {
		return clusters[namespace].source(p, namespace)
	}, reloadNeed)
}

func TestNamespaceInTroubleDisturbsNoOther(t *testing.T) {
	refuse := func(b *cluster) { b.failWith(func(string) error { return forbidden }) }
	fail := func(b *cluster) {
		b.failWith(func(string) error { return apierrors.NewInternalError(errors.New("no key")) })
	}
	work, nothing := func(b *cluster) { b.failWith(nil) }, func(*cluster) {}
	for name, tc := range map[string]struct {
		before, later func(b *cluster)
		lacking       bool     // nothing is known of b at first
		b             []string // what the cache has of b in the end
		lists         int64    // of b
		problem       string
	}{
		"a watch is resumed":                  {nothing, func(b *cluster) { b.breakWatches(false) }, false, []string{"b/x", "b/z"}, 1, ""},
		"a watch that cannot be resumed":      {nothing, func(b *cluster) { b.breakWatches(true) }, false, []string{"b/x", "b/z"}, 2, ""},
		"a namespace that is refused later":   {nothing, func(b *cluster) { refuse(b); b.breakWatches(false) }, false, []string{"b/x", "b/y"}, 1, "cannot watch secrets in b: Forbidden"},
		"a namespace that is refused at once": {refuse, nothing, true, nil, 0, "cannot list secrets in b: Forbidden"},
		"a namespace that is granted later":   {refuse, work, true, []string{"b/x", "b/z"}, 1, ""},
		"a list that is refused, then fails":  {refuse, fail, true, nil, 0, "cannot list secrets in b: InternalError"},
		"a list that fails":                   {fail, nothing, true, nil, 0, "cannot list secrets in b: InternalError"},
		"a list that works later":             {fail, work, true, []string{"b/x", "b/z"}, 1, ""},
		"a list that hangs, and is given up":  {func(b *cluster) { b.endless = true }, nothing, true, []string{"b/x", "b/z"}, 1, ""},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			a, b, c := newCluster(in("a", "x", "1")), newCluster(in("b", "x", "1"), in("b", "y", "1")), newCluster(in("c", "x", "1"))
			for range 900 { // far ahead of a
				b.bookmark()
			}
			tc.before(b)
			refused := b.fail != nil && errors.Is(b.fail("list"), forbidden)
			f := inNamespaces(t, map[string]*cluster{"a": a, "b": b, "c": c})
			f.Start(t.Context())
			pass(firstListWait)
			assert.NoError(t, f.CheckSync(nil))
			i, late := f.informers[0], &recorder{}
			For[*Object](f.ForController("reload"), Secrets).AddHandler(func(old, current *Object, initial bool) {
				if old == nil && !initial && current.GetName() == "x" {
					late.add("%s", current.key())
				}
			})
			assert.Equal(t, "synced, and lacks a, b, and any that is not refused", []bool{true, false, tc.lacking, tc.lacking && !refused}, []bool{i.hasSynced(), i.Unlisted("a"), i.Unlisted("b"), i.Unlisted("")})
			i.bad.addMisfit(&misfit{metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "bad"}}, errors.New("no")})
			for _, s := range i.status() {
				assert.Equal(t, "misfits in "+s.Namespace, map[bool]int{true: 1}[s.Namespace == "b"], s.Misfits)
			}
			known := i.objects.get("b/x") != nil
			tc.later(b)
			a.put(in("a", "y", "1"))
			b.put(in("b", "z", "1"))
			b.remove("b/y")
			c.remove("c/x")
			pass(time.Hour)
			wantNames(t, f, append([]string{"a/x", "a/y"}, tc.b...)...)
			late.want(t, slices.DeleteFunc([]string{"b/x"}, func(string) bool { return known || tc.b == nil })...)
			lacking := tc.lacking && tc.b == nil
			assert.Equal(t, "lacks b, and any that is not refused, in the end", []bool{lacking, lacking && !refused}, []bool{i.Unlisted("b"), i.Unlisted("")})
			if a.count() > 10 { // a watch ends after 5 to 10 minutes
				t.Errorf("%d requests in a", a.count())
			}
			for _, s := range f.Status().Resources {
				if s.Namespace == "b" && (s.Lists != tc.lists || s.Objects != len(tc.b)) || s.Namespace != "b" && (s.Lists != 1 || s.Problem != "") {
					t.Errorf("status %+v", s)
				}
			}
			if got := fmt.Sprint(f.Problem("reload")); !strings.Contains(got, tc.problem) || tc.problem == "" && got != "<nil>" {
				t.Errorf("problem %v, want %q", got, tc.problem)
			}
		})
	}
}

func TestNamespaceRefusedIsWaitedForIfAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newCluster(), newCluster()
		a.failWith(func(string) error { return forbidden })
		b.failWith(func(string) error { return forbidden })
		f := inNamespaces(t, map[string]*cluster{"a": a, "b": b})
		f.Start(t.Context())
		pass(5 * time.Minute)
		assert.Equal(t, "synced without a list", false, hasSynced(f, "reload"))
		b.failWith(nil)
		pass(time.Minute + 2*refusedAfter) // the longest back-off of b, after which a is asked again
		assert.Equal(t, "synced with one", true, hasSynced(f, "reload"))
	})
}

func TestNamespaceIsWaitedForAtTheStart(t *testing.T) {
	refuse := func(times int) func(int) error {
		return func(request int) error { return map[bool]error{true: forbidden}[request <= times] }
	}
	slow := func(takes time.Duration) func(int) error {
		return func(request int) error { <-time.After(map[int]time.Duration{1: takes}[request]); return nil }
	}
	for name, tc := range map[string]struct {
		answer func(request int) error
		want   []string
		waits  time.Duration // at most
	}{
		"refused for a moment":               {refuse(2), []string{"a/x", "b/x"}, 5 * time.Second}, // a streamed list, and pages
		"refused, and still a moment later":  {refuse(1000), []string{"a/x"}, 5 * time.Second},
		"slow, until it has been read":       {slow(firstListWait * 2 / 3), []string{"a/x", "b/x"}, firstListWait * 2 / 3},
		"slow, and not for longer than this": {slow(firstListWait * 2), []string{"a/x"}, firstListWait},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			b, requests, begun := newCluster(in("b", "x", "1")), 0, time.Now()
			b.failWith(func(string) error { requests++; return tc.answer(requests) })
			f := inNamespaces(t, map[string]*cluster{"a": newCluster(in("a", "x", "1")), "b": b})
			startSynced(t, f)
			wantNames(t, f, tc.want...)
			if waited := time.Since(begun); waited > tc.waits {
				t.Errorf("waited %v", waited)
			}
			pass(10 * time.Minute) // until the list has ended
		})
	}
}

// refusal is a function of a controller that panics on the Secret "bad" until it is mended.
type refusal struct{ mended bool }

func (r *refusal) check(obj any) {
	if m, ok := obj.(metav1.Object); ok && m.GetName() == "bad" && !r.mended {
		panic("a value that nobody may see")
	}
}

func TestPanicOfAFunctionIsContained(t *testing.T) {
	r := &refusal{}
	for name, tc := range map[string]struct {
		need     Need
		register func(*ClusterCache)
	}{
		"a digest": {need: Need{Digest: DigestOf(func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) })}},
		"a Filter": {need: Need{Fields: Labels, Filter: func(obj metav1.Object) bool { r.check(obj); return true }}},
		"a mapping, whose sibling succeeds": {register: func(f *ClusterCache) {
			mine := For[metav1.Object](f.ForController("bad"), Secrets)
			replay, _ := mine.AddMapping(func(_, current metav1.Object, _ bool) bool { r.check(current); return true })
			mine.AddMapping(func(metav1.Object, metav1.Object, bool) bool { return true })
			go func() { <-mine.Synced(); replay(cache.NewObjectName("shop", "bad")) }()
		}},
		"a handler": {register: func(f *ClusterCache) {
			For[metav1.Object](f.ForController("bad"), Secrets).AddHandler(func(_, current metav1.Object, _ bool) { r.check(current) })
		}},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			r.mended = false
			need := tc.need
			need.controller, need.Resource = "bad", Secrets
			c := newCluster(named("bad", "1"), named("fine", "1"))
			f := newTestCache(t, c, need, reloadNeed)
			var counted []string
			f.informers[0].bad.countPanic = func(controller string) { counted = append(counted, controller) }
			if tc.register != nil {
				tc.register(f)
			}
			startSynced(t, f)

			wantNames(t, f, "shop/bad", "shop/fine")
			wantProblem(t, f, "bad", "shop/bad")
			assert.Equal(t, "the problem shows the value", false, strings.Contains(f.Problem("bad").Error(), "nobody"))
			assert.NoError(t, f.Problem("reload"))
			assert.Equal(t, "counted", []bool{true, false}, []bool{slices.Contains(counted, "bad"), slices.Contains(counted, "reload")})
			r.mended = true
			c.put(named("bad", "2"))
			synctest.Wait()
			assert.NoError(t, f.Problem("bad"))
		})
	}
}

func TestPanicOfARemovedHandlerIsNobodysProblem(t *testing.T) {
	subtest.InBubble(t, "removed", func(t *testing.T) {
		c := newCluster(named("bad", "1"))
		f := newTestCache(t, c, Need{controller: "bad", Resource: Secrets})
		calls := 0
		var remove func()
		remove = For[metav1.Object](f.ForController("bad"), Secrets).AddHandler(func(metav1.Object, metav1.Object, bool) {
			if calls++; calls == 2 {
				c.put(named("bad", "3"))
				remove() // while a call panics and another event is queued
			}
			panic("x")
		})
		startSynced(t, f)
		wantProblem(t, f, "bad", "shop/bad")
		c.put(named("bad", "2"))
		synctest.Wait()
		assert.NoError(t, f.Problem("bad"))
		assert.Equal(t, "calls", 2, calls)
	})
}

func TestObjectThatIsGoneIsNobodysProblem(t *testing.T) {
	check := func(obj metav1.Object) {
		if obj == nil || obj.GetName() == "bad" {
			panic("a value that nobody may see")
		}
	}
	for name, use := range map[string]func(*ClusterCache){
		"an index panics on its last state": func(f *ClusterCache) {
			For[metav1.Object](f.ForController("bad"), Secrets).AddIndex("x", func(obj metav1.Object) []string { check(obj); return nil })
		},
		"a handler panics on its deletion": func(f *ClusterCache) {
			For[metav1.Object](f.ForController("bad"), Secrets).AddHandler(func(_, current metav1.Object, _ bool) { check(current) })
		},
		"a mapping panics on its deletion": func(f *ClusterCache) {
			mine := For[metav1.Object](f.ForController("bad"), Secrets)
			replay, _ := mine.AddMapping(func(_, current metav1.Object, _ bool) bool { check(current); return true })
			go func() { <-mine.Synced(); replay(cache.NewObjectName("shop", "bad")) }()
		},
	} {
		for how, relist := range map[string]bool{"by an event": false, "by a list": true} {
			subtest.InBubble(t, name+" "+how, func(t *testing.T) {
				c := newCluster(named("bad", "1"), named("fine", "1"))
				f := newTestCache(t, c, Need{controller: "bad", Resource: Secrets})
				use(f)
				startSynced(t, f)
				wantProblem(t, f, "bad", "shop/bad")
				if relist {
					c.breakWatches(true)
				}
				c.remove("shop/bad")
				pass(time.Minute)
				wantNames(t, f, "shop/fine")
				assert.NoError(t, f.Problem("bad"))
			})
		}
	}
}

func TestMisfitsFillNoLogAndSilenceNoPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var misfits, panicked, size int
		p := newBadObjects("secrets", funcr.New(func(_, line string) {
			misfits += strings.Count(line, "An object does not fit")
			panicked += strings.Count(line, "A function of a controller panicked")
			size += len(line)
		}, funcr.Options{}), func(string) {})
		for n := range maxBad + 1 {
			p.addMisfit(&misfit{metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(n)}}, errors.New(strings.Repeat("x", 64<<10))})
		}
		p.contain("reload", "Digest", named("a", "1"), func() { panic("x") })
		assert.Equal(t, "lines of misfits and of panics, and misfits", []int{misfitsAtOnce, 1, maxBad + 1}, []int{misfits, panicked, p.countMisfits(func(string) bool { return true })})
		assert.Equal(t, "KiB for each line at most", 0, size/misfitsAtOnce>>10)
	})
}

func TestFunctionThatHangsIsAProblem(t *testing.T) {
	for function, othersProblem := range map[string]string{"Digest": "Digest of reload has not returned for shop/a of secrets for 1m0s", "event mapping 1": "<nil>"} {
		synctest.Test(t, func(t *testing.T) {
			p, goOn := newBadObjects("secrets", klog.Background(), func(string) {}), make(chan struct{})
			go p.contain("reload", function, named("a", "1"), func() { <-goOn })
			pass(stuckCall)
			assert.Equal(t, "problem", function+" of reload has not returned for shop/a of secrets for 1m0s", fmt.Sprint(p.problem("reload")))
			assert.Equal(t, "problem of another controller", othersProblem, fmt.Sprint(p.problem("other")))
			close(goOn)
			pass(0)
			assert.NoError(t, p.problem("reload"))
		})
	}
}

func TestDigestThatPanicsKeepsTheLastDigest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &refusal{mended: true}
		c := newCluster(named("bad", "1"))
		f := newTestCache(t, c, Need{controller: "bad", Resource: Secrets, Digest: DigestOf(func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) })})
		startSynced(t, f)
		r.mended = false
		c.put(named("bad", "2"))
		synctest.Wait()
		if got := cached(f, "bad"); got.GetResourceVersion() != "102" || !slices.Equal(got.Digest("bad"), digestSHA1(named("bad", "1"))) {
			t.Errorf("version %s, digest %x", got.GetResourceVersion(), got.Digest("bad"))
		}
		successor := named("bad", "3")
		successor.UID = "another"
		c.put(successor)
		synctest.Wait()
		assert.Equal(t, "digest of the successor", nil, cached(f, "bad").Digest("bad"))
		c.breakWatches(true) // gone without an event
		c.remove("shop/bad")
		pass(time.Minute)
		assert.NoError(t, f.Problem("bad"))
	})
}

func TestMisfitIsLeftOutAndCounted(t *testing.T) {
	undecodable := func(m metav1.ObjectMeta) any {
		return &misfit{PartialObjectMetadata: metav1.PartialObjectMetadata{ObjectMeta: m}, err: errors.New("parsing time")}
	}
	other := func(m metav1.ObjectMeta) any { return &corev1.Secret{ObjectMeta: m} }
	digested := Need{Digest: DigestOf(func(*appsv1.Deployment) []byte { return nil })}
	t.Run("an object that does not decode", func(t *testing.T) { testMisfit(t, Need{Form: Typed}, undecodable) })
	t.Run("an object of another kind", func(t *testing.T) { testMisfit(t, Need{Form: Typed}, other) })
	t.Run("an object of another kind than a Digest takes", func(t *testing.T) { testMisfit(t, digested, other) })
}

func testMisfit(t *testing.T, need Need, misfit func(metav1.ObjectMeta) any) {
	t.Helper()
	need.controller, need.Resource = "a", Deployments
	i, f := newFeed(t, need, Need{controller: "b", Resource: Deployments, Form: Typed})
	owner := &ClusterCache{informers: []*informer{i}, clients: readers{scheme: scheme.Scheme}}
	if need.Form == Typed {
		For[*appsv1.Deployment](owner.ForController("a"), Deployments)
	}
	bad := func(name string) any {
		return misfit(metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: "7"})
	}
	check := func(misfits int, want ...string) {
		t.Helper()
		assert.Equal(t, "cached", want, names(owner))
		assert.Equal(t, "misfits, and whether z is left out", []any{misfits, !slices.Contains(want, "shop/z")}, []any{i.bad.countMisfits(f.covers), i.LeftOut(cache.NewObjectName("shop", "z"))})
		assert.NoError(t, errors.Join(owner.Problem("a"), owner.Problem("b")))
	}
	fits := func(name string) any {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: "5"}}
	}
	_ = f.Replace([]any{fits("x"), fits("y"), bad("z")}, "1")
	check(1, "shop/x", "shop/y")
	_ = f.Update(bad("x")) // it stays as it was known last
	check(2, "shop/x", "shop/y")
	_ = f.Replace([]any{bad("x"), fits("y"), bad("z")}, "9")
	check(2, "shop/x", "shop/y")
	_ = f.Update(fits("z"))
	check(1, "shop/x", "shop/y", "shop/z")
	known := false
	i.objects.addIndex("known", func(o *Object) []string {
		known = known || o.GetName() == "y" && i.bad.isMisfit(o.objectName())
		return nil
	})
	again := misfit(metav1.ObjectMeta{Namespace: "shop", Name: "y", UID: "another"})
	_ = f.Replace([]any{bad("x"), again, fits("z")}, "11") // y was deleted and created between two lists
	check(2, "shop/x", "shop/z")
	assert.Equal(t, "y is a misfit when its predecessor goes", true, known)
	_ = f.Delete(bad("x"))
	check(1, "shop/z")
}
