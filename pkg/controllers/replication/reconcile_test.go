// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
)

// TestReconcile has the rules of docs/controllers/replication.md that are about requests, time and crashes.
// Package policy has the others.
func TestReconcile(t *testing.T) {
	// fight changes a target for ten minutes.
	fight := func(f *fixture, target string) {
		for range 600 {
			f.edit(target, holding("placeholder")).pass(time.Second)
		}
		if n := len(f.asked("update")); n < 5 || n > 12 {
			f.t.Errorf("%d updates, want at most 12", n)
		}
	}
	// disable has the namespace a disabled, and then its source deleted.
	disable := func(f *fixture) {
		f.Put(disabled("a"))
		f.pass(time.Second)
		f.remove("a/s").after(time.Hour, "create b/s")
	}
	runCases(t, map[string]reconcileCase{
		"an automatic source reaches every namespace that is not protected": given(func(f *fixture) {
			f.expect("create b/s, create c/s")
			f.told("NamespaceProtected Replicated")
			f.count(2, "targets", "dialect", "reflector", "state", "in_sync")
		}, secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")),
		"a namespace that is created gets its copies": given(func(f *fixture) { f.Put(namespace("new-1")); f.after(time.Second, "create new-1/s") },
			secret("a/s", "v", "Q:push-to=new-*")),
		"an orphan is found after a restart": given(func(f *fixture) { f.restart(func() { f.remove("a/s") }); f.after(6*time.Second, "delete b/s") },
			secret("a/s", "v", "Q:push-to=b")),
		"M16: markers are added a few per second": given(func(f *fixture) {
			for i := range 20 {
				name := fmt.Sprintf("s%d", i)
				f.Put(secret("b/"+name, "v", "M:replicated-keys=k", "M:replicated-at=x"), secret("a/"+name, "v", "M:replicate-to=b"))
				f.edit("b/"+name, annotate("M:replicated-from-version="+f.secret("a/"+name).ResourceVersion))
			}
			f.pass(2 * time.Second)
			f.copies(8, 17)
			f.edit("a/s19", holding("w"))
			f.edit("a/s18", holding("w")).pass(time.Millisecond)
			f.holds("b/s19", "w") // an update does not wait for the turn of a marker
			f.holds("b/s18", "w")
			f.pass(3 * time.Second)
			f.copies(20, 20)
		}),
		"M21: a source that goes during a fan-out leaves what was made, which is deleted": given(func(f *fixture) {
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
			f.copies(0, 0)
		}, manyNamespaces(500)...),
		"N9: a refused write is tried again, and told once, without the quota of its namespace": given(func(f *fixture) {
			left := 5
			f.before("create", func(r controllertest.Request) error {
				if r.Namespace != "b" || left == 0 {
					return nil
				}
				left--
				return refusal("exceeded quota: q, requested: secrets=1, used: secrets=41, limited: secrets=41")
			})
			f.Put(secret("a/s", "v", "Q:push-to=b,c"))
			f.after(30*time.Second, "create b/s, create b/s, create b/s, create b/s, create b/s, create c/s")
			f.told("Replicated WriteRejected")
			// Whoever pushes is not shown another namespace's quota.
			f.says("Warning WriteRejected a/s: create Secret b/s: Forbidden")
			f.after(time.Minute, "create b/s")
			f.count(5, "writes_total", "result", "error")
		}),
		"a target that appears while the source is read is not written as if it were a new copy": given(func(f *fixture) {
			f.once("get", func() error {
				target := secret("b/s", "", "Q:pull-from=a/s")
				target.Labels = map[string]string{"theirs": "yes"}
				f.Put(target)
				<-time.After(time.Second) // until the cache has it
				return nil
			})
			f.Put(secret("a/s", "v", "Q:push-to=b", "Q:allow-pull=b"))
			f.pass(10 * time.Second)
			got := f.secret("b/s")
			if got.Labels["theirs"] != "yes" || got.Annotations["quartermaster.dev/pull-from"] != "a/s" || string(got.Data["k"]) != "v" {
				f.t.Errorf("labels %v, annotations %v, keys %d", got.Labels, got.Annotations, len(got.Data))
			}
		}),
		"N10: a namespace that terminates before the cache knows is no error": given(func(f *fixture) {
			f.before("create", func(r controllertest.Request) error {
				if r.Namespace == "c" {
					return nil
				}
				err := refusal("is being terminated")
				err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
				return err
			})
			f.Put(secret("a/s", "v", "Q:push-to=b,c"))
			f.after(9*time.Minute, "create b/s, create b/s, create c/s") // again after namespaceRetry
			f.count(0, "writes_total", "result", "error")
		}),
		"N11: a conflict is decided on again": given(func(f *fixture) {
			f.after(time.Second, "create b/s")
			f.once("update", func() error { return apierrors.NewConflict(corev1.Resource("secrets"), "s", errors.New("changed")) })
			f.edit("a/s", holding("w")).after(500*time.Millisecond, "get a/s, get a/s, get b/s, get b/s, update b/s, update b/s", allVerbs...)
		}, secret("a/s", "v", "Q:push-to=b")),
		"a creation that comes too late is decided on again": {
			lag:     10 * time.Second,
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=c")},
			run: func(f *fixture) {
				f.after(time.Minute, "create c/s")
				f.Put(secret("b/s", "own"))
				f.edit("a/s", annotate("Q:push-to=b,c")).pass(time.Minute)
				f.holds("b/s", "own")
			},
		},
		"N15: a dry run persists nothing": {
			configure: func(c *replication.Config) { c.DryRun = true },
			objects:   []runtime.Object{secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")},
			run:       func(f *fixture) { f.expect("dry run: create b/s, dry run: create c/s"); f.told("") },
		},
		"N18: the live source decides, whatever the cache says": {
			lag:     time.Minute,
			objects: []runtime.Object{secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "old", "Q:pull-from=a/none")},
			run: func(f *fixture) {
				f.edit("b/t", annotate("Q:pull-from=a/s")).pass(30 * time.Second)
				f.edit("a/s", annotate("Q:allow-pull")).after(10*time.Minute, "")
			},
		},
		"N18: a copy is not deleted if the live source wants it": {
			lag:     time.Minute,
			objects: []runtime.Object{secret("a/s", "v", "Q:push-to=b")},
			run: func(f *fixture) {
				f.after(5*time.Minute, "create b/s")
				f.edit("a/s", annotate("Q:push-to")).pass(30 * time.Second)
				f.edit("a/s", annotate("Q:push-to=b")).after(10*time.Minute, "get a/s, get b/s", allVerbs...)
			},
		},
		"a source that went while its namespace was disabled is missed when the label goes": given(func(f *fixture) { disable(f); f.Put(namespace("a")); f.after(6*time.Second, "delete b/s") },
			secret("a/s", "v", "Q:push-to=b")),
		"a source that went while its namespace was disabled is missed when the namespace goes": given(func(f *fixture) {
			disable(f)
			f.Delete(disabled("a"))
			f.after(9*time.Minute, "")
			f.after(2*time.Minute, "delete b/s")
		}, secret("a/s", "v", "Q:push-to=b")),
		"with namespaces a source that cannot be read is not gone": {
			flags: []string{"--namespaces=b"},
			objects: []runtime.Object{
				secret("b/t", "v", "M:replicate-from=a/s", "M:replicated-from-version=1", "M:replicated-keys=k",
					`Q:source={"copy":"b/t","dialect":"replicator","mode":"pull","source":"a/s","uid":"1"}`),
				secret("b/s", "v", "R:reflects=a/s", "R:auto-reflects=True"),
			},
			run: func(f *fixture) { f.after(time.Hour, "", allVerbs...) },
		},
		"N19: what is in sync costs no request": given(func(f *fixture) {
			f.pass(time.Minute)
			f.copies(300, 300)
			f.restart()
			f.edit("a/s", annotate("x=y")).after(time.Minute, "", allVerbs...)
		}, manyNamespaces(300, secret("a/s", "v", "Q:push-to=n-*"))...),
		"N20: a repair that does not last is made ever more seldom": given(func(f *fixture) {
			f.after(time.Second, "create b/s")
			fight(f, "b/s")
			f.says("Warning DriftFight a/s: b/s is changed again and again, at last by test; it is repaired ever more seldom")
		}, secret("a/s", "v", "Q:push-to=b")),
		"N20: also a dry run": {
			configure: func(c *replication.Config) { c.DryRun = true },
			objects:   []runtime.Object{secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=a/s")},
			run:       func(f *fixture) { fight(f, "b/t") },
		},
		"a drift is reported, and the next one again after ten minutes": given(func(f *fixture) {
			f.remove("b/s").pass(11 * time.Minute)
			f.remove("c/s").pass(time.Second)
			f.says("Normal DriftRepaired a/s: repaired c/s")
		}, secret("a/s", "v", "Q:push-to=*")),
		"with namespaces no Namespace is read": {
			flags: []string{"--namespaces=a,b"}, objects: []runtime.Object{secret("a/s", "v", "Q:push-to=*")}, run: func(f *fixture) { f.expect("create b/s") },
		},
	})
}

// TestTenantDelaysNoOther has attacks by a writer of objects in one namespace that take time and requests;
// package policy has the others.
func TestTenantDelaysNoOther(t *testing.T) {
	runCases(t, map[string]reconcileCase{
		"a copy does not change hands while its source is away for a moment, and comes back": given(func(f *fixture) {
			f.remove("a/s").pass(4 * time.Second)
			f.Put(secret("a/s", "v", "Q:push-to=b"))
			f.after(time.Minute, "create b/s")
			f.remove("a/s").after(time.Minute, "create b/s, delete b/s")
			f.Put(secret("a/s", "v", "Q:push-to=b"))
			f.after(time.Second, "create b/s, delete b/s")
			f.holds("b/s", "v")
		}, secret("a/s", "v", "Q:push-to=b"), secret("c/s", "attack", "Q:push-to=b")),
		"a restored backup loses no copy while its source's namespace is not there yet": given(func(f *fixture) {
			f.Put(secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"later/s","uid":"1"}`))
			f.pass(9 * time.Minute)
			f.Put(namespace("later"), secret("later/s", "v", "Q:push-to=b"))
			f.after(time.Hour, "")
		}),
		"a replacement that has no annotations for a moment deletes nothing": given(func(f *fixture) {
			f.edit("a/s", annotate("Q:push-to")).pass(4 * time.Second)
			f.edit("a/s", annotate("Q:push-to=b,c")).after(time.Hour, "create b/s, create c/s")
			f.edit("a/s", annotate("Q:push-to=b")).after(4*time.Second, "")
			f.after(2*time.Second, "delete c/s")
		}, secret("a/s", "v", "Q:push-to=b,c")),
		"a copy that cannot be created again is not deleted": given(func(f *fixture) {
			f.edit("b/s", func(s *corev1.Secret) { s.Immutable = new(true) }).after(time.Second, "create b/s")
			f.before("create", func(controllertest.Request) error { return refusal("denied by a policy") })
			f.edit("a/s", holding("w")).after(100*time.Millisecond, "dry run: create b/s")
			f.holds("b/s", "v")
		}, secret("a/s", "v", "Q:push-to=b")),
		"a source that grows too large in too many namespaces keeps its copies as they are": given(func(f *fixture) {
			f.pass(time.Minute)
			f.asked()
			f.edit("a/s", holding(strings.Repeat("v", 1<<20))).after(time.Minute, "")
			f.copies(100, 100)
		}, manyNamespaces(100, secret("a/s", "v", "Q:push-to=n-*"))...),
		"without the flag a native push counts nowhere, and copies that exist stay until their source goes": given(func(f *fixture) {
			f.cfg.PushNamespaces = ""
			f.restart()
			f.edit("a/s", holding("w"), annotate("Q:push-to=b,c")).after(time.Hour, "")
			f.told("PushForbidden Replicated")
			f.remove("a/s").after(time.Minute, "delete b/s")
		}, secret("a/s", "v", "Q:push-to=b")),
		"a source with 400 targets, which take 3 s, takes turns with others": given(func(f *fixture) {
			f.pass(time.Second)
			f.Put(secret("a/wide", "v", "Q:push-to=n-*"))
			f.pass(time.Second)
			f.copies(100, 200)
			f.edit("c/s", holding("w")).pass(100 * time.Millisecond)
			f.holds("b/t", "w")
			f.pass(time.Minute)
			f.copies(401, 401)
		}, manyNamespaces(400, secret("c/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=c/s"))...),
	})
}
