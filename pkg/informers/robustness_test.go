// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

func TestFeedRetriesRefusals(t *testing.T) {
	for name, failure := range map[string]error{
		"too many requests":  apierrors.NewTooManyRequests("later", 1),
		"internal error":     apierrors.NewInternalError(errors.New("etcd is not available")),
		"connection refused": syscall.ECONNREFUSED,
		"broken connection":  io.ErrUnexpectedEOF,
		"gone":               apierrors.NewResourceExpired("there is no API server here any more"),
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(named("a", "1"))
			f := newTestCache(t, c, reloadNeed)
			startSynced(t, f)
			pass(time.Minute) // the reflector lists again after a watch of less than a second
			before := c.count()
			c.failWith(func(string) error { return failure })
			c.breakWatches(false)
			pass(30 * time.Second)
			assert.NoError(t, f.Problem("reload"))
			pass(10 * time.Minute)
			wantNames(t, f, "shop/a")
			if n := c.count() - before; n < 10 || n > 80 {
				t.Errorf("%d requests in ten minutes", n)
			}
			wantProblem(t, f, "reload", "secrets")
			assert.NoError(t, f.CheckSync(nil))
			assert.Equal(t, "something was logged", true, f.informers[0].feeds[0].state.logged != "")
			s := secretsStatus(f)
			if s.LastActivityAge.Duration < 10*time.Minute || s.Failures == 0 || s.LastFailure == nil {
				t.Errorf("age %v, failures %d, last failure %v", s.LastActivityAge, s.Failures, s.LastFailure)
			}
			c.failWith(nil)
			c.put(named("b", "1"))
			pass(2 * time.Minute)
			wantNames(t, f, "shop/a", "shop/b")
			assert.NoError(t, f.Problem("reload"))
			c.failWith(func(string) error { return failure })
			c.breakWatches(true)
			pass(5 * time.Minute)
			start := time.Now()
			f.Shutdown()
			assert.Equal(t, "Shutdown took", 0, time.Since(start))
		})
	}
}

func TestFailureIsLoggedOncePerReason(t *testing.T) {
	var logged []string
	s := newState("secrets", funcr.New(func(_, args string) { logged = append(logged, args) }, funcr.Options{}))
	for _, err := range []error{
		fmt.Errorf("port 1: %w", syscall.ECONNREFUSED), fmt.Errorf("port 2: %w", syscall.ECONNREFUSED), errors.New("x509"), forbidden, forbidden,
	} {
		s.recordFailure("watch", err)
		s.logFailure(err)
	}
	if len(logged) != 3 || !strings.Contains(logged[0], "port 1") || !strings.Contains(logged[1], "x509") {
		t.Errorf("logged %q", logged)
	}
	s.recordWatch()
	s.recordLasting()
	s.logFailure(forbidden)
	assert.Equal(t, "lines after it worked again", 5, len(logged))
}

func TestServerThatIsTooBusyToStreamIsNotAskedForPages(t *testing.T) {
	subtest.InBubble(t, "429", func(t *testing.T) {
		c := newCluster(named("a", "1"))
		c.failWith(func(string) error { return apierrors.NewTooManyRequests("later", 1) })
		f := newTestCache(t, c, reloadNeed)
		f.Start(t.Context())
		pass(10 * time.Minute)
		paged := slices.Contains(verbs(c), "list")
		if n := c.count(); paged || n < 10 || n > 40 {
			t.Errorf("%d requests in ten minutes, with pages: %t", n, paged)
		}
		wantProblem(t, f, "reload", "TooManyRequests")
		c.failWith(nil)
		pass(time.Minute)
		wantNames(t, f, "shop/a")
		assert.NoError(t, f.Problem("reload"))
	})
}

func TestEndingWatchBacksOff(t *testing.T) {
	expired := watch.Event{Type: watch.Error, Object: &apierrors.NewResourceExpired("too old resource version").ErrStatus}
	changed := watch.Event{Type: watch.Modified, Object: in("shop", "a", "2")}
	for name, tc := range map[string]struct {
		noStreams, endless, slow bool
		last                     watch.Event
	}{
		"with an error, by streamed lists": {last: expired},
		"with an error, by paged lists":    {last: expired, noStreams: true},
		"with an event, by streamed lists": {last: changed},
		"with an event, by paged lists":    {last: changed, noStreams: true},
		"with an event, by slow streams":   {last: changed, slow: true},
		"in the middle of a streamed list": {last: changed, endless: true},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(named("a", "1"))
			c.noStreams, c.endless, c.slow, c.last = tc.noStreams, tc.endless, tc.slow, tc.last
			f := newTestCache(t, c, reloadNeed)
			f.Start(t.Context())
			pass(10 * time.Minute)
			if n := secretsStatus(f).Lists; n < 10 || n > 30 {
				t.Errorf("%d lists in ten minutes", n)
			}
			wantProblem(t, f, "reload", "cannot watch secrets: no usable answer")
			c.mu.Lock()
			c.endless, c.slow, c.last = false, false, watch.Event{}
			c.mu.Unlock()
			pass(3 * time.Minute)
			lists := secretsStatus(f).Lists
			c.breakWatches(true) // that is a list, at once
			pass(2 * time.Second)
			assert.Equal(t, "lists, one after a watch that could not be resumed", lists+1, secretsStatus(f).Lists)
			pass(time.Minute)
			assert.NoError(t, f.Problem("reload"))
		})
	}
}

func TestPagesTooSlowAreAskedForAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.noStreams, c.slow = true, true
		for n := range pageSize + 1 {
			c.put(named(strconv.Itoa(n), "1"))
		}
		f := newTestCache(t, c, reloadNeed)
		f.Start(t.Context())
		pass(time.Minute)
		s := secretsStatus(f)
		assert.Equal(t, "objects, lists and failures", []int64{pageSize + 1, 1, 0}, []int64{int64(s.Objects), s.Lists, s.Failures})
	})
}

func TestStreamedListThatBreaksIsStreamedOnceMore(t *testing.T) {
	for breaks, want := range map[int][]string{1: {"watch", "watch"}, 2: {"watch", "watch", "list", "watch"}} {
		subtest.InBubble(t, fmt.Sprint(breaks), func(t *testing.T) {
			c := newCluster(named("a", "1"))
			c.endless = true
			f := newTestCache(t, c, reloadNeed)
			f.Start(t.Context())
			for range breaks {
				pass(10 * time.Second)
				c.endless = breaks > 1 // the others wait
				c.breakWatches(false)
			}
			pass(5 * time.Minute)
			wantNames(t, f, "shop/a")
			assert.Equal(t, "requests", want, verbs(c))
		})
	}
}

// twoResources builds a cache with the Secrets of one cluster for reload, and ConfigMaps from another one.
func twoResources(t *testing.T, c, other *cluster) *ClusterCache {
	t.Helper()
	return newTestCacheWith(t, CacheConfig{}, func(p *plan, namespace string) (source, error) {
		if p.resource == Secrets {
			return c.source(p, namespace)
		}
		return other.source(p, namespace)
	}, reloadNeed, Need{controller: "other", Resource: ConfigMaps})
}

var forbidden = apierrors.NewForbidden(Secrets.GroupResource(), "", errors.New("no"))

func TestPermissionMissingConcernsItsController(t *testing.T) {
	for name, tc := range map[string]struct {
		verbs  []string // that are forbidden
		want   string
		synced bool
	}{
		"list and watch": {[]string{"list", "watch"}, "cannot list secrets: Forbidden\ncannot watch secrets: Forbidden", false},
		"watch":          {[]string{"watch"}, "cannot watch secrets: Forbidden", true},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(named("a", "1"))
			c.failWith(func(verb string) error {
				if slices.Contains(tc.verbs, verb) {
					return forbidden
				}
				return nil
			})
			f := twoResources(t, c, newCluster())
			f.Start(t.Context())
			pass(3 * time.Minute)
			assert.NoError(t, f.Problem("other"))
			assert.Equal(t, "problem", tc.want, fmt.Sprint(f.Problem("reload")))
			assert.Equal(t, "synced", tc.synced, hasSynced(f, "reload"))
			assert.NoError(t, f.CheckSync(nil))
			c.failWith(nil)
			pass(3 * time.Minute)
			assert.NoError(t, f.Problem("reload"))
			assert.Equal(t, "failure that counts as logged after the permission was granted", "", f.informers[0].feeds[0].state.logged)
		})
	}
}

// TestCacheKeepsItsObjectsWhenRequestsFail has requests that fail after the cache has synced, although
// discovery finds the resource.
func TestCacheKeepsItsObjectsWhenRequestsFail(t *testing.T) {
	conversion := apierrors.NewInternalError(errors.New("the conversion webhook failed"))
	for name, tc := range map[string]struct {
		failure         error
		optional, comes bool // it was absent at the start
		after           time.Duration
		problem         string
	}{
		"a permission is withdrawn, which is reported at once":         {forbidden, false, false, failingAfter / 2, "cannot watch secrets: Forbidden"},
		"a required resource is absent":                                {notFound, false, false, 5 * time.Minute, "cannot list secrets: NotFound"},
		"an optional resource goes, of which there is another version": {notFound, true, false, 5 * time.Minute, "cannot list secrets: NotFound"},
		"an optional resource comes, for which a role is missing":      {forbidden, true, true, 5 * time.Minute, "cannot list secrets: Forbidden"},
		"an optional resource comes, whose conversion fails":           {conversion, true, true, 5 * time.Minute, "cannot list secrets: InternalError"},
		"an optional resource comes in another version":                {notFound, true, true, 5 * time.Minute, "cannot list secrets: NotFound"},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c, need, want := newCluster(named("a", "1")), reloadNeed, []string{"shop/a"}
			need.Optional = tc.optional
			if tc.comes {
				c.failWith(func(string) error { return notFound })
				want = nil
			}
			f := newTestCache(t, c, need)
			startSynced(t, f)
			assert.Equal(t, "absent at the start", tc.comes, secretsStatus(f).Absent)
			feed := f.informers[0].feeds[0]
			feed.discover = func(context.Context) error { return nil }
			c.failWith(func(string) error { return tc.failure })
			c.breakWatches(false)
			pass(tc.after)
			wantNames(t, f, want...)
			wantProblem(t, f, "reload", tc.problem)
			assert.NoError(t, f.CheckSync(nil))
			assert.Equal(t, "it is absent, and the failure was logged", []bool{false, true}, []bool{secretsStatus(f).Absent, feed.state.logged != ""})
		})
	}
}

