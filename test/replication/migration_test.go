// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestMigrationWritesNothing has objects as the originals leave them. The switch must write nothing,
// except for one marker on each push copy of the replicator, and the next change the right objects.
func TestMigrationWritesNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		setup   func(f *fixture)
		markers []string // the writes of the switch
		change  func(f *fixture)
		await   []string
		writes  []string // after the change
	}{
		"from the reflector": {
			setup: func(f *fixture) {
				f.secret("a/s", "k=v", f.annotated("R:reflection-allowed=true", "R:reflection-auto-enabled=true",
					"R:reflection-allowed-namespaces={b},{c}", "R:reflection-auto-namespaces={b},{c}"))
				version := f.get("a/s").ResourceVersion
				madeByReflector := func(auto string) func(*corev1.Secret) {
					return f.annotated("R:reflects={a}/s", "R:auto-reflects="+auto, "R:reflected-version="+version, "R:reflected-at=2026-01-01T00:00:00.1234567+00:00")
				}
				f.secret("b/s", "k=v", madeByReflector("True"))
				f.secret("c/s", "k=v", madeByReflector("True"), f.annotated("R:reflected-at=\"2024-01-01T00:00:00+00:00\""))
				f.secret("b/mirror", "k=v", madeByReflector("False"), func(s *corev1.Secret) { s.Labels = map[string]string{"own": "1"} })
				f.secret("c/mirror", "", f.annotated("R:reflects={a}/gone"))
				f.secret("a/foreign", "k=v", f.annotated("R:reflection-allowed=true", "R:reflection-auto-enabled=true", "R:reflection-auto-namespaces={b}"))
				f.secret("b/foreign", "own=1", f.annotated("example.com/x=y"))
				// A mirror that the reflector has converted: a tool applies it.
				f.secret("b/converted", "k=v", madeByReflector("True"), f.annotated("R:reflects={a}/converted", "kubectl.kubernetes.io/last-applied-configuration={}"))
				f.secret("a/converted", "k=v", f.annotated("R:reflection-allowed=true", "R:reflection-auto-enabled=true", "R:reflection-auto-namespaces={c}"))
				f.secret("c/converted", "k=v", madeByReflector("True"), f.annotated("R:reflects={a}/converted"))
			},
			change: func(f *fixture) {
				f.edit("a/s", holding("k=w"))
				f.edit("a/converted", holding("k=w"))
			},
			await:  []string{"b/s: k=w", "c/s: k=w", "b/mirror: k=w", "c/mirror: ", "b/foreign: own=1", "b/converted: k=w", "c/converted: k=w"},
			writes: []string{"update b/s", "update c/s", "update b/mirror", "update b/converted", "update c/converted"},
		},
		"from the replicator": {
			setup: func(f *fixture) {
				f.secret("a/s", "k=v j=w", f.annotated("M:replicate-to={b}", "M:replicate-to-matching=group={id},name=c",
					"M:replication-allowed=true", "M:replication-allowed-namespaces={b}"), func(s *corev1.Secret) { s.Labels = map[string]string{"team": "x"} })
				madeByReplicator := f.annotated("M:replicated-at=2026-01-01T00:00:00Z", "M:replicated-from-version="+f.get("a/s").ResourceVersion, "M:replicated-keys=j,k")
				labelled := func(s *corev1.Secret) { s.Labels = map[string]string{"team": "x"} }
				f.secret("b/s", "k=v j=w", madeByReplicator, labelled)
				f.secret("c/s", "k=v j=w own=1", madeByReplicator, labelled)
				f.secret("b/pulled", "k=v j=w own=1", madeByReplicator, f.annotated("M:replicate-from={a}/s"))
				f.secret("c/orphan", "k=v", f.annotated("M:replicated-at=2026-01-01T00:00:00Z", "M:replicated-from-version=1", "M:replicated-keys=k"))
				f.secret("c/pulled", "own=1", f.annotated("M:replicate-from={a}/s"))
			},
			markers: []string{"update b/s", "update c/s"},
			change:  func(f *fixture) { f.edit("a/s", holding("j=new")) },
			await:   []string{"b/s: j=new", "c/s: j=new own=1", "b/pulled: j=new own=1", "c/orphan: k=v", "c/pulled: own=1"},
			writes:  []string{"update b/s", "update c/s", "update b/pulled"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "c")
			tc.setup(f)
			before := contents(f)
			shared.RunLeader(fleet.Context(t), t, args()...)
			f.settle()
			fleet.Eventually(f.ctx, f, func() error {
				if len(f.writes()) < len(tc.markers) {
					return errMissing
				}
				return nil
			})
			f.settle()
			f.expectWrites(tc.markers...)
			for name, want := range before {
				if got := f.content(name); got != want {
					t.Errorf("the switch has changed %s from %q to %q", name, want, got)
				}
			}
			tc.change(f)
			f.waitForContent(tc.await...)
			f.settle()
			f.expectWrites(append(tc.markers, tc.writes...)...)
			for _, object := range []string{"b/s", "c/s"} {
				s := f.get(object)
				for key := range s.Annotations {
					if !strings.HasPrefix(key, "quartermaster.dev/") && !strings.Contains(key, "reflect") && !strings.Contains(key, "replicated-") {
						t.Errorf("%s has the annotation %s", object, key)
					}
				}
			}
		})
	}
}

type missing struct{}

func (missing) Error() string { return "a marker is missing" }

var errMissing error = missing{}

// contents returns the content of all Secrets of the group.
func contents(f *fixture) map[string]string {
	f.Helper()
	all := map[string]string{}
	for name, namespace := range f.namespaces {
		for object := range strings.FieldsSeq(f.kubectl("get", "secrets", "-n", namespace, "-o", "name")) {
			all[name+"/"+strings.TrimPrefix(object, "secret/")] = f.content(name + "/" + strings.TrimPrefix(object, "secret/"))
		}
	}
	return all
}
