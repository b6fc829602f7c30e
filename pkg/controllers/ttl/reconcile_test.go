// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

const (
	getP    = "get pods/shop/p"
	deleteP = "delete pods/shop/p"
)

// notLeading is what the fence returns.
type notLeading struct{ error }

func (notLeading) NotLeading() bool { return true }

// TestReconcile has the rows of the specification, with their numbers, that are about more than one
// decision. Package policy has the others.
func TestReconcile(t *testing.T) {
	forbidden := apierrors.NewForbidden(pods.GroupResource(), "p", errors.New("by nobody"))
	for name, test := range map[string]struct {
		configure func(*Config)
		run       func(w *world)
	}{
		"1: what is due is deleted with its UID and version": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP, deleteP)
			w.told("DeletedExpiredTTL")
			w.metric("# HELP quartermaster_ttl_deletions_total [ALPHA] Expired objects by type and result (deleted, dry_run, failed).\n"+
				"# TYPE quartermaster_ttl_deletions_total counter\n"+
				`quartermaster_ttl_deletions_total{group="",resource="pods",result="deleted"} 1`+"\n", "quartermaster_ttl_deletions_total")
		}},
		"2: what is due in days is looked at every hour, without a request": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3d")
			w.start()
			pass(70*time.Hour - time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"8: an invalid value is told once": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "-5m")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "-5m")
			pass(24 * time.Hour)
			w.asked()
			w.told("InvalidTTL")
			w.put(pods, "shop/p", T+"ttl", "-6m")
			w.told("InvalidTTL")
		}},
		"17: an annotation that is added counts": {run: func(w *world) {
			w.put(pods, "shop/p")
			w.start()
			w.asked()
			w.metric("# HELP quartermaster_ttl_tracked_objects [ALPHA] Annotated objects.\n"+
				"# TYPE quartermaster_ttl_tracked_objects gauge\nquartermaster_ttl_tracked_objects 0\n", "quartermaster_ttl_tracked_objects")
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.asked(getP, deleteP)
		}},
		"18: the live object is due later": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			w.store(pods, "shop/p", T+"ttl", "1w")
			pass(time.Hour)
			w.asked(getP)
			pass(24 * time.Hour) // the timer is from the new value, but the record still has the old one
			w.mu.Lock()
			n := len(w.requests)
			w.mu.Unlock()
			if n != 24 || len(w.names()) != 1 {
				w.Errorf("%d requests, %v left", n, w.names())
			}
			w.told()
		}},
		"18: the live object has no TTL any more": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			w.store(pods, "shop/p")
			pass(3 * time.Hour)
			w.asked(getP)
		}},
		"19: another object of that name": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			w.mu.Lock()
			clear(w.stored)
			w.mu.Unlock()
			w.store(pods, "shop/p", T+"ttl", "0")
			pass(3 * time.Hour)
			w.asked(getP)
		}},
		"20: a status that changes in between": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			changed := false
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" && !changed {
					changed = true
					w.store(pods, "shop/p", T+"ttl", "1h")
				}
				return nil
			}
			w.start()
			pass(minConflict)
			w.asked(getP, deleteP, getP, deleteP)
			w.told("DeletedExpiredTTL")
		}},
		"20: a status that never rests": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					w.store(pods, "shop/p", T+"ttl", "1h")
				}
				return nil
			}
			w.start()
			pass(700 * time.Millisecond) // at once, and after 0.1, 0.2 and 0.4 s more
			w.asked(getP, deleteP, getP, deleteP, getP, deleteP, getP, deleteP)
			w.told("FailedToDeleteExpiredTTL")
			pass(24 * time.Hour)
			if n := len(w.requests); n < 2*24*60 || n > 2*(24*60+15) {
				w.Errorf("%d requests in a day", n)
			}
			w.change(func() { w.before = nil })
			pass(time.Minute)
			if len(w.names()) != 0 {
				w.Error("it is left a minute after the last conflict")
			}
		}},
		"20: the TTL is prolonged in between": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					w.store(pods, "shop/p", T+"ttl", "1w")
				}
				return nil
			}
			w.start()
			pass(minConflict)
			w.asked(getP, deleteP, getP)
			w.told()
		}},
		"31: the breaker": {run: func(w *world) {
			for i := range 150 {
				w.put(pods, fmt.Sprintf("shop/p%d", i), T+"ttl", "1h")
			}
			w.start()
			left := func(want int) {
				w.Helper()
				synctest.Wait()
				if n := len(w.names()); n != want {
					w.Errorf("%d are left, want %d", n, want)
				}
			}
			left(90)
			w.metric(`# HELP quartermaster_ttl_breaker_open [ALPHA] 1 while nothing at all is deleted, because too many objects were due.
				# TYPE quartermaster_ttl_breaker_open gauge
				quartermaster_ttl_breaker_open 0
				# HELP quartermaster_ttl_overdue_objects [ALPHA] Objects whose deadline has passed.
				# TYPE quartermaster_ttl_overdue_objects gauge
				quartermaster_ttl_overdue_objects 90
				# HELP quartermaster_ttl_stopped_namespaces [ALPHA] Namespaces in which nothing is deleted, because too many of their objects were due.
				# TYPE quartermaster_ttl_stopped_namespaces gauge
				quartermaster_ttl_stopped_namespaces 1
				# HELP quartermaster_ttl_tracked_objects [ALPHA] Annotated objects.
				# TYPE quartermaster_ttl_tracked_objects gauge
				quartermaster_ttl_tracked_objects 90
				# HELP quartermaster_ttl_watched_types [ALPHA] Types whose objects are known.
				# TYPE quartermaster_ttl_watched_types gauge
				quartermaster_ttl_watched_types 2
			`, "quartermaster_ttl_breaker_open", "quartermaster_ttl_stopped_namespaces", "quartermaster_ttl_overdue_objects", "quartermaster_ttl_tracked_objects", "quartermaster_ttl_watched_types")
			pass(5*time.Minute - time.Second)
			left(90)
			pass(2 * time.Second) // they come spread over 10 s
			if n := len(w.names()); n < 40 {
				w.Errorf("%d are left within a second of the breaker's closing", n)
			}
			pass(9 * time.Second)
			left(30)
			pass(4 * time.Minute)
			left(30)
			pass(80 * time.Second)
			left(0)
			trips := 0
			for len(w.recorder.Events) > 0 {
				if strings.Contains(<-w.recorder.Events, reasonBreaker) {
					trips++
				}
			}
			if trips != 2 {
				w.Errorf("%d Events of the breaker", trips)
			}
		}},
		"32: a dry run": {configure: func(c *Config) { c.DryRun = true }, run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "1h")
			pass(24 * time.Hour)
			w.asked(getP)
			w.told("WouldDeleteExpiredTTL")
			w.put(pods, "shop/p", T+"ttl", "2h")
			w.told("WouldDeleteExpiredTTL")
			if len(w.names()) != 1 {
				w.Error("deleted")
			}
		}},
		"32: a dry run, and a timer of the TTL before": {configure: func(c *Config) { c.DryRun = true }, run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "5h")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.told("WouldDeleteExpiredTTL")
			pass(24 * time.Hour)
			w.asked(getP, getP)
			w.told()
		}},
		"33: overdue for days": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			pass(72 * time.Hour)
			w.start()
			w.asked(getP, deleteP)
		}},
		"34: the clocks are apart": {run: func(w *world) {
			w.skew = -2 * time.Hour
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.put(pods, "shop/q", T+"ttl", "1h")
			w.cfg.Workers = 1
			w.start()
			synctest.Wait()
			if len(w.requests) != 1 {
				w.Errorf("requests %q", w.requests)
			}
			w.metric("# HELP quartermaster_ttl_clock_skew_seconds [ALPHA] How far the clock was ahead of the API server's at the last deletion.\n"+
				"# TYPE quartermaster_ttl_clock_skew_seconds gauge\nquartermaster_ttl_clock_skew_seconds 7199.5\n", "quartermaster_ttl_clock_skew_seconds")
			pass(time.Hour)
			if len(w.names()) != 2 {
				w.Error("deleted")
			}
			w.told()
			w.change(func() { w.skew = 30 * time.Second })
			pass(2 * time.Minute)
			if len(w.names()) != 0 {
				w.Errorf("left: %v", w.names())
			}
		}},
		"34: nobody looks at the clocks": {configure: func(c *Config) { c.MaxClockSkew = 0 }, run: func(w *world) {
			w.skew = -2 * time.Hour
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP, deleteP)
		}},
		"35: leadership is lost between the two requests": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					return fmt.Errorf("delete: %w", notLeading{errors.New("not leading")})
				}
				return nil
			}
			w.start()
			w.asked(getP, deleteP+" refused")
			w.told()
		}},
		"37: forbidden": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					return forbidden
				}
				return nil
			}
			w.start()
			w.asked(getP, deleteP+" refused")
			w.told("FailedToDeleteExpiredTTL")
			pass(5*time.Minute - time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP+" refused")
			w.told()
			pass(24 * time.Hour)
			w.toldTimes("FailedToDeleteExpiredTTL", 23, 24)
			if n := len(w.requests); n < 2*23 || n > 2*28 {
				w.Errorf("%d requests in a day", n)
			}
		}},
		"another error": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					return apierrors.NewInternalError(errors.New("webhook"))
				}
				return nil
			}
			w.start()
			pass(2 * time.Second)
			w.asked(getP, deleteP+" refused", getP, deleteP+" refused")
			w.told()
			pass(2 * time.Second)
			w.told("FailedToDeleteExpiredTTL")
			w.change(func() { w.before = nil })
			pass(5 * time.Minute)
			w.told("DeletedExpiredTTL")
		}},
		"too many requests": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
				if verb == "delete" {
					return apierrors.NewTooManyRequests("disruption budget", 30)
				}
				return nil
			}
			w.start()
			w.asked(getP, deleteP+" refused")
			w.change(func() { w.before = nil })
			pass(29 * time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"a TTL that is prolonged, and then shortened": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "9h")
			pass(2 * time.Hour)
			w.asked()
			w.put(pods, "shop/p", T+"ttl", "5h")
			pass(time.Hour - time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"an annotation that is taken away": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			w.put(pods, "shop/p")
			pass(2 * time.Hour)
			w.asked()
		}},
		"another object of that name with the same TTL": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			k := named(pods, "shop/p")
			old := w.stored[k]
			successor := old.DeepCopy()
			successor.UID, successor.CreationTimestamp = "other", metav1.NewTime(old.CreationTimestamp.Add(-time.Hour/2))
			w.change(func() { w.stored[k] = successor })
			w.followers[pods.GroupResource()][0].handler.OnUpdate(old, successor)
			pass(time.Hour/2 - time.Second)
			w.asked()
			pass(time.Second) // the timer is from its own creation
			w.asked(getP, deleteP)
		}},
		"a status that changes costs no request": {configure: func(c *Config) { c.DryRun = true }, run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP)
			w.put(pods, "shop/p", T+"ttl", "1h", "status", "other")
			w.asked()
		}},
		"a ReplicaSet that its Deployment has left behind": {run: func(w *world) {
			w.serve(replicaSets)
			owned := w.store(replicaSets, "shop/r", T+"ttl", "1h")
			w.stored[owned].OwnerReferences = []metav1.OwnerReference{{Kind: "Deployment", Controller: ptr.To(true)}}
			w.start()
			w.asked()
			w.put(replicaSets, "shop/r", T+"ttl", "1h")
			w.asked("get replicasets.apps/shop/r", "delete replicasets.apps/shop/r")
		}},
		"a type whose API does not answer, or whose webhook does not, keeps nobody else waiting": {
			configure: func(c *Config) { c.Workers = 1 }, run: func(w *world) {
				w.before = func(_ string, live *metav1.PartialObjectMetadata) error {
					if live.Namespace != "hangs" {
						return nil
					}
					<-time.After(requestTimeout)
					return &url.Error{Op: "Get", Err: context.DeadlineExceeded}
				}
				for i := range 60 {
					w.put(configMaps, fmt.Sprintf("hangs/c%d", i), T+"ttl", "1h")
				}
				w.start()
				pass(time.Second)
				w.put(pods, "shop/p", T+"ttl", "1h")
				pass(requestTimeout)
				w.told("DeletedExpiredTTL")
				w.metric("# HELP quartermaster_ttl_failing_types [ALPHA] Types that cannot be listed or watched now, or are left alone for a while.\n"+
					"# TYPE quartermaster_ttl_failing_types gauge\nquartermaster_ttl_failing_types 1\n", "quartermaster_ttl_failing_types")
				pass(time.Hour)
				// Each of them is asked for in 70 s, of which the worker is free for a minute.
				if n := len(w.requests); n < 45 || n > 60 {
					w.Errorf("%d requests in an hour", n)
				}
				w.change(func() { w.before = nil })
				pass(2 * time.Minute)
				if n := len(w.names()); n > 0 {
					w.Errorf("%d are left although their API answers", n)
				}
			}},
		"34: the clock of one type's API is wrong": {run: func(w *world) {
			w.skewed = configMaps.Resource
			w.skew = -2 * time.Hour
			w.put(configMaps, "shop/c", T+"ttl", "1h")
			w.put(configMaps, "shop/d", T+"ttl", "1h")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.told("DeletedExpiredTTL")
			pass(time.Hour)
			if left := w.names(); len(left) != 2 {
				w.Errorf("left: %v", left)
			}
			w.told()
			w.change(func() { w.skew = 0 })
			pass(2 * time.Minute)
			w.told("DeletedExpiredTTL", "DeletedExpiredTTL")
		}},
		"the clock is behind the API server's": {run: func(w *world) {
			w.skew = 2 * time.Hour
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP)
		}},
		"the deletion is under way": {run: func(w *world) {
			w.start()
			k := w.store(pods, "shop/p", T+"ttl", "1h")
			w.stored[k].DeletionTimestamp = &metav1.Time{Time: time.Now()}
			w.followers[pods.GroupResource()][0].handler.OnAdd(w.stored[k], false)
			pass(24 * time.Hour)
			w.asked()
		}},
		"somebody else deletes it": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			old := w.stored[named(pods, "shop/p")]
			terminating := old.DeepCopy()
			terminating.DeletionTimestamp = &metav1.Time{Time: time.Now()}
			w.followers[pods.GroupResource()][0].handler.OnUpdate(old, terminating)
			pass(24 * time.Hour)
			w.asked()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, test.configure)
				test.run(w)
				w.stop()
			})
		})
	}
}

