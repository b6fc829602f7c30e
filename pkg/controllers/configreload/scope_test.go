// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestReconcileScope(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
	rolled := []string{env(known2, "web/"+cmVar, h2)}
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true", nativeState, known1) }
	namespace := func(labels map[string]string) *corev1.Namespace {
		n := &corev1.Namespace{}
		n.Name, n.Labels = "shop", labels
		return n
	}
	selector := func(items ...string) func(*Config) {
		return func(c *Config) { c.NamespaceSelector = items }
	}
	prod := map[string]string{"env": "prod"}
	labelled := func(c *corev1.ConfigMap) *corev1.ConfigMap { c.Labels = prod; return c }
	sourceSelector := func(c *Config) { c.SourceSelector = []string{"env:prod"} }

	runCases(t, map[string]reconcileCase{
		"a namespace outside the selector is left alone": {
			configure: selector("env=prod"), objects: []runtime.Object{namespace(nil), cm1(), web()}, change: changeCM,
		},
		"a namespace that the selector selects is worked in": {
			configure: selector("env:*"), objects: []runtime.Object{namespace(prod), cm1(), web()}, change: changeCM,
			want: rolled, events: reloaded,
		},
		"a namespace that becomes selected is caught up with": {
			configure: selector("env=prod"), objects: []runtime.Object{namespace(nil), cm1(), web()},
			change: func(w *fixture) { changeCM(w); w.pass(time.Minute); w.put(namespace(prod)) },
			want:   rolled, events: reloaded,
		},
		"Secrets of Helm releases do not count": {
			objects: []runtime.Object{helmSecret("1"), deploy(pod(readsSecret("db")), kAuto, "true", nativeState, stateOf(dbKey, ""))},
			change:  func(w *fixture) { w.put(helmSecret("2")) },
		},
		"only the namespaces of the flag are worked in": {
			configure: func(c *Config) { c.Namespaces = []string{"other"} },
			objects:   []runtime.Object{cm1(), web()}, change: changeCM,
		},
		"an ignored namespace is left alone": {
			configure: func(c *Config) { c.IgnoredNamespaces = []string{"shop"} },
			objects:   []runtime.Object{cm1(), web()}, change: changeCM,
		},
		"naming namespaces switches the selector and the ignored ones off": {
			configure: func(c *Config) {
				c.Namespaces, c.IgnoredNamespaces, c.NamespaceSelector = []string{"shop"}, []string{"shop"}, []string{"env=prod"}
			},
			objects: []runtime.Object{namespace(nil), cm1(), web()}, change: changeCM, want: rolled, events: reloaded,
		},
		"a source outside the source selector is absent": {
			configure: sourceSelector,
			objects:   []runtime.Object{cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, ""))},
			change:    changeCM,
		},
		"a source that loses its label looks deleted": {
			configure: func(c *Config) { sourceSelector(c); onDelete(c) },
			objects: []runtime.Object{labelled(cm1()), deploy(pod(reads("app-config"), variableSet(cmVar, h1)), kAuto, "true",
				nativeState, known1)},
			change: func(w *fixture) { w.put(cm1()) },
			want:   []string{env(stateOf(cmKey, ""), "web/"+cmVar, "")}, events: reloaded,
		},
		"a source of another namespace is none of this one's business": {
			objects: []runtime.Object{cm1(), web()},
			change: func(w *fixture) {
				other := cm2()
				other.Namespace = "depot"
				w.put(other)
			},
		},
	})
}

func helmSecret(version string) runtime.Object {
	s := db("x")
	s.Type, s.Data = "helm.sh/release.v1", map[string][]byte{"release": []byte(version)}
	return s
}
