// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

const (
	getP    = "get pods shop/p"
	deleteP = "delete pods shop/p"
)

// TestReconcile has the rules of docs/controllers/ttl.md that take requests, time or more than one decision.
// Package policy has the others.
func TestReconcile(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "p", errors.New("by nobody"))
	for name, test := range map[string]struct {
		configure func(*ttl.Config)
		run       func(w *fixture)
	}{
		"what is due is deleted with its UID and version": {run: func(w *fixture) {
			var sent string
			w.beforeRequests(func(r controllertest.Request) error { sent = string(r.Body); return nil })
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP, deleteP)
			for _, part := range []string{`"uid":"0`, `"resourceVersion":"1`, `"propagationPolicy":"Background"`} {
				if !strings.Contains(sent, part) {
					w.Errorf("the deletion is %s, without %s", sent, part)
				}
			}
			w.toldOf("DeletedExpiredTTL")
			w.metric(1, "deletions_total", "group", "", "resource", "pods", "result", "deleted")
		}},
		"what is due in days is looked at every hour, without a request": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3d")
			w.start()
			w.pass(70*time.Hour - time.Second)
			w.asked()
			w.pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"an invalid value is told once": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "-5m")
			w.start()
			w.put(pod, "shop/p", T+"ttl", "-5m")
			w.pass(24 * time.Hour)
			w.asked()
			w.toldOf("InvalidTTL")
			w.put(pod, "shop/p", T+"ttl", "-6m")
			w.toldOf("InvalidTTL")
		}},
		"an annotation that is added counts": {run: func(w *fixture) {
			w.put(pod, "shop/p")
			w.start()
			w.asked()
			w.metric(0, "tracked_objects")
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.asked(getP, deleteP)
		}},
		"the live object is due later": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.whenRead(object(pod, "shop/p", T+"ttl", "1w"))
			w.pass(time.Hour)
			w.asked(getP)
			w.pass(24 * time.Hour)
			w.asked()
			w.toldOf()
		}},
		"the live object has no TTL any more": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.whenRead(object(pod, "shop/p"))
			w.pass(3 * time.Hour)
			w.asked(getP)
		}},
		"another object of that name": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.Lag(time.Second)
			w.beforeRequests(func(_ controllertest.Request) error {
				w.Delete(object(pod, "shop/p"))
				w.Put(object(pod, "shop/p", T+"ttl", "3h"))
				w.beforeRequests(nil)
				return nil
			})
			w.pass(time.Hour)
			w.asked(getP)
		}},
		"a status that changes in between": {run: func(w *fixture) {
			w.start()
			changed := false
			w.refuse(func() error {
				if !changed {
					changed = true
					w.Put(object(pod, "shop/p", T+"ttl", "1h"))
				}
				return nil
			})
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.pass(100 * time.Millisecond)
			w.asked(getP, deleteP, getP, deleteP)
			w.toldOf("DeletedExpiredTTL")
		}},
		"a status that never rests": {run: func(w *fixture) {
			w.start()
			w.refuse(func() error {
				w.Put(object(pod, "shop/p", T+"ttl", "1h"))
				return nil
			})
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.pass(750 * time.Millisecond) // at once, and after 0.1, 0.2 and 0.4 s more
			w.asked(getP, deleteP, getP, deleteP, getP, deleteP, getP, deleteP)
			w.toldOf("FailedToDeleteExpiredTTL")
			w.pass(24 * time.Hour)
			if n := len(w.asks()); n < 2*23*60 || n > 2*(24*60+15) {
				w.Errorf("%d requests in a day", n)
			}
			w.beforeRequests(nil)
			w.pass(time.Minute)
			w.left(0, 0)
		}},
		"the TTL is prolonged in between": {run: func(w *fixture) {
			w.start()
			w.refuse(func() error {
				w.Put(object(pod, "shop/p", T+"ttl", "1w"))
				return nil
			})
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.pass(time.Second)
			w.asked(getP, deleteP)
			w.toldOf()
		}},
		"the breaker": {run: func(w *fixture) {
			for i := range 150 {
				w.put(pod, fmt.Sprintf("shop/p%d", i), T+"ttl", "1h")
			}
			w.start()
			w.left(90, 0)
			w.metric(0, "breaker_open")
			w.metric(90, "overdue_objects")
			w.metric(1, "stopped_namespaces")
			w.metric(90, "tracked_objects")
			w.pass(5*time.Minute - time.Second)
			w.left(90, 0)
			w.pass(11 * time.Second) // they come spread over 10 s
			w.left(30, 0)
			w.pass(4 * time.Minute)
			w.left(30, 0)
			w.pass(80 * time.Second)
			w.left(0, 0)
			if n := w.repeated("TTLBreakerOpen"); n != 2 {
				w.Errorf("%d Events of the breaker", n)
			}
		}},
		"a dry run": {configure: func(c *ttl.Config) { c.DryRun = true }, run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.start()
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.pass(24 * time.Hour)
			w.asked(getP)
			w.toldOf("WouldDeleteExpiredTTL")
			w.put(pod, "shop/p", T+"ttl", "2h")
			w.toldOf("WouldDeleteExpiredTTL")
			w.left(1, 0)
		}},
		"a dry run, and a timer of the TTL before": {configure: func(c *ttl.Config) { c.DryRun = true }, run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "2h30m")
			w.start()
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.toldOf("WouldDeleteExpiredTTL")
			w.pass(24 * time.Hour)
			w.asked(getP, getP)
			w.toldOf()
		}},
		"overdue for days": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.pass(72 * time.Hour)
			w.start()
			w.asked(getP, deleteP)
		}},
		"the clocks are apart": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.put(pod, "shop/q", T+"ttl", "3h")
			w.cfg.ConcurrentSyncs = 1
			w.start()
			w.skew(-2*time.Hour, "")
			w.pass(time.Hour)
			if n := len(w.asks()); n != 1 {
				w.Errorf("%d requests, want one for all objects of the type", n)
			}
			if skew := w.Metric("quartermaster_ttl_clock_skew_seconds"); skew < 7199 || skew > 7201 {
				w.Errorf("the skew is %v", skew)
			}
			w.pass(time.Hour)
			w.left(2, 0)
			w.toldOf()
			w.skew(30*time.Second, "")
			w.pass(2 * time.Minute)
			w.left(0, 0)
		}},
		"nobody looks at the clocks": {configure: func(c *ttl.Config) { c.MaxClockSkew = 0 }, run: func(w *fixture) {
			w.start()
			w.skew(-2*time.Hour, "")
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.asked(getP, deleteP)
		}},
		"forbidden": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.refuse(func() error { return forbidden })
			w.start()
			w.asked(getP, deleteP+" refused")
			w.toldOf("FailedToDeleteExpiredTTL")
			w.pass(5*time.Minute - time.Second)
			w.asked()
			w.pass(time.Second)
			w.asked(getP, deleteP+" refused")
			w.toldOf()
			w.pass(24 * time.Hour)
			if n := w.repeated("FailedToDeleteExpiredTTL"); n < 24 || n > 25 {
				w.Errorf("%d Events in a day", n)
			}
			if n := len(w.asks()); n < 2*23 || n > 2*28 {
				w.Errorf("%d requests in a day", n)
			}
		}},
		"another error": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.refuse(func() error { return apierrors.NewInternalError(errors.New("webhook")) })
			w.start()
			w.pass(2 * time.Second)
			w.asked(getP, deleteP+" refused", getP, deleteP+" refused")
			w.toldOf()
			w.pass(2 * time.Second)
			w.toldOf("FailedToDeleteExpiredTTL")
			w.beforeRequests(nil)
			w.pass(5 * time.Minute)
			w.toldOf("DeletedExpiredTTL")
		}},
		"too many requests": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.refuse(func() error { return apierrors.NewTooManyRequests("disruption budget", 30) })
			w.start()
			w.asked(getP, deleteP+" refused")
			w.beforeRequests(nil)
			w.pass(29 * time.Second)
			w.asked()
			w.pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"a TTL that is prolonged, and then shortened": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.put(pod, "shop/p", T+"ttl", "9h")
			w.pass(2 * time.Hour)
			w.asked()
			w.put(pod, "shop/p", T+"ttl", "5h")
			w.pass(time.Hour - time.Second)
			w.asked()
			w.pass(time.Second)
			w.asked(getP, deleteP)
		}},
		"an annotation that is taken away": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.put(pod, "shop/p")
			w.pass(2 * time.Hour)
			w.asked()
		}},
		"another object of that name with the same TTL": {run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "3h")
			w.start()
			w.Delete(object(pod, "shop/p"))
			w.pass(time.Minute)
			w.put(pod, "shop/p", T+"ttl", "2h30m")
			w.pass(time.Hour/2 - time.Second)
			w.asked()
			w.pass(time.Second) // the timer is from its own creation
			w.asked(getP, deleteP)
		}},
		"a status that changes costs no request": {configure: func(c *ttl.Config) { c.DryRun = true }, run: func(w *fixture) {
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.start()
			w.asked(getP)
			w.put(pod, "shop/p", T+"ttl", "1h", "status", "other")
			w.asked()
		}},
		"a ReplicaSet that its Deployment has left behind": {configure: func(c *ttl.Config) { c.Include = []string{"replicasets.apps"} }, run: func(w *fixture) {
			owned := object(replicaSet, "shop/r", T+"ttl", "1h")
			owned.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: "d", UID: "1", Controller: ptr.To(true)}})
			w.add(owned)
			w.start()
			w.asked()
			w.put(replicaSet, "shop/r", T+"ttl", "1h")
			w.asked("get replicasets.apps shop/r", "delete replicasets.apps shop/r")
		}},
		"a type whose API does not answer, or whose webhook does not, keeps nobody else waiting": {
			configure: func(c *ttl.Config) { c.ConcurrentSyncs = 1 }, run: func(w *fixture) {
				w.beforeRequests(func(r controllertest.Request) error {
					if r.Namespace == "hangs" {
						<-time.After(11 * time.Second) // the client waits for ten
					}
					return nil
				})
				for i := range 60 {
					w.put(configMap, fmt.Sprintf("hangs/c%d", i), T+"ttl", "1h")
				}
				w.start()
				w.put(pod, "shop/p", T+"ttl", "1h")
				w.pass(11 * time.Second)
				w.toldOf("DeletedExpiredTTL")
				w.metric(1, "failing_types")
				w.pass(time.Hour)
				// Each of them is asked for in 70 s, of which the worker is free for a minute.
				if n := len(w.asks()); n < 45 || n > 60 {
					w.Errorf("%d requests in an hour", n)
				}
				w.beforeRequests(nil)
				w.pass(2 * time.Minute)
				w.left(0, 0)
			}},
		"the clock of one type's API is wrong": {run: func(w *fixture) {
			w.start()
			w.skew(-2*time.Hour, "configmaps")
			w.put(configMap, "shop/c", T+"ttl", "1h")
			w.put(configMap, "shop/d", T+"ttl", "1h")
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.toldOf("DeletedExpiredTTL")
			w.pass(time.Hour)
			w.left(0, 2)
			w.toldOf()
			w.skew(0, "")
			w.pass(2 * time.Minute)
			w.toldOf("DeletedExpiredTTL", "DeletedExpiredTTL")
		}},
		"the clock is behind the API server's": {run: func(w *fixture) {
			w.start()
			w.skew(2*time.Hour, "")
			w.put(pod, "shop/p", T+"ttl", "1h")
			w.asked(getP)
		}},
		"the deletion is under way": {run: func(w *fixture) {
			p := object(pod, "shop/p", T+"ttl", "3h")
			p.SetFinalizers([]string{"example.com/wait"})
			w.add(p)
			w.start()
			w.Delete(p)
			w.pass(24 * time.Hour)
			w.asked()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, test.configure)
				test.run(w)
			})
		})
	}
}