// TestWhatCountsForTheBreaker has answers to a deletion, after which another object may be deleted or not.
func TestWhatCountsForTheBreaker(t *testing.T) {
	configMap := configMaps.GroupResource()
	for name, test := range map[string]struct {
		err    error
		counts bool
	}{
		"forbidden":         {err: apierrors.NewForbidden(configMap, "c", errors.New("by nobody"))},
		"not found":         {err: apierrors.NewNotFound(configMap, "c")},
		"conflict":          {err: apierrors.NewConflict(configMap, "c", errors.New("changed"))},
		"invalid":           {err: apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, "c", nil)},
		"too many requests": {err: apierrors.NewTooManyRequests("disruption budget", 30)},
		"internal error":    {err: apierrors.NewInternalError(errors.New("webhook")), counts: true},
		"timed out":         {err: apierrors.NewTimeoutError("no answer in 60s", 0), counts: true},
		"server timed out":  {err: apierrors.NewServerTimeout(configMap, "delete", 0), counts: true},
		"unavailable":       {err: apierrors.NewServiceUnavailable("proxy"), counts: true},
		"an answer is lost": {err: errors.New("connection reset"), counts: true},
		"an unknown answer": {err: apierrors.NewGenericServerResponse(599, "delete", configMap, "c", "", 0, true), counts: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, func(c *Config) { c.MaxDeletionsPerMinute = 1 })
				w.put(configMaps, "shop/c", T+"ttl", "1h")
				w.before = func(verb string, live *metav1.PartialObjectMetadata) error {
					if verb == "delete" && live.Name == "c" {
						return test.err
					}
					return nil
				}
				w.start()
				w.put(pods, "shop/p", T+"ttl", "1h")
				synctest.Wait()
				if deleted := len(w.names()) == 1; deleted == test.counts {
					t.Errorf("the other object is deleted: %t", deleted)
				}
				w.change(func() { w.before = nil })
				pass(10 * time.Minute)
				w.stop()
			})
		})
	}
}

func TestTypesComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		w.start()
		followed := func(want ...string) {
			t.Helper()
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			var got []string
			for gr, list := range w.followers {
				for range list {
					got = append(got, gr.String())
				}
			}
			if len(got) != len(want)+2 {
				t.Errorf("follows %v, want %v and the definitions", got, want)
			}
			for _, name := range want {
				if !strings.Contains(strings.Join(got, " ")+" ", name+" ") {
					t.Errorf("follows %v, want %s", got, name)
				}
			}
		}
		changed := func() {
			w.followers[definitions[0].GroupResource()][0].handler.OnUpdate(nil, nil)
			pass(3 * time.Second)
		}
		followed("pods", "configmaps")
		lists := w.client.Resources

		// 29: a definition appears, and goes again
		w.serve(widgets)
		w.store(widgets, "shop/w", T+"ttl", "0")
		changed()
		followed("pods", "configmaps", "widgets.example.com")
		w.asked("get widgets.example.com/shop/w", "delete widgets.example.com/shop/w")
		w.put(widgets, "shop/later", T+"ttl", "5h")

		// Discovery fails as a whole. TestOneGroupThatDoesNotAnswerKeepsItsWatches has a part of it.
		var down atomic.Bool
		down.Store(true)
		w.client.PrependReactor("get", "group", func(clienttesting.Action) (bool, runtime.Object, error) {
			if down.Load() {
				return true, nil, apierrors.NewServiceUnavailable("down")
			}
			return false, nil, nil
		})
		changed()
		followed("pods", "configmaps", "widgets.example.com")
		w.put(pods, "shop/p", T+"ttl", "1h")
		w.asked(getP, deleteP)
		w.client.Lock()
		w.client.Resources = lists
		w.client.Unlock()
		down.Store(false)
		pass(retryDiscovery)
		followed("pods", "configmaps")
		pass(24 * time.Hour)
		w.asked() // the object of the type that is gone is forgotten
		w.stop()
	})
}

