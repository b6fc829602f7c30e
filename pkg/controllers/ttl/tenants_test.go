// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// minute is the grace that the flag has by default.
func minute(c *ttl.Config) { c.Grace = time.Minute }

// TestGraceDelaysTheFirstDeletion has objects that are due when they are first seen, and others. The former
// are deleted a minute later than in TestReconcile, which has no grace.
func TestGraceDelaysTheFirstDeletion(t *testing.T) {
	runRows(t, map[string]row{
		"what is due when a leader begins is announced once, and goes a minute later": {configure: minute, run: func(f *fixture) {
			f.start(expiring("1h")).toldOf("WillDeleteExpiredTTL")
			f.add(expiring("1h", "status", "other")) // which does not begin the minute anew
			f.askedAt(time.Minute, getP, deleteP)
			f.toldOf("DeletedExpiredTTL")
		}},
		"a deadline that is now": {configure: minute, run: func(f *fixture) {
			f.start(expiring("2h")).askedAt(time.Minute, getP, deleteP)
		}},
		"what becomes due while it is watched goes to the second": {configure: minute, run: func(f *fixture) {
			f.start()
			f.put(pod, "shop/p", policy.NativeExpires, time.Now().Add(time.Second).UTC().Format(time.RFC3339)).askedAfter(time.Second, getP, deleteP)
			f.toldOf("DeletedExpiredTTL")
		}},
		"a deadline that is moved to another time in the past begins a minute of its own": {configure: minute, run: func(f *fixture) {
			f.start(expiring("1h"))
			f.pass(30 * time.Second)
			f.add(expiring("30m")).toldOf("WillDeleteExpiredTTL", "WillDeleteExpiredTTL")
			f.askedAt(time.Minute, getP, deleteP)
		}},
		"the live object has another deadline, of which no watch has told": {configure: minute, run: func(f *fixture) {
			f.start(expiring("3h"))
			f.whenRead(expiring("2h")).askedAfter(time.Hour, getP)
			f.toldOf("WillDeleteExpiredTTL")
			f.pass(time.Minute)
			f.toldOf("DeletedExpiredTTL")
		}},
	})
}

// TestTenantWithThousandsDueDelaysNobody has 5,000 overdue ConfigMaps of one namespace, before Pods of
// another, and again each time when they come back.
func TestTenantWithThousandsDueDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, row{})
		for i := range 5000 {
			f.put(configMap, fmt.Sprintf("greedy/c%d", i), ttlController+"ttl", "1h")
		}
		for i := range 10 {
			f.put(pod, fmt.Sprintf("shop/p%d", i), ttlController+"ttl", "1h")
		}
		f.start().left(0, 4940)
		for round := range 3 {
			f.pass(4 * time.Minute)
			for i := range 10 {
				f.put(pod, fmt.Sprintf("shop/p%d", i), ttlController+"ttl", "1h")
			}
			f.left(0, 4940-60*round)
			f.pass(80 * time.Second)
			f.left(0, 4880-60*round)
		}
		gets := 0
		for _, r := range f.asks() {
			if strings.HasPrefix(r, "get configmaps ") {
				gets++
			}
		}
		if gets > 4*(60+f.cfg.ConcurrentSyncs) { // those that wait cost no requests
			t.Errorf("%d requests for 240 ConfigMaps", gets)
		}
		f.metric(4, "breaker_trips_total", "scope", "namespace")
		f.metric(0, "breaker_trips_total", "scope", "total")
	})
}

// TestBreakerStopsEveryTenant has as many objects due as only many namespaces together may delete. Some have
// no namespace.
func TestBreakerStopsEveryTenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, row{configure: func(c *ttl.Config) {
			c.MaxDeletionsPerMinute = 2
			c.Include = append(c.Include, "clusterroles.rbac.authorization.k8s.io")
		}})
		for i := range 3 {
			f.put(clusterRole, fmt.Sprintf("/r%d", i), ttlController+"ttl", "1h")
		}
		for i := range 50 {
			f.put(pod, fmt.Sprintf("n%d/p", i), ttlController+"ttl", "1h")
		}
		f.start()
		if n := len(controllertest.List[corev1.Pod](f.Host)) + len(controllertest.List[rbacv1.ClusterRole](f.Host)); n != 33 {
			t.Errorf("%d are left, want 33", n)
		}
		f.metric(1, "breaker_open")
		texts, _ := f.events()
		texts = slices.DeleteFunc(texts, func(text string) bool { return !strings.Contains(text, "TTLBreakerOpen") })
		if all := strings.Join(texts, "; "); !strings.Contains(all, "20 objects were deleted within a minute") || strings.Contains(all, "n1") {
			t.Errorf("Events %s", all)
		}
		f.pass(17 * time.Minute)
		f.left(0, 0)
	})
}
