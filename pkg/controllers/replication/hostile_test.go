// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestTenantDelaysNoOther has attacks by a writer of objects in one namespace that take time and requests;
// package policy has the others.
func TestTenantDelaysNoOther(t *testing.T) {
	for name, tc := range map[string]struct {
		objects []runtime.Object
		run     func(w *fixture)
	}{
		"a copy does not change hands while its source is away for a moment, and comes back": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b"), secret("c/s", "attack", "Q:push-to=b")},
			run: func(w *fixture) {
				w.remove("a/s")
				w.pass(4 * time.Second)
				w.Put(secret("a/s", "v", "Q:push-to=b"))
				w.after(time.Minute, "create b/s")
				w.remove("a/s")
				w.after(time.Minute, "create b/s, delete b/s")
				w.Put(secret("a/s", "v", "Q:push-to=b"))
				w.after(time.Second, "create b/s, delete b/s")
				if got := string(w.secret("b/s").Data["k"]); got != "v" {
					w.t.Errorf("b/s holds %s after its owner came back", got)
				}
			},
		},
		"a quota of another namespace is not shown to who pushes there": {
			run: func(w *fixture) {
				w.before("create", func(_ controllertest.Request) error {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s",
						errors.New("exceeded quota: q, requested: secrets=1, used: secrets=41, limited: secrets=41"))
				})
				w.Put(secret("a/s", "v", "Q:push-to=b"))
				w.pass(time.Second)
				if texts := w.Events(); !slices.Equal(texts, []string{"Warning WriteRejected a/s: create Secret b/s: Forbidden"}) {
					w.t.Errorf("Events %q", texts)
				}
			},
		},
		"a restored backup loses no copy while its source's namespace is not there yet": {
			run: func(w *fixture) {
				copied := secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"later/s","uid":"1"}`)
				w.Put(copied)
				w.pass(9 * time.Minute)
				w.Put(namespace("later"), secret("later/s", "v", "Q:push-to=b"))
				w.after(time.Hour, "")
			},
		},
		"the copies of a namespace that stays away go after ten minutes": {
			run: func(w *fixture) {
				w.Put(secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"gone/s","uid":"1"}`))
				w.after(9*time.Minute, "")
				w.after(2*time.Minute, "delete b/s")
			},
		},
		"a replacement that has no annotations for a moment deletes nothing": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b,c")},
			run: func(w *fixture) {
				w.edit("a/s", annotate("Q:push-to"))
				w.pass(4 * time.Second)
				w.edit("a/s", annotate("Q:push-to=b,c"))
				w.after(time.Hour, "create b/s, create c/s")
				w.edit("a/s", annotate("Q:push-to=b"))
				w.after(4*time.Second, "")
				w.after(2*time.Second, "delete c/s")
			},
		},
		"a copy that cannot be created again is not deleted": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(w *fixture) {
				w.edit("b/s", func(s *corev1.Secret) { s.Immutable = new(true) })
				w.pass(time.Second)
				w.asked()
				w.before("create", func(_ controllertest.Request) error {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s", errors.New("denied by a policy"))
				})
				w.edit("a/s", holding("w"))
				w.after(100*time.Millisecond, "dry run: create b/s")
				if got := string(w.secret("b/s").Data["k"]); got != "v" {
					w.t.Errorf("b/s holds %s", got)
				}
			},
		},
		"of a source that asks for too much nothing is written": {
			objects: append(manyNamespaces(100), secret("a/s", strings.Repeat("v", 1<<20), "Q:push-to=n-*")),
			run: func(w *fixture) {
				w.after(time.Minute, "")
				if got := w.told(); got != "SpreadExceeded" {
					w.t.Errorf("Events %s", got)
				}
			},
		},
		"a source that grows too large in too many namespaces keeps its copies as they are": {
			objects: append(manyNamespaces(100), secret("a/s", "v", "Q:push-to=n-*")),
			run: func(w *fixture) {
				w.pass(time.Minute)
				w.asked()
				w.edit("a/s", holding(strings.Repeat("v", 1<<20)))
				w.after(time.Minute, "")
				if got := w.copies(); got != 100 {
					w.t.Errorf("%d copies", got)
				}
			},
		},
		"without the flag a native push counts nowhere, and copies that exist stay until their source goes": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(w *fixture) {
				w.cfg.PushNamespaces = ""
				w.restart()
				w.edit("a/s", holding("w"), annotate("Q:push-to=b,c"))
				w.after(time.Hour, "")
				if got := w.told(); got != "PushForbidden Replicated" {
					w.t.Errorf("Events %s", got)
				}
				w.remove("a/s")
				w.after(time.Minute, "delete b/s")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, nil, tc.objects...)
				tc.run(w)
			})
		})
	}
}

func manyNamespaces(n int) (list []runtime.Object) {
	for i := range n {
		list = append(list, namespace(fmt.Sprintf("n-%d", i)))
	}
	return list
}

// TestWideSourceTakesTurns has 400 targets of one namespace due, which take 3 s.
func TestWideSourceTakesTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, nil, append(manyNamespaces(400), secret("c/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=c/s"))...)
		w.pass(time.Second)
		w.Put(secret("a/wide", "v", "Q:push-to=n-*"))
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