// TestScope has a manager that may read some namespaces only, so neither types nor definitions of the
// cluster.
func TestScope(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.Scope = []string{"shop"} })
		w.client.Resources = append(w.client.Resources, &metav1.APIResourceList{GroupVersion: "rbac.authorization.k8s.io/v1", APIResources: []metav1.APIResource{
			{Name: "clusterroles", Kind: "ClusterRole", Verbs: metav1.Verbs{"get", "list", "watch", "delete"}}}})
		w.start()
		for gr, list := range w.followers {
			if len(list) > 0 && gr != pods.GroupResource() && gr != configMaps.GroupResource() {
				t.Errorf("follows %s", gr)
			}
		}
		w.serve(widgets)
		w.store(widgets, "shop/w", T+"ttl", "0")
		pass(discoveryInterval) // no definition tells of it
		w.asked("get widgets.example.com/shop/w", "delete widgets.example.com/shop/w")
		w.stop()
	})
}

// Row 30. The unit tests of informers have what becomes of a watch that is forbidden.
func TestATypeThatCannotBeFollowedDisturbsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		var many []schema.GroupVersionResource
		for i := range 10 {
			many = append(many, schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: fmt.Sprintf("widgets%d", i)})
		}
		w.serve(many...)
		w.unfollowable = "configmaps"
		w.put(pods, "shop/p", T+"ttl", "1h")
		w.start()
		w.asked(getP, deleteP)
		w.metric(`# HELP quartermaster_ttl_watched_types [ALPHA] Types whose objects are known.
			# TYPE quartermaster_ttl_watched_types gauge
			quartermaster_ttl_watched_types 11
		`, "quartermaster_ttl_watched_types")
		w.change(func() { w.followers[pods.GroupResource()][0].problem = "forbidden" })
		w.metric(`# HELP quartermaster_ttl_failing_types [ALPHA] Types that cannot be listed or watched now, or are left alone for a while.
			# TYPE quartermaster_ttl_failing_types gauge
			quartermaster_ttl_failing_types 1
		`, "quartermaster_ttl_failing_types")
		w.put(configMaps, "shop/c", T+"ttl", "1h")
		w.change(func() {
			w.unfollowable = ""
			w.followers[definitions[0].GroupResource()][0].problem = "forbidden"
		})
		w.followers[definitions[1].GroupResource()][0].handler.OnDelete(nil)
		pass(settle)
		w.asked("get configmaps/shop/c", "delete configmaps/shop/c")
		w.serve(replicaSets)
		w.store(replicaSets, "shop/r", T+"ttl", "0")
		pass(discoveryInterval) // one definition cannot be watched
		w.asked("get replicasets.apps/shop/r", "delete replicasets.apps/shop/r")
		w.stop()
	})
}

