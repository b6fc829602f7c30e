// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

const (
	getP    = "get pods shop/p"
	deleteP = "delete pods shop/p"
)

// TestReconcileDeletesWhatIsDue has the rules of docs/controllers/ttl.md that take requests, time or more
// than one decision. Package policy has the others.
func TestReconcileDeletesWhatIsDue(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "p", errors.New("by nobody"))
	runCases(t, map[string]row{
		"what is due is deleted with its UID and version": {run: func(f *fixture) {
			var sent string
			f.beforeRequests(func(r controllertest.Request) error { sent = string(r.Body); return nil })
			f.start(expiringPod("1h")).expectRequests(getP, deleteP)
			for _, part := range []string{`"uid":"0`, `"resourceVersion":"1`, `"propagationPolicy":"Background"`} {
				if !strings.Contains(sent, part) {
					f.Errorf("the deletion is %s, without %s", sent, part)
				}
			}
			f.expectEvents("DeletedExpiredTTL")
			f.expectMetric(1, "deletions_total", "group", "", "resource", "pods", "result", "success")
		}},
		"an invalid value is told once": {run: func(f *fixture) {
			f.start(expiringPod("-5m"))
			f.add(expiringPod("-5m")).expectRequestsAfter(24 * time.Hour)
			f.expectEvents("InvalidTTL")
			f.add(expiringPod("-6m")).expectEvents("InvalidTTL")
		}},
		"the live object is due later": {run: func(f *fixture) {
			f.start(expiringPod("3h"))
			f.putBeforeRead(expiringPod("1w")).expectRequestsAfter(time.Hour, getP)
			f.expectRequestsAfter(24 * time.Hour)
			f.expectEvents()
		}},
		"another object of that name": {run: func(f *fixture) {
			f.start(expiringPod("3h"))
			f.Lag(time.Second)
			f.beforeRequests(func(_ controllertest.Request) error {
				f.Delete(object(pod, "shop/p"))
				f.Put(expiringPod("1h"))
				f.beforeRequests(nil)
				return nil
			})
			f.Sleep(time.Hour + time.Second)
			f.expectRequests(getP, getP, deleteP) // it is due too, but by its own event
		}},
		"a status that never rests": {run: func(f *fixture) {
			f.start()
			f.refuseDeletions(func() error {
				f.Put(expiringPod("1h"))
				return nil
			})
			f.add(expiringPod("1h"))
			f.Sleep(750 * time.Millisecond) // at once, and after 0.1, 0.2 and 0.4 s more
			f.expectRequests(getP, deleteP, getP, deleteP, getP, deleteP, getP, deleteP)
			f.expectEvents("FailedToDeleteExpiredTTL")
			f.expectRequestCount(24*time.Hour, 2*23*60, 2*(24*60+15))
			f.beforeRequests(nil)
			f.Sleep(time.Minute)
			f.expectLeft(0, 0)
		}},
		"a dry run announces nothing, waits for nothing and tells nobody twice": {configure: func(c *ttl.Config) { c.DryRun = true; withGrace(c) }, run: func(f *fixture) {
			f.start(expiringPod("1h")).expectEvents("WouldDeleteExpiredTTL")
			f.add(expiringPod("1h", "status", "other")).expectRequestsAfter(24*time.Hour, getP)
			f.add(withOwner("Node", expiringPod("1h"))).expectRequests(getP)
			f.expectEvents()
			f.add(expiringPod("2h")).expectEvents("WouldDeleteExpiredTTL")
			f.expectLeft(1, 0)
		}},
		"nobody looks at the clocks": {configure: func(c *ttl.Config) { c.MaxClockSkew = 0 }, run: func(f *fixture) {
			f.start()
			f.skew(-2*time.Hour, "")
			f.add(expiringPod("1h")).expectRequests(getP, deleteP)
		}},
		"forbidden": {run: func(f *fixture) {
			f.refuseDeletions(func() error { return forbidden })
			f.start(expiringPod("1h")).expectRequests(getP, deleteP+" refused")
			f.expectMetric(1, "deletions_total", "result", "error")
			f.expectEvents("FailedToDeleteExpiredTTL")
			f.expectRequestsAt(5*time.Minute, getP, deleteP+" refused")
			f.expectEvents()
			f.expectRequestCount(24*time.Hour, 2*23, 2*28)
			if n := f.countEvents("FailedToDeleteExpiredTTL"); n < 24 || n > 25 {
				f.Errorf("%d Events in a day", n)
			}
		}},
		"any other error is tried again, and then reported": {run: func(f *fixture) {
			f.refuseDeletions(func() error { return apierrors.NewInternalError(errors.New("webhook")) })
			f.start(expiringPod("1h")).expectRequestsAfter(2*time.Second, getP, deleteP+" refused", getP, deleteP+" refused")
			f.expectEvents()
			f.Sleep(2 * time.Second)
			f.expectEvents("FailedToDeleteExpiredTTL")
			f.beforeRequests(nil)
			f.Sleep(5 * time.Minute)
			f.expectEvents("DeletedExpiredTTL")
		}},
		"a TTL that is prolonged, and then shortened": {run: func(f *fixture) {
			f.start(expiringPod("3h"))
			f.add(expiringPod("9h")).expectRequestsAfter(2 * time.Hour)
			f.add(expiringPod("5h")).expectRequestsAt(time.Hour, getP, deleteP)
		}},
		"a ReplicaSet that its Deployment has left behind": {configure: func(c *ttl.Config) { c.Include = []string{"replicasets.apps"} }, run: func(f *fixture) {
			f.start(withOwner("Deployment", object(replicaSet, "shop/r", ttlController+"ttl", "1h"))).expectRequests()
			f.put(replicaSet, "shop/r", ttlController+"ttl", "1h").expectRequests("get replicasets.apps shop/r", "delete replicasets.apps shop/r")
		}},
		"a type whose API does not answer, or whose webhook does not, keeps nobody else waiting": {
			run: func(f *fixture) {
				f.entry.Workers = 1
				f.beforeRequests(func(r controllertest.Request) error {
					if r.Namespace == "hangs" {
						<-time.After(11 * time.Second) // the client waits for ten
					}
					return nil
				})
				f.putMany(60, configMap, "hangs/c%d")
				f.start()
				f.add(expiringPod("1h"))
				f.Sleep(11 * time.Second)
				f.expectEvents("DeletedExpiredTTL")
				f.expectMetric(1, "failing_types")
				// Each of them is asked for in 70 s, of which the worker is free for a minute.
				f.expectRequestCount(time.Hour, 45, 60)
				f.beforeRequests(nil)
				f.Sleep(2 * time.Minute)
				f.expectLeft(0, 0)
			}},
		"the clock of one type's API is wrong": {run: func(f *fixture) {
			f.entry.Workers = 1
			f.put(configMap, "shop/c", ttlController+"ttl", "3h")
			f.put(configMap, "shop/d", ttlController+"ttl", "3h")
			f.start()
			f.skew(-2*time.Hour, "configmaps")
			f.add(expiringPod("1h")).expectRequests(getP, deleteP)
			f.expectEvents("DeletedExpiredTTL")
			f.expectRequestCount(time.Hour, 1, 1) // for all objects of the type
			if skew := f.Metric("quartermaster_ttl_clock_skew_seconds"); skew < 7199 || skew > 7201 {
				f.Errorf("the skew is %v", skew)
			}
			f.Sleep(time.Hour)
			f.expectLeft(0, 2)
			f.expectEvents()
			f.skew(30*time.Second, "")
			f.Sleep(2 * time.Minute)
			f.expectLeft(0, 0)
		}},
		"the clock is behind the API server's": {run: func(f *fixture) {
			f.start()
			f.skew(2*time.Hour, "")
			f.add(expiringPod("1h")).expectRequests(getP)
		}},
	})
}