// TestWhatCountsForTheBreaker has answers to a deletion, after which another object may be deleted or not.
func TestWhatCountsForTheBreaker(t *testing.T) {
	cm := schema.GroupResource{Resource: "configmaps"}
	for name, test := range map[string]struct {
		err    error
		counts bool
	}{
		"forbidden":         {err: apierrors.NewForbidden(cm, "c", errors.New("by nobody"))},
		"not found":         {err: apierrors.NewNotFound(cm, "c")},
		"conflict":          {err: apierrors.NewConflict(cm, "c", errors.New("changed"))},
		"invalid":           {err: apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, "c", nil)},
		"too many requests": {err: apierrors.NewTooManyRequests("disruption budget", 30)},
		"internal error":    {err: apierrors.NewInternalError(errors.New("webhook")), counts: true},
		"timed out":         {err: apierrors.NewTimeoutError("no answer in 60s", 0), counts: true},
		"server timed out":  {err: apierrors.NewServerTimeout(cm, "delete", 0), counts: true},
		"unavailable":       {err: apierrors.NewServiceUnavailable("proxy"), counts: true},
		"an answer is lost": {counts: true},
		"an unknown answer": {err: apierrors.NewGenericServerResponse(599, "delete", cm, "c", "", 0, true), counts: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, func(c *ttl.Config) { c.MaxDeletionsPerMinute = 1 })
				w.put(configMap, "shop/c", T+"ttl", "1h")
				w.beforeRequests(func(r controllertest.Request) error {
					switch {
					case r.Verb != "delete" || r.Name != "c":
						return nil
					case test.err == nil:
						panic(http.ErrAbortHandler)
					}
					return test.err
				})
				w.start()
				w.put(pod, "shop/p", T+"ttl", "1h")
				if test.counts {
					w.left(1, 1)
				} else {
					w.left(0, 1)
				}
			})
		})
	}
}