// Row 28.
func TestDiscovery(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := map[string]string{
			"/api":  `{"kind":"APIVersions","versions":["v1"]}`,
			"/apis": `{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"example.com","versions":[{"groupVersion":"example.com/v1","version":"v1"}]}]}`,
			"/api/v1": `{"kind":"APIResourceList","groupVersion":"v1","resources":[
				{"name":"pods","kind":"Pod","namespaced":true,"verbs":["get","list","watch","delete"]},
				{"name":"pods/status","kind":"Pod","namespaced":true,"verbs":["get","list","watch","delete"]},
				{"name":"bindings","kind":"Binding","namespaced":true,"verbs":["deletecollection","get","list","watch"]}]}`,
		}[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		if body == "" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(w, body)
	}))
	defer server.Close()
	c := &Controller{client: kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL})}
	types, down, err := c.discover()
	if len(types) != 1 || types[0] != (policy.Type{GroupVersionResource: pods, Kind: "Pod", Namespaced: true}) || len(down) != 1 || down[0] != "example.com" || err == nil {
		t.Errorf("%v, %v, %v", types, down, err)
	}
}

// Row 28.
func TestOneGroupThatDoesNotAnswerKeepsItsWatches(t *testing.T) {
	w := newWorld(t, nil)
	f := &follower{Controller: &Controller{cfg: w.cfg, rules: w.cfg.Policy(), follow: w.follow, kinds: map[schema.GroupResource]*kind{}}}
	all := []policy.Type{{GroupVersionResource: pods, Namespaced: true}, {GroupVersionResource: widgets, Namespaced: true}}
	f.apply(t.Context(), all, nil)
	f.apply(t.Context(), all[:1], []string{"example.com"})
	if n := len(f.kinds); n != 2 {
		t.Errorf("%d types while the group does not answer", n)
	}
	other := all[1]
	other.Version = "v2"
	f.apply(t.Context(), []policy.Type{all[0], other}, nil)
	if types := w.followers[widgets.GroupResource()]; len(types) != 1 || types[0].of.Version != "v2" {
		t.Errorf("after a change of the version: %v", types)
	}
	f.apply(t.Context(), all[:1], nil)
	if n := len(f.kinds); n != 1 {
		t.Errorf("%d types when the group has answered without it", n)
	}
	f.stop(t.Context())
}