// TestBreakerCountsDeletionsThatMayHaveHappened has answers to a deletion, after which another object may be
// deleted or not.
func TestBreakerCountsDeletionsThatMayHaveHappened(t *testing.T) {
	cm := schema.GroupResource{Resource: "configmaps"}
	// answerRow has the deletion of a ConfigMap answered, or not if there is no error, before that of a Pod.
	answerRow := func(podsLeft int, err error) row {
		return row{configure: func(c *ttl.Config) { c.MaxDeletionsPerMinute = 1 }, run: func(f *fixture) {
			f.beforeRequests(func(r controllertest.Request) error {
				switch {
				case r.Verb != "delete" || r.Name != "c":
					return nil
				case err == nil:
					panic(http.ErrAbortHandler)
				}
				return err
			})
			f.put(configMap, "shop/c", ttlController+"ttl", "1h").start()
			f.add(expiringPod("1h")).expectLeft(podsLeft, 1)
		}}
	}
	runCases(t, map[string]row{
		"forbidden":         answerRow(0, apierrors.NewForbidden(cm, "c", errors.New("by nobody"))),
		"not found":         answerRow(0, apierrors.NewNotFound(cm, "c")),
		"conflict":          answerRow(0, apierrors.NewConflict(cm, "c", errors.New("changed"))),
		"invalid":           answerRow(0, apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, "c", nil)),
		"too many requests": answerRow(0, apierrors.NewTooManyRequests("disruption budget", 30)),
		"internal error":    answerRow(1, apierrors.NewInternalError(errors.New("webhook"))),
		"an answer is lost": answerRow(1, nil),
	})
}