// crd returns the definition of Widgets.
func crd() *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "widgets.example.com"},
		"spec": map[string]any{"group": "example.com", "scope": "Namespaced", "names": map[string]any{"kind": "Widget", "plural": "widgets"},
			"versions": []any{map[string]any{"name": "v1", "served": true}}}}}
}

func TestTypesComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil)
		w.start()
		w.metric(2, "watched_types")
		w.add(crd())
		w.pass(3 * time.Second)
		w.metric(3, "watched_types")
		w.put(widget, "shop/w", T+"ttl", "0")
		w.asked("get widgets.example.com shop/w", "delete widgets.example.com shop/w")
		w.put(widget, "shop/later", T+"ttl", "5h")
		w.Delete(crd())
		w.pass(3 * time.Second)
		w.metric(2, "watched_types")
		w.pass(24 * time.Hour)
		w.asked() // the object of the type that is gone is forgotten
	})
}

// TestScope has a manager that may read some namespaces only, so neither types of the cluster nor
// definitions.
func TestScope(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, func(c *ttl.Config) { c.Include = append(c.Include, "clusterroles.rbac.authorization.k8s.io") })
		w.flags = append(w.flags, "--namespaces=shop")
		w.start()
		w.metric(2, "watched_types")
		w.add(crd())
		w.put(widget, "shop/w", T+"ttl", "0")
		w.put(widget, "elsewhere/w", T+"ttl", "0")
		w.pass(5 * time.Minute) // no definition tells of it
		w.asked("get widgets.example.com shop/w", "delete widgets.example.com shop/w")
	})
}