// TestAPI has what the fake of other tests takes for granted.
func TestAPI(t *testing.T) {
	var body string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", "Thu, 10 Jan 2030 12:00:00 GMT")
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodDelete {
			b := make([]byte, 1000)
			n, _ := r.Body.Read(b)
			body = r.URL.Path + " " + string(b[:n])
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
			return
		}
		fmt.Fprint(w, `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"namespace":"shop","name":"p","uid":"u","resourceVersion":"7"}}`)
	}))
	defer server.Close()
	a, err := newAPI(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	live, date, err := a.get(t.Context(), policy.Type{GroupVersionResource: pods}, cache.ObjectName{Namespace: "shop", Name: "p"})
	if err != nil || live.UID != "u" || !date.Equal(time.Date(2030, 1, 10, 12, 0, 0, 0, time.UTC)) {
		t.Errorf("%v, %v, %v", live, date, err)
	}
	if err := a.delete(t.Context(), policy.Type{GroupVersionResource: pods}, live); err != nil {
		t.Error(err)
	}
	want := `/api/v1/namespaces/shop/pods/p {"kind":"DeleteOptions","apiVersion":"v1","preconditions":{"uid":"u","resourceVersion":"7"},"propagationPolicy":"Background"}`
	if strings.TrimSpace(body) != want {
		t.Errorf("sent %s\nwant %s", body, want)
	}
}