// crd returns the definition of Widgets.
func crd() *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "widgets.example.com"},
		"spec": map[string]any{"group": "example.com", "scope": "Namespaced", "names": map[string]any{"kind": "Widget", "plural": "widgets"},
			"versions": []any{map[string]any{"name": "v1", "served": true}}}}}
}

func withClusterRoles(c *ttl.Config) {
	c.Include = append(c.Include, "clusterroles.rbac.authorization.k8s.io")
}

func TestTypesAreWatchedWhileDefined(t *testing.T) {
	widgetGoes := []string{"get widgets.example.com shop/w", "delete widgets.example.com shop/w"}
	runCases(t, map[string]row{
		"a type is watched while it is defined, and then its objects are forgotten": {run: func(f *fixture) {
			f.start().expectMetric(2, "watched_types")
			f.add(crd())
			f.Sleep(3 * time.Second)
			f.expectMetric(3, "watched_types")
			f.put(widget, "shop/w", ttlController+"ttl", "0").expectRequests(widgetGoes...)
			f.put(widget, "shop/later", ttlController+"ttl", "5h")
			f.Delete(crd())
			f.Sleep(3 * time.Second)
			f.expectMetric(2, "watched_types")
			f.expectRequestsAfter(24 * time.Hour)
		}},
		"a manager of some namespaces reads neither types of the cluster nor definitions": {configure: withClusterRoles, run: func(f *fixture) {
			f.flags = append(f.flags, "--namespaces=shop")
			f.start().expectMetric(2, "watched_types")
			f.add(crd())
			f.put(widget, "shop/w", ttlController+"ttl", "0")
			f.put(widget, "elsewhere/w", ttlController+"ttl", "0").expectRequestsAfter(5*time.Minute, widgetGoes...) // no definition tells of it
		}},
	})
}

// withGrace sets the grace that the flag has by default.
func withGrace(c *ttl.Config) { c.Grace = time.Minute }

