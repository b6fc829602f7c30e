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
		run     func(f *fixture)
	}{
		"a copy does not change hands while its source is away for a moment, and comes back": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b"), secret("c/s", "attack", "Q:push-to=b")},
			run: func(f *fixture) {
				f.remove("a/s")
				f.pass(4 * time.Second)
				f.Put(secret("a/s", "v", "Q:push-to=b"))
				f.after(time.Minute, "create b/s")
				f.remove("a/s")
				f.after(time.Minute, "create b/s, delete b/s")
				f.Put(secret("a/s", "v", "Q:push-to=b"))
				f.after(time.Second, "create b/s, delete b/s")
				if got := string(f.secret("b/s").Data["k"]); got != "v" {
					f.t.Errorf("b/s holds %s after its owner came back", got)
				}
			},
		},
		"a quota of another namespace is not shown to who pushes there": {
			run: func(f *fixture) {
				f.before("create", func(_ controllertest.Request) error {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s",
						errors.New("exceeded quota: q, requested: secrets=1, used: secrets=41, limited: secrets=41"))
				})
				f.Put(secret("a/s", "v", "Q:push-to=b"))
				f.pass(time.Second)
				if texts := f.Events(); !slices.Equal(texts, []string{"Warning WriteRejected a/s: create Secret b/s: Forbidden"}) {
					f.t.Errorf("Events %q", texts)
				}
			},
		},
		"a restored backup loses no copy while its source's namespace is not there yet": {
			run: func(f *fixture) {
				copied := secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"later/s","uid":"1"}`)
				f.Put(copied)
				f.pass(9 * time.Minute)
				f.Put(namespace("later"), secret("later/s", "v", "Q:push-to=b"))
				f.after(time.Hour, "")
			},
		},
		"the copies of a namespace that stays away go after ten minutes": {
			run: func(f *fixture) {
				f.Put(secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"gone/s","uid":"1"}`))
				f.after(9*time.Minute, "")
				f.after(2*time.Minute, "delete b/s")
			},
		},
		"a replacement that has no annotations for a moment deletes nothing": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b,c")},
			run: func(f *fixture) {
				f.edit("a/s", annotate("Q:push-to"))
				f.pass(4 * time.Second)
				f.edit("a/s", annotate("Q:push-to=b,c"))
				f.after(time.Hour, "create b/s, create c/s")
				f.edit("a/s", annotate("Q:push-to=b"))
				f.after(4*time.Second, "")
				f.after(2*time.Second, "delete c/s")
			},
		},
		"a copy that cannot be created again is not deleted": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.edit("b/s", func(s *corev1.Secret) { s.Immutable = new(true) })
				f.pass(time.Second)
				f.asked()
				f.before("create", func(_ controllertest.Request) error {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s", errors.New("denied by a policy"))
				})
				f.edit("a/s", holding("w"))
				f.after(100*time.Millisecond, "dry run: create b/s")
				if got := string(f.secret("b/s").Data["k"]); got != "v" {
					f.t.Errorf("b/s holds %s", got)
				}
			},
		},
		"a source that grows too large in too many namespaces keeps its copies as they are": {
			objects: append(manyNamespaces(100), secret("a/s", "v", "Q:push-to=n-*")),
			run: func(f *fixture) {
				f.pass(time.Minute)
				f.asked()
				f.edit("a/s", holding(strings.Repeat("v", 1<<20)))
				f.after(time.Minute, "")
				if got := f.copies(); got != 100 {
					f.t.Errorf("%d copies", got)
				}
			},
		},
		"without the flag a native push counts nowhere, and copies that exist stay until their source goes": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.cfg.PushNamespaces = ""
				f.restart()
				f.edit("a/s", holding("w"), annotate("Q:push-to=b,c"))
				f.after(time.Hour, "")
				if got := f.told(); got != "PushForbidden Replicated" {
					f.t.Errorf("Events %s", got)
				}
				f.remove("a/s")
				f.after(time.Minute, "delete b/s")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, nil, tc.objects...)
				tc.run(f)
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
		f := newFixture(t, nil, nil, append(manyNamespaces(400), secret("c/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=c/s"))...)
		f.pass(time.Second)
		f.Put(secret("a/wide", "v", "Q:push-to=n-*"))
		f.pass(time.Second)
		if n := f.copies(); n < 100 || n > 200 {
			t.Fatalf("%d targets are done, want some of 400", n)
		}
		f.edit("c/s", holding("w"))
		f.pass(100 * time.Millisecond)
		if got := string(f.secret("b/t").Data["k"]); got != "w" {
			t.Errorf("another namespace's pull target still holds %s", got)
		}
		f.pass(time.Minute)
		if n := f.copies(); n != 401 {
			t.Errorf("%d copies in the end", n)
		}
	})
}
