// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// TestReconcile has the rules of docs/controllers/replication.md that are about requests, time and crashes.
// Package policy has the others.
func TestReconcile(t *testing.T) {
	for name, tc := range map[string]struct {
		lag       time.Duration
		configure func(*replication.Config)
		flags     []string
		objects   []runtime.Object
		run       func(f *fixture)
	}{
		"an automatic source reaches every namespace that is not protected": {
			objects: []runtime.Object{secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")},
			run: func(f *fixture) {
				f.expect("create b/s, create c/s")
				if got := f.told(); got != "NamespaceProtected Replicated" {
					f.t.Errorf("Events %s", got)
				}
				if got := f.count("targets", "dialect", "reflector", "state", "in_sync"); got != 2 {
					f.t.Errorf("%v targets in sync, want 2", got)
				}
			},
		},
		"a namespace that is created gets its copies": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=new-*")},
			run: func(f *fixture) {
				f.Put(namespace("new-1"))
				f.after(time.Second, "create new-1/s")
			},
		},
		"an orphan is found after a restart": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.restart(func() { f.remove("a/s") })
				f.after(6*time.Second, "delete b/s")
			},
		},
		"M16: markers are added a few per second": {
			run: func(f *fixture) {
				for i := range 20 {
					name := fmt.Sprintf("s%d", i)
					f.Put(secret("b/"+name, "v", "M:replicated-keys=k", "M:replicated-at=x"), secret("a/"+name, "v", "M:replicate-to=b"))
					f.edit("b/"+name, annotate("M:replicated-from-version="+f.secret("a/"+name).ResourceVersion))
				}
				f.pass(2 * time.Second)
				if n := f.copies(); n < 8 || n > 17 {
					f.t.Errorf("%d markers after 2 s, want about 15", n)
				}
				f.edit("a/s19", holding("w"))
				f.edit("a/s18", holding("w"))
				f.pass(time.Millisecond)
				if a, b := string(f.secret("b/s19").Data["k"]), string(f.secret("b/s18").Data["k"]); a != "w" || b != "w" {
					f.t.Errorf("an update waits for the turn of a marker: %s, %s", a, b)
				}
				f.pass(3 * time.Second)
				if n := f.copies(); n != 20 {
					f.t.Errorf("%d markers after 5 s, want all 20", n)
				}
			},
		},
		"M21: a source that goes during a fan-out leaves what was made, which is deleted": {
			objects: manyNamespaces(500),
			run: func(f *fixture) {
				created := 0
				f.before("create", func(_ controllertest.Request) error {
					if created++; created == 100 {
						f.remove("a/s")
					}
					return nil
				})
				f.Put(secret("a/s", "v", "M:replicate-to=n-.*"))
				f.pass(10 * time.Second)
				if created < 100 || created > 200 {
					f.t.Errorf("%d creations, want about 100", created)
				}
				if left := f.copies(); left != 0 {
					f.t.Errorf("%d copies are left", left)
				}
			},
		},
		"N9: a refused write is tried again, and told once": {
			run: func(f *fixture) {
				var full atomic.Bool
				full.Store(true)
				f.before("create", func(r controllertest.Request) error {
					if r.Namespace == "b" && full.Load() {
						return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s", errors.New("exceeded quota: q"))
					}
					return nil
				})
				f.Put(secret("a/s", "v", "Q:push-to=b,c"))
				f.after(30*time.Second, "create b/s, create b/s, create b/s, create b/s, create b/s, create c/s")
				if got := f.told(); got != "Replicated WriteRejected" {
					f.t.Errorf("Events %s", got)
				}
				full.Store(false)
				f.after(time.Minute, "create b/s")
				if got := f.count("writes_total", "result", "error"); got != 5 {
					f.t.Errorf("%v errors, want 5", got)
				}
			},
		},
		"a target that appears while the source is read is not written as if it were a new copy": {
			run: func(f *fixture) {
				var once sync.Once
				f.before("get", func(_ controllertest.Request) error {
					once.Do(func() {
						target := secret("b/s", "", "Q:pull-from=a/s")
						target.Labels = map[string]string{"theirs": "yes"}
						f.Put(target)
						<-time.After(time.Second) // until the cache has it
					})
					return nil
				})
				f.Put(secret("a/s", "v", "Q:push-to=b", "Q:allow-pull=b"))
				f.pass(10 * time.Second)
				got := f.secret("b/s")
				if got.Labels["theirs"] != "yes" || got.Annotations["quartermaster.dev/pull-from"] != "a/s" || string(got.Data["k"]) != "v" {
					f.t.Errorf("labels %v, annotations %v, keys %d", got.Labels, got.Annotations, len(got.Data))
				}
			},
		},
		"N10: a namespace that terminates before the cache knows is no error": {
			run: func(f *fixture) {
				f.before("create", func(r controllertest.Request) error {
					if r.Namespace == "c" {
						return nil
					}
					err := apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s", errors.New("is being terminated"))
					err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
					return err
				})
				f.Put(secret("a/s", "v", "Q:push-to=b,c"))
				f.after(9*time.Minute, "create b/s, create b/s, create c/s") // again after namespaceRetry
				if got := f.count("writes_total", "result", "error"); got != 0 {
					f.t.Errorf("%v errors", got)
				}
			},
		},
		"N11: a conflict is decided on again": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.after(time.Second, "create b/s")
				conflicts := 1
				f.before("update", func(_ controllertest.Request) error {
					if conflicts == 0 {
						return nil
					}
					conflicts--
					return apierrors.NewConflict(schema.GroupResource{Resource: "secrets"}, "s", errors.New("changed"))
				})
				f.edit("a/s", holding("w"))
				f.after(500*time.Millisecond, "get a/s, get a/s, get b/s, get b/s, update b/s, update b/s", "get", "create", "update", "delete")
			},
		},
		"a creation that comes too late is decided on again": {
			lag:     10 * time.Second,
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=c")},
			run: func(f *fixture) {
				f.pass(time.Minute)
				f.asked()
				f.Put(secret("b/s", "own"))
				f.edit("a/s", annotate("Q:push-to=b,c"))
				f.pass(time.Minute)
				if got := string(f.secret("b/s").Data["k"]); got != "own" {
					f.t.Errorf("the foreign object holds %s", got)
				}
			},
		},
		"N15: a dry run persists nothing": {
			configure: func(c *replication.Config) { c.DryRun = true },
			objects:   []runtime.Object{secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")},
			run: func(f *fixture) {
				f.expect("dry run: create b/s, dry run: create c/s")
				if got := f.told(); got != "" {
					f.t.Errorf("Events %s", got)
				}
			},
		},
		"N18: the live source decides, whatever the cache says": {
			lag:     time.Minute,
			objects: []runtime.Object{secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "old", "Q:pull-from=a/none")},
			run: func(f *fixture) {
				f.edit("b/t", annotate("Q:pull-from=a/s"))
				f.pass(30 * time.Second)
				f.edit("a/s", annotate("Q:allow-pull"))
				f.after(10*time.Minute, "")
			},
		},
		"N18: a copy is not deleted if the live source wants it": {
			lag:     time.Minute,
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.pass(5 * time.Minute)
				f.asked()
				f.edit("a/s", annotate("Q:push-to"))
				f.pass(30 * time.Second)
				f.edit("a/s", annotate("Q:push-to=b"))
				f.after(10*time.Minute, "get a/s, get b/s", "get", "create", "update", "delete")
			},
		},
		"a source that went while its namespace was disabled is missed when the label goes": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.Put(disabled("a"))
				f.pass(time.Second)
				f.remove("a/s")
				f.after(time.Hour, "create b/s")
				f.Put(namespace("a"))
				f.after(6*time.Second, "delete b/s")
			},
		},
		"a source that went while its namespace was disabled is missed when the namespace goes": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.Put(disabled("a"))
				f.pass(time.Second)
				f.remove("a/s")
				f.after(time.Hour, "create b/s")
				f.Delete(disabled("a"))
				f.after(9*time.Minute, "")
				f.after(2*time.Minute, "delete b/s")
			},
		},
		"with namespaces a source that cannot be read is not gone": {
			flags: []string{"--namespaces=b"},
			objects: []runtime.Object{
				secret("b/t", "v", "M:replicate-from=a/s", "M:replicated-from-version=1", "M:replicated-keys=k",
					`Q:source={"copy":"b/t","dialect":"replicator","mode":"pull","source":"a/s","uid":"1"}`),
				secret("b/s", "v", "R:reflects=a/s", "R:auto-reflects=True"),
			},
			run: func(f *fixture) {
				f.after(time.Hour, "", "get", "create", "update", "delete")
			},
		},
		"N19: what is in sync costs no request": {
			objects: append(manyNamespaces(300), secret("a/s", "v", "Q:push-to=n-*")),
			run: func(f *fixture) {
				f.pass(time.Minute)
				if n := f.copies(); n != 300 {
					f.t.Fatalf("%d copies", n)
				}
				f.restart()
				f.edit("a/s", annotate("x=y"))
				f.after(time.Minute, "", "get", "create", "update", "delete")
			},
		},
		"N20: a repair that does not last is made ever more seldom": {
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.pass(time.Second)
				f.asked()
				for range 600 {
					f.edit("b/s", holding("placeholder"))
					f.pass(time.Second)
				}
				if n := len(f.asked("update")); n < 5 || n > 11 {
					f.t.Errorf("%d updates, want at most 11", n)
				}
				if got := f.told(); !strings.Contains(got, "DriftFight") {
					f.t.Errorf("Events %s", got)
				}
			},
		},
		"N20: also a dry run": {
			configure: func(c *replication.Config) { c.DryRun = true },
			objects:   []runtime.Object{secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=a/s")},
			run: func(f *fixture) {
				for range 600 {
					f.edit("b/t", holding("placeholder"))
					f.pass(time.Second)
				}
				if n := len(f.asked("update")); n < 5 || n > 12 {
					f.t.Errorf("%d dry runs, want at most 12", n)
				}
			},
		},
		"with namespaces no Namespace is read": {
			flags:   []string{"--namespaces=a,b"},
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=*")},
			run:     func(f *fixture) { f.expect("create b/s") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, tc.configure, tc.flags, tc.objects...)
				f.Lag(tc.lag, "secrets")
				tc.run(f)
			})
		})
	}
}

func disabled(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{policy.NamespaceLabel: "disabled"}}}
}

func TestReconcileReportsDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil, secret("a/s", "v", "Q:push-to=*"))
		f.told()
		f.remove("b/s")
		f.pass(11 * time.Minute)
		f.remove("c/s")
		f.pass(time.Second)
		want := "Normal DriftRepaired a/s: repaired c/s"
		if all := strings.Join(f.Events(), "\n"); !strings.Contains(all, want) {
			t.Errorf("no %q in\n%s", want, all)
		}
	})
}