// TestOptionalResourceThatExistsIsWaitedFor has a resource that discovery knows before it can be listed, as
// while it is being defined, or is served in another version only.
func TestOptionalResourceThatExistsIsWaitedFor(t *testing.T) {
	for name, defined := range map[string]time.Duration{"until it is listed a moment later": time.Second, "until it is listed an hour later": time.Hour} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c, start, need := newCluster(named("a", "1")), time.Now(), reloadNeed
			c.failWith(func(string) error {
				if time.Since(start) < defined {
					return notFound
				}
				return nil
			})
			need.Optional = true
			f := newTestCache(t, c, need)
			f.informers[0].feeds[0].discover = func(context.Context) error { return nil }
			startSynced(t, f)
			wantNames(t, f, "shop/a")
		})
	}
}

func TestReadinessWaitsUnlessRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		failure error
		want    bool
	}{
		"a resource that may not be read is not waited for":  {forbidden, true},
		"a resource that does not exist is not waited for":   {notFound, true},
		"a server that does not know who asks is waited for": {apierrors.NewUnauthorized("who"), false},
		"a server that is away is waited for":                {syscall.ECONNREFUSED, false},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			c := newCluster(named("a", "1"))
			c.failWith(func(string) error { return tc.failure })
			f := newTestCache(t, c, reloadNeed)
			f.Start(t.Context())
			pass(time.Minute)
			assert.Equal(t, "ready", tc.want, f.CheckSync(nil) == nil)
			wantProblem(t, f, "reload", "secrets")
			c.failWith(nil)
			pass(3 * time.Minute)
			assert.NoError(t, f.CheckSync(nil))
			assert.Equal(t, "synced after it works again", true, hasSynced(f, "reload"))
		})
	}
}

func TestReadinessIgnoresOneFailingResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, healthy := newCluster(named("a", "1")), newCluster()
		fail := func(string) error { return apierrors.NewInternalError(errors.New("its conversion webhook failed")) }
		c.failWith(fail)
		healthy.failWith(fail)
		f := twoResources(t, c, healthy)
		f.Start(t.Context())
		pass(10 * time.Minute)
		assert.Equal(t, "ready although nothing can be listed", false, f.CheckSync(nil) == nil)
		healthy.failWith(nil)
		pass(2 * time.Minute)
		assert.NoError(t, f.CheckSync(nil))
		wantProblem(t, f, "reload", "secrets")
		assert.NoError(t, f.Problem("other"))
	})
}

func TestReadinessWaitsFiveMinutesForAListThatHangs(t *testing.T) {
	for name, bothHang := range map[string]bool{"beside another one": false, "but not if no other list is read": true} {
		subtest.InBubble(t, name, func(t *testing.T) {
			hanging, other := newCluster(), newCluster()
			hanging.endless, other.endless = true, bothHang
			f := twoResources(t, hanging, other)
			f.Start(t.Context())
			for range 14 {
				pass(maxFirstList / 15)
				hanging.put(named("a", "1")) // otherwise the list is read in pages
				other.put(named("a", "1"))
			}
			assert.Equal(t, "ready", false, f.CheckSync(nil) == nil)
			pass(maxFirstList / 15)
			assert.Equal(t, "ready after five minutes", !bothHang, f.CheckSync(nil) == nil)
			wantProblem(t, f, "reload", "secrets")
		})
	}
}

func TestFailuresAreAProblemInTime(t *testing.T) {
	slow := apierrors.NewTimeoutError("slow", 1)
	for name, tc := range map[string]struct {
		err     error
		after   time.Duration
		absent  bool
		problem bool
	}{
		"a time-out is no problem within the first minute": {err: slow, after: failingAfter - 1},
		"a time-out is a problem after a minute":           {err: slow, after: failingAfter, problem: true},
		"a 401 is a problem at once":                       {err: apierrors.NewUnauthorized("revoked"), problem: true},
		"a 403 is a problem at once":                       {err: apierrors.NewForbidden(schema.GroupResource{}, "", nil), problem: true},
		"a resource that no server has is no problem":      {err: slow, after: time.Hour, absent: true},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			s := newState("secrets", klog.Background())
			s.recordList("1")
			if tc.absent {
				s.markAbsent()
			}
			s.recordFailure("list", tc.err)
			pass(tc.after)
			assert.Equal(t, "it is a problem", tc.problem, s.problem() != nil)
			if tc.absent {
				s.recordFailure("list", notFound)
				assert.Equal(t, "failures, without the answer that it is absent", int64(1), s.status().Failures)
			}
		})
	}
}
