// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// TestNobodyElsePays has what whoever writes objects in one namespace could do to others, as far as it
// takes time and requests; the rest is in package policy.
func TestNobodyElsePays(t *testing.T) {
	for name, tc := range map[string]struct {
		objects []runtime.Object
		run     func(w *world)
	}{
		"a copy does not change hands while its source is away for a moment, and comes back": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b"), secret("c/s", "attack", "Q:push-to=b")},
			run: func(w *world) {
				w.remove("a/s")
				w.pass(4 * time.Second)
				w.put(secret("a/s", "v", "Q:push-to=b"))
				w.pass(time.Minute)
				w.expect("create b/s")
				w.remove("a/s")
				w.pass(time.Minute)
				w.expect("create b/s, delete b/s")
				w.put(secret("a/s", "v", "Q:push-to=b"))
				w.pass(time.Second)
				w.expect("create b/s, delete b/s")
				if got := string(w.secret("b/s").Data["k"]); got != "v" {
					w.t.Errorf("b/s holds %s after its owner came back", got)
				}
			},
		},
		"a quota of another namespace is not shown to who pushes there": {
			run: func(w *world) {
				w.client.PrependReactor("create", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, apierrors.NewForbidden(ResourceOf(policy.Secret).GroupResource(), "s",
						errors.New("exceeded quota: q, requested: secrets=1, used: secrets=41, limited: secrets=41"))
				})
				w.put(secret("a/s", "v", "Q:push-to=b"))
				w.pass(time.Second)
				text := <-w.recorder.Events
				if text != "Warning WriteRejected create Secret b/s: Forbidden" {
					w.t.Errorf("Event %q", text)
				}
			},
		},
		"a restored backup loses no copy while its source's namespace is not there yet": {
			run: func(w *world) {
				copied := secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"later/s","uid":"1"}`)
				w.put(copied)
				w.pass(9 * time.Minute)
				w.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "later"}}, secret("later/s", "v", "Q:push-to=b"))
				w.pass(time.Hour)
				w.expect("")
			},
		},
		"the copies of a namespace that stays away go after ten minutes": {
			run: func(w *world) {
				w.put(secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"gone/s","uid":"1"}`))
				w.pass(9 * time.Minute)
				w.expect("")
				w.pass(2 * time.Minute)
				w.expect("delete b/s")
			},
		},
		"a replacement that has no annotations for a moment deletes nothing": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b,c")},
			run: func(w *world) {
				w.edit("a/s", annotate("Q:push-to"))
				w.pass(4 * time.Second)
				w.edit("a/s", annotate("Q:push-to=b,c"))
				w.pass(time.Hour)
				w.expect("create b/s, create c/s")
				w.edit("a/s", annotate("Q:push-to=b"))
				w.pass(4 * time.Second)
				w.expect("")
				w.pass(2 * time.Second)
				w.expect("delete c/s")
			},
		},
		"a copy that cannot be created again is not deleted": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(w *world) {
				w.edit("b/s", func(s *corev1.Secret) { s.Immutable = new(true) })
				w.pass(time.Second)
				w.client.ClearActions()
				w.client.PrependReactor("create", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, apierrors.NewForbidden(ResourceOf(policy.Secret).GroupResource(), "s", errors.New("denied by a policy"))
				})
				w.edit("a/s", holding("w"))
				w.pass(100 * time.Millisecond)
				w.expect("dry run: create b/s")
				if got := string(w.secret("b/s").Data["k"]); got != "v" {
					w.t.Errorf("b/s holds %s", got)
				}
			},
		},
		"of a source that asks for too much nothing is written": {
			objects: append(manyNamespaces(100), secret("a/s", strings.Repeat("v", 1<<20), "Q:push-to=n-*")),
			run: func(w *world) {
				w.pass(time.Minute)
				w.expect("")
				if got := w.told(); got != "SpreadExceeded" {
					w.t.Errorf("Events %s", got)
				}
			},
		},
		"a source that grows too large in too many namespaces keeps its copies as they are": {
			objects: append(manyNamespaces(100), secret("a/s", "v", "Q:push-to=n-*")),
			run: func(w *world) {
				w.pass(time.Minute)
				w.client.ClearActions()
				w.edit("a/s", holding(strings.Repeat("v", 1<<20)))
				w.pass(time.Minute)
				w.expect("")
				if got := w.copies(); got != 100 {
					w.t.Errorf("%d copies", got)
				}
			},
		},
		"without the flag a native push counts nowhere, and copies that exist stay until their source goes": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(w *world) {
				w.cfg.PushNamespaces = ""
				w.restart()
				w.edit("a/s", holding("w"), annotate("Q:push-to=b,c"))
				w.pass(time.Hour)
				w.expect("")
				if got := w.told(); got != "PushForbidden Replicated" {
					w.t.Errorf("Events %s", got)
				}
				w.remove("a/s")
				w.pass(time.Minute)
				w.expect("delete b/s")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 0, nil, tc.objects...)
				tc.run(w)
			})
		})
	}
}

func manyNamespaces(n int) (list []runtime.Object) {
	for i := range n {
		list = append(list, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n-%d", i)}})
	}
	return list
}

// TestAWideSourceTakesTurnsWithOthers has 400 targets of one namespace due, which take 3 s.
func TestAWideSourceTakesTurnsWithOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 0, nil, append(manyNamespaces(400), secret("c/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=c/s"))...)
		w.pass(time.Second)
		w.put(secret("a/wide", "v", "Q:push-to=n-*"))
		w.pass(time.Second)
		if n := w.copies(); n < 100 || n > 200 {
			t.Fatalf("%d targets are done, want some of 400", n)
		}
		w.edit("c/s", holding("w"))
		w.pass(100 * time.Millisecond)
		if got := string(w.secret("b/t").Data["k"]); got != "w" {
			t.Errorf("another namespace's pull target still holds %s", got)
		}
		w.pass(time.Minute)
		if n := w.copies(); n != 401 {
			t.Errorf("%d copies in the end", n)
		}
	})
}

// TestAnEventIsNotExpandedWhereItArrives holds a handler to constant work, whatever an object asks for.
func TestAnEventIsNotExpandedWhereItArrives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 0, nil, append(manyNamespaces(500), secret("a/s", "v", "Q:push-to=*"))...)
		w.pass(time.Minute)
		cached, _, err := w.c.in.Objects[policy.Secret].GetIndexer().GetByKey("a/s")
		if err != nil {
			t.Fatal(err)
		}
		event := controllers.Event[policy.Cached]{Old: cached.(policy.Cached), New: cached.(policy.Cached)}
		if got := w.c.objectChanged(policy.Secret, event); len(got) != 2 {
			t.Errorf("the change of a source with 500 targets enqueues %d tasks, want 2", len(got))
		}
		obj, _, _ := w.c.in.Namespaces.GetIndexer().GetByKey("n-1")
		if got := namespaceChanged(controllers.Event[metav1.Object]{New: obj.(metav1.Object)}); len(got) != 1 {
			t.Errorf("a new namespace enqueues %d tasks, want 1", len(got))
		}
	})
}