// TestGraceDelaysTheFirstDeletion has objects that are due when they are first seen, and others. The former
// are deleted a minute later than in TestReconcileDeletesWhatIsDue, which has no grace.
func TestGraceDelaysTheFirstDeletion(t *testing.T) {
	runCases(t, map[string]row{
		"what is due when a leader begins is announced once, and goes a minute later": {configure: withGrace, run: func(f *fixture) {
			f.start(expiringPod("1h")).expectEvents("WillDeleteExpiredTTL")
			f.add(expiringPod("1h", "status", "other")) // which does not begin the minute anew
			f.expectRequestsAt(time.Minute, getP, deleteP)
			f.expectEvents("DeletedExpiredTTL")
		}},
		"a deadline that is now": {configure: withGrace, run: func(f *fixture) {
			f.start(expiringPod("2h")).expectRequestsAt(time.Minute, getP, deleteP)
		}},
		"what becomes due while it is watched goes to the second": {configure: withGrace, run: func(f *fixture) {
			f.start()
			f.put(pod, "shop/p", policy.NativeExpires, time.Now().Add(time.Second).UTC().Format(time.RFC3339)).expectRequestsAfter(time.Second, getP, deleteP)
			f.expectEvents("DeletedExpiredTTL")
		}},
		"a deadline that is moved to another time in the past begins a minute of its own": {configure: withGrace, run: func(f *fixture) {
			f.start(expiringPod("1h"))
			f.Sleep(30 * time.Second)
			f.add(expiringPod("30m")).expectEvents("WillDeleteExpiredTTL", "WillDeleteExpiredTTL")
			f.expectRequestsAt(time.Minute, getP, deleteP)
		}},
		"the live object has another deadline, of which no watch has told": {configure: withGrace, run: func(f *fixture) {
			f.start(expiringPod("3h"))
			f.putBeforeRead(expiringPod("2h")).expectRequestsAfter(time.Hour, getP)
			f.expectEvents("WillDeleteExpiredTTL")
			f.Sleep(time.Minute)
			f.expectEvents("DeletedExpiredTTL")
		}},
	})
}

func TestBreakerStopsATenantOrAll(t *testing.T) {
	runCases(t, map[string]row{
		"5,000 overdue ConfigMaps of a namespace delay no Pods of another, nor each time when they come back": {run: func(f *fixture) {
			f.putMany(5000, configMap, "greedy/c%d")
			f.putMany(10, pod, "shop/p%d")
			f.start().expectLeft(0, 4940)
			f.expectMetric(0, "breaker_open")
			f.expectMetric(1, "stopped_namespaces")
			f.expectMetric(4940, "overdue_objects")
			f.expectMetric(4940, "tracked_objects")
			for round := range 3 {
				f.Sleep(4 * time.Minute)
				f.putMany(10, pod, "shop/p%d")
				f.expectLeft(0, 4940-60*round)
				f.Sleep(80 * time.Second)
				f.expectLeft(0, 4880-60*round)
			}
			gets := 0
			for _, r := range f.takeRequests() {
				if strings.HasPrefix(r, "get configmaps ") {
					gets++
				}
			}
			if gets > 4*(60+f.entry.Workers) { // those that wait cost no requests
				f.Errorf("%d requests for 240 ConfigMaps", gets)
			}
			f.expectMetric(4, "breaker_trips_total", "scope", "namespace")
			f.expectMetric(0, "breaker_trips_total", "scope", "total")
			if n := f.countEvents("TTLBreakerOpen"); n != 4 {
				f.Errorf("%d Events of the breaker", n)
			}
			want := "Warning TTLBreakerOpen kube-system/manager-0: 60 objects of one namespace were deleted within a minute and more are due; nothing in it is deleted for 5m0s"
			if texts, _ := f.takeEvents(); !slices.Contains(texts, want) { // it does not name the namespace
				f.Errorf("Events %.1000q", texts)
			}
		}},
		"too many objects are due in many namespaces, and some without one": {configure: func(c *ttl.Config) { c.MaxDeletionsPerMinute = 2; withClusterRoles(c) }, run: func(f *fixture) {
			f.putMany(3, clusterRole, "/r%d")
			f.putMany(50, pod, "n%d/p")
			f.start()
			if n := len(controllertest.List[corev1.Pod](f.Host)) + len(controllertest.List[rbacv1.ClusterRole](f.Host)); n != 33 {
				f.Errorf("%d are left, want 33", n)
			}
			f.expectMetric(1, "breaker_open")
			texts, _ := f.takeEvents()
			texts = slices.DeleteFunc(texts, func(text string) bool { return !strings.Contains(text, "TTLBreakerOpen") })
			if all := strings.Join(texts, "; "); !strings.Contains(all, "20 objects were deleted within a minute") || strings.Contains(all, "n1") {
				f.Errorf("Events %s", all)
			}
			f.Sleep(17 * time.Minute)
			f.expectLeft(0, 0)
		}},
	})
}
