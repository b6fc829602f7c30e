// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestReconcileScope(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	rolled := []string{env(known2, "web/"+cmVar, h2)}
	web := func() runtime.Object { return auto(pod(reads("app-config")), known1) }
	namespace := func(labels map[string]string) *corev1.Namespace {
		n := &corev1.Namespace{}
		n.Name, n.Labels = "shop", labels
		return n
	}
	selector := func(items ...string) func(*config) {
		return func(c *config) { c.NamespaceSelector = items }
	}
	prod := map[string]string{"env": "prod"}
	labelled := func(c *corev1.ConfigMap) *corev1.ConfigMap { c.Labels = prod; return c }
	sourceSelector := func(c *config) { c.SourceSelector = []string{"env:prod"} }

	runCases(t, map[string]reconcileCase{
		"a namespace outside the selector is left alone":     {configure: selector("env=prod"), objects: objs{namespace(nil), cm1(), web()}, change: changeCM},
		"a namespace that the selector selects is worked in": {configure: selector("env:*"), objects: objs{namespace(prod), cm1(), web()}, change: changeCM, want: rolled},
		"a namespace that becomes selected is caught up with": {
			configure: selector("env=prod"), objects: objs{namespace(nil), cm1(), web()},
			change: func(f *fixture) { changeCM(f); f.pass(time.Minute); f.Put(namespace(prod)) },
			want:   rolled,
		},
		"Secrets of Helm releases do not count": {
			objects: objs{helmSecret("1"), auto(pod(readsSecret("db")), stateOf(dbKey, ""))},
			change:  func(f *fixture) { f.Put(helmSecret("2")) },
		},
		"only the namespaces of the flag are worked in": {configure: func(c *config) { c.IncludeNamespaces = []string{"other"} }, objects: objs{cm1(), web()}, change: changeCM},
		"an excluded namespace is left alone":           {configure: func(c *config) { c.ExcludeNamespaces = []string{"shop"} }, objects: objs{cm1(), web()}, change: changeCM},
		"a namespace that is included and excluded is left alone": {
			configure: func(c *config) { c.IncludeNamespaces, c.ExcludeNamespaces = []string{"shop"}, []string{"shop"} },
			objects:   objs{cm1(), web()}, change: changeCM,
		},
		"including namespaces switches the selector off": {
			configure: func(c *config) { c.IncludeNamespaces, c.NamespaceSelector = []string{"shop"}, []string{"env=prod"} },
			objects:   objs{namespace(nil), cm1(), web()}, change: changeCM, want: rolled,
		},
		"a source outside the source selector is absent": {
			configure: sourceSelector,
			objects:   objs{cm1(), auto(pod(reads("app-config")), stateOf(cmKey, ""))},
			change:    changeCM,
		},
		"a source that loses its label looks deleted": {
			configure: func(c *config) { sourceSelector(c); onDelete(c) },
			objects:   objs{labelled(cm1()), auto(pod(reads("app-config"), variableSet(cmVar, h1)), known1)},
			change:    func(f *fixture) { f.Put(cm1()) },
			want:      []string{env(stateOf(cmKey, ""), "web/"+cmVar, "")},
		},
		"a source of another namespace is none of this one's business": {
			objects: objs{cm1(), web()},
			change:  func(f *fixture) { other := cm2(); other.Namespace = "depot"; f.Put(other) },
		},
	})
}

func helmSecret(version string) runtime.Object {
	s := db("x")
	s.Type, s.Data = "helm.sh/release.v1", map[string][]byte{"release": []byte(version)}
	return s
}

func TestOriginalIsLookedFor(t *testing.T) {
	for name, compat := range map[string]bool{"--compat names the original": true, "--compat does not name it": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *config) { c.Compat = compat })
				if got := f.asked()["list deployments"] > 0; got != compat {
					t.Errorf("Deployments are listed: %v, want %v", got, compat)
				}
			})
		})
	}
}
