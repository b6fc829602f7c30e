// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// minute is the grace that the flag has by default.
func minute(c *Config) { c.Grace = time.Minute }

// expires returns an annotation with a time that is so far away.
func expires(in time.Duration) (key, value string) {
	return policy.NativeExpires, time.Now().Add(in).UTC().Format(time.RFC3339)
}

// TestGrace has objects that are due when they are first seen, and others. Rows 1, 3, 7, 17, 27, 29
// and 33 of the specification are as in TestReconcile, a minute later.
func TestGrace(t *testing.T) {
	for name, test := range map[string]struct {
		configure func(*Config)
		run       func(w *world)
	}{
		"1, 33: what is due when a leader begins is announced once, and goes a minute later": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			pass(72 * time.Hour)
			w.start()
			w.told("WillDeleteExpiredTTL")
			w.put(pods, "shop/p", T+"ttl", "1h", "status", "other") // which does not begin the minute anew
			pass(time.Minute - time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP)
			w.told("DeletedExpiredTTL")
		}},
		"3: a deadline that is now": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "2h")
			w.start()
			pass(time.Minute - 1)
			w.asked()
			pass(1)
			w.asked(getP, deleteP)
		}},
		"what becomes due while it is watched goes to the second": {run: func(w *world) {
			w.start()
			key, value := expires(time.Second)
			w.put(pods, "shop/p", key, value)
			pass(time.Second)
			w.asked(getP, deleteP)
			w.told("DeletedExpiredTTL")
		}},
		"17: an annotation with a past time on an object that was known": {run: func(w *world) {
			w.put(pods, "shop/p")
			w.start()
			w.put(pods, "shop/p", T+"ttl", "1h")
			pass(time.Minute - 1)
			w.asked()
			w.told("WillDeleteExpiredTTL")
			pass(1)
			w.asked(getP, deleteP)
		}},
		"a backup is restored while the leader watches": {run: func(w *world) {
			w.start()
			key, value := expires(-24 * time.Hour)
			w.put(pods, "shop/p", key, value)
			w.told("WillDeleteExpiredTTL")
			pass(30 * time.Second)
			w.put(pods, "shop/p") // somebody has read the Event
			pass(24 * time.Hour)
			w.asked()
		}},
		"a deadline that is moved to another time in the past begins a minute of its own": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			pass(30 * time.Second)
			w.put(pods, "shop/p", T+"ttl", "30m")
			w.told("WillDeleteExpiredTTL", "WillDeleteExpiredTTL")
			pass(time.Minute - 1)
			w.asked()
			pass(1)
			w.asked(getP, deleteP)
		}},
		"18: the live object has another deadline, of which no watch has told": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "3h")
			w.start()
			shown := w.stored[named(pods, "shop/p")]
			k := w.store(pods, "shop/p", T+"ttl", "1h")
			pass(time.Hour)
			w.asked(getP)
			w.followers[pods.GroupResource()][0].handler.OnUpdate(shown, w.stored[k])
			w.told("WillDeleteExpiredTTL")
			pass(time.Minute)
			w.told("DeletedExpiredTTL")
		}},
		"a leader that ends within the minute leaves it to its successor, which begins anew": {run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			pass(59 * time.Second)
			w.stop()
			w.told("WillDeleteExpiredTTL")
			w.start()
			w.told("WillDeleteExpiredTTL")
			pass(59 * time.Second)
			w.asked()
			pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"what is protected is not announced": {run: func(w *world) {
			w.put(pods, "kube-system/p", T+"ttl", "1h")
			w.start()
			w.told("TTLProtected")
		}},
		"32: a dry run announces nothing, and waits for nothing": {configure: func(c *Config) { c.DryRun = true }, run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.told("WouldDeleteExpiredTTL")
			w.asked(getP)
		}},
		"a dry run tells nobody twice when an owner of the object changes": {configure: func(c *Config) { c.DryRun = true }, run: func(w *world) {
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.start()
			w.told("WouldDeleteExpiredTTL")
			w.change(func() { w.stored[named(pods, "shop/p")].OwnerReferences = []metav1.OwnerReference{{Name: "x"}} })
			w.put(pods, "shop/p", T+"ttl", "1h")
			w.told()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, func(c *Config) {
					minute(c)
					if test.configure != nil {
						test.configure(c)
					}
				})
				test.run(w)
				w.stop()
			})
		})
	}
}

// TestATenantWithThousandsDueDelaysNobodyElse has 5,000 overdue ConfigMaps of one namespace, before Pods of
// another, and again each time when they come back.
func TestATenantWithThousandsDueDelaysNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		for i := range 5000 {
			w.put(configMaps, fmt.Sprintf("greedy/c%d", i), T+"ttl", "1h")
		}
		for i := range 10 {
			w.put(pods, fmt.Sprintf("shop/p%d", i), T+"ttl", "1h")
		}
		w.start()
		left := func(wantPods, wantConfigMaps int) {
			t.Helper()
			synctest.Wait()
			var p, c int
			for _, name := range w.names() {
				if strings.HasPrefix(name, "pods/") {
					p++
				} else {
					c++
				}
			}
			if p != wantPods || c != wantConfigMaps {
				t.Errorf("%d Pods and %d ConfigMaps are left, want %d and %d", p, c, wantPods, wantConfigMaps)
			}
		}
		left(0, 4940)
		for round := range 3 {
			pass(4 * time.Minute)
			for i := range 10 {
				w.put(pods, fmt.Sprintf("shop/p%d", i), T+"ttl", "1h")
			}
			left(0, 4940-60*round)
			pass(80 * time.Second)
			left(0, 4880-60*round)
		}
		w.mu.Lock()
		gets := 0
		for _, r := range w.requests {
			if strings.HasPrefix(r, "get configmaps/") {
				gets++
			}
		}
		w.mu.Unlock()
		if gets > 4*(60+w.cfg.Workers) { // those that wait cost no requests
			t.Errorf("%d requests for 240 ConfigMaps", gets)
		}
		w.metric(`# HELP quartermaster_ttl_breaker_trips_total [ALPHA] How often too many objects of one namespace, or of all in total, were due within a minute.
			# TYPE quartermaster_ttl_breaker_trips_total counter
			quartermaster_ttl_breaker_trips_total{scope="namespace"} 4
			quartermaster_ttl_breaker_trips_total{scope="total"} 0
		`, "quartermaster_ttl_breaker_trips_total")
		w.stop()
	})
}

// TestTheTotal has as many objects due as only many namespaces together may delete, those without a namespace
// among them.
func TestTheTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.MaxDeletionsPerMinute = 2 })
		roles := schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}
		w.serve(roles)
		for i := range 3 {
			w.put(roles, fmt.Sprintf("/r%d", i), T+"ttl", "1h")
		}
		for i := range 50 {
			w.put(pods, fmt.Sprintf("n%d/p", i), T+"ttl", "1h")
		}
		w.start()
		if n := len(w.names()); n != 33 {
			t.Errorf("%d are left, want 33", n)
		}
		w.metric(`# HELP quartermaster_ttl_breaker_open [ALPHA] 1 while nothing at all is deleted, because too many objects were due.
			# TYPE quartermaster_ttl_breaker_open gauge
			quartermaster_ttl_breaker_open 1
		`, "quartermaster_ttl_breaker_open")
		var told []string
		for len(w.recorder.Events) > 0 {
			if e := <-w.recorder.Events; strings.Contains(e, reasonBreaker) {
				told = append(told, e)
			}
		}
		if all := strings.Join(told, "; "); !strings.Contains(all, "20 objects were deleted within a minute") || strings.Contains(all, "n1") {
			t.Errorf("Events %s", all)
		}
		pass(17 * time.Minute)
		if n := len(w.names()); n != 0 {
			t.Errorf("%d are left", n)
		}
		w.stop()
	})
}

// TestTheEventOfTheBreaker tells the limit, and not the namespace.
func TestTheEventOfTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.MaxDeletionsPerMinute = 1 })
		w.before = func(verb string, _ *metav1.PartialObjectMetadata) error {
			if verb == "delete" {
				return apierrors.NewInternalError(errors.New("webhook"))
			}
			return nil
		}
		w.put(pods, "secretive/p", T+"ttl", "1h")
		w.start()
		pass(2 * time.Second)
		if e := <-w.recorder.Events; e != "Warning TTLBreakerOpen 1 objects of one namespace were deleted within a minute and more are due; nothing in it is deleted for 5m0s" {
			t.Error(e)
		}
		w.stop()
	})
}

// TestTenant holds that keys take the turn of their namespace in the queue.
func TestTenant(t *testing.T) {
	k := key{&kind{}, named(pods, "shop/p").ObjectName}
	if k.Tenant() != "shop" || (key{kind: &kind{}}).Tenant() != "" {
		t.Error(k.Tenant())
	}
}
