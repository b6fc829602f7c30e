// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func TestOtherKindsAreRolledAlike(t *testing.T) {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	set.Spec.Template = pod(reads("app-config"))
	daemon := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	daemon.Spec.Template = pod(reads("app-config"))
	known := func(kind, hash string) string { return stateOn(kind+"/shop/web", cmKey, hash) }
	// Only Deployments can be paused.
	annotations := []string{kAuto, "true", kPause, "5m"}
	runCases(t, map[string]reconcileCase{
		"a StatefulSet": {
			objects: []runtime.Object{cm1(), annotated(set, append(annotations, nativeState, known("StatefulSet", h1))...)}, change: changeCM,
			want:   []string{envOn("statefulsets/web", known("StatefulSet", h2), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
		"a DaemonSet": {
			objects: []runtime.Object{cm1(), annotated(daemon, append(annotations, nativeState, known("DaemonSet", h1))...)}, change: changeCM,
			want:   []string{envOn("daemonsets/web", known("DaemonSet", h2), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
	})
}

func TestTwoNamesOfOneVariable(t *testing.T) {
	// app.config and app-config share a variable. The later change sets it, and the state
	// distinguishes them.
	dotted := func(v string) runtime.Object { return cm("app.config", "v", v) }
	hash := func(v string) string { return hashOf("v", v) }
	state := func(cmHash, dottedHash string) string {
		return stateOf(cmKey, cmHash, "configmap/app.config", dottedHash)
	}
	runCases(t, map[string]reconcileCase{
		"the later change stands": {
			objects: []runtime.Object{cm1(), dotted("1"), deploy(pod(reads("app-config"), reads("app.config")), kAuto, "true",
				nativeState, state(h1, hash("1")))},
			change: func(w *fixture) { w.put(dotted("2")); w.pass(100 * time.Millisecond); changeCM(w) },
			want:   []string{env(state(h2, hash("2")), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app.config, ConfigMap shop/app-config"},
		},
		"of two that changed at one instant, the first by type and name stands": {
			objects: []runtime.Object{cm1(), dotted("1"), deploy(pod(reads("app-config"), reads("app.config")), kAuto, "true",
				nativeState, state(h1, hash("1")))},
			change: func(w *fixture) { w.put(dotted("2"), cm2()) },
			want:   []string{env(state(h2, hash("2")), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app.config, ConfigMap shop/app-config"},
		},
		"of two that come to equal data, the later one leaves the template as it is": {
			objects: []runtime.Object{cm1(), dotted("1"), deploy(pod(reads("app-config"), reads("app.config")), kAuto, "true",
				nativeState, state(h1, hash("1")))},
			change: func(w *fixture) { w.put(dotted("2")); w.pass(time.Minute); w.put(cm("app-config", "v", "2")) },
			want: []string{env(state(h1, hash("2")), "web/"+cmVar, hash("2")),
				env(state(hash("2"), hash("2")), "web/"+cmVar, hash("2"))},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config", "Normal Reloaded Reloaded for ConfigMap shop/app.config"},
		},
	})
}

func TestWarningOfTheOriginal(t *testing.T) {
	for name, tc := range map[string]struct {
		replicas int32
		compat   bool
		warns    bool
	}{
		"its Deployment runs":              {replicas: 1, compat: true, warns: true},
		"its Deployment is scaled to 0":    {compat: true},
		"it runs, and nothing replaces it": {replicas: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				original := deploy(pod())
				original.Spec.Replicas = &tc.replicas
				original.Spec.Template.Spec.Containers[0].Image = "ghcr.io/stakater/reloader:v1.4.21"
				w := newFixture(t, func(c *Config) { c.Compat = tc.compat }, original)
				w.resign()
				buffer := &ktesting.BufferTL{}
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), ktesting.NewLogger(buffer, ktesting.NewConfig())))
				time.AfterFunc(time.Second, cancel)
				if err := w.c.Run(ctx); err != nil {
					t.Fatal(err)
				}
				if got := buffer.String(); strings.Contains(got, `still running deployment="shop/web"`) != tc.warns {
					t.Errorf("log = %q, want a warning: %v", got, tc.warns)
				}
			})
		})
	}
}

func TestMemoryIsOfOneObject(t *testing.T) {
	cached := types.UID("old")
	m := newMemory(func(policy.Key) types.UID { return cached })
	key := policy.Key{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}
	m.update(key, "old", unixStart, func(e *entry) { e.last = "x" })
	if e := m.get(key, "new"); e.last != "" {
		t.Errorf("the new object of that name inherits %v", e.last)
	}
	m.update(key, "new", unixStart, func(e *entry) { e.written = "4" })
	if e := m.get(key, "old"); e.last == "" || e.written != "" {
		t.Errorf("an update of another object than the cache has leaves %+v", e)
	}
	cached = "new"
	m.update(key, "new", unixStart, func(e *entry) { e.written = "5" })
	if e := m.get(key, "new"); e.last != "" || e.written != "5" {
		t.Errorf("entry of the new object = %+v", e)
	}
	m.update(key, "old", unixStart, func(e *entry) { e.written = "" })
	if e := m.get(key, "new"); e.written != "5" {
		t.Errorf("entry of the new object after a late update of the old one = %+v", e)
	}
	waiting := &replacement{}
	m.update(key, "new", unixStart, func(e *entry) { e.recreate = waiting })
	cached = "newer"
	m.update(key, "newer", unixStart, func(e *entry) { e.written = "6" })
	if r, _ := m.replacement(key); r != waiting {
		t.Error("a Job that waits to be created again is forgotten for another one")
	}
	m.update(key, "new", unixStart, func(e *entry) { e.written, e.recreate = "", nil })
	if len(m.entries) != 0 {
		t.Errorf("%d entries are left with nothing to remember", len(m.entries))
	}
}

func TestMetricNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil)
		families, err := w.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]int{}
		for _, f := range families {
			if name, ok := strings.CutPrefix(f.GetName(), metricPrefix); ok {
				got[name] = len(f.GetMetric())
			}
		}
		want := map[string]int{ // series at the start
			"reloads_total": 5 * 4, "source_changes_total": 3 * 3, "coalesced_changes_total": 1, "pending_workloads": 1,
			"paused_deployments": 1, "state_writes_total": 2, "change_to_patch_seconds": 1,
			"invalid_annotations_total": 1, "lost_jobs_total": 1,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("metrics differ (-want +got):\n%s", diff)
		}
	})
}

func TestAnnotationsForCSISecretsAreMentionedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buffer := &ktesting.BufferTL{}
		ctx := klog.NewContext(t.Context(), ktesting.NewLogger(buffer, ktesting.NewConfig()))
		w := newFixture(t, nil)
		for range 2 {
			one, err := policy.NewWorkload(&w.c.kinds["Deployment"].Kind, deploy(pod(), "secretproviderclass.reloader.stakater.com/auto", "true"), Name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.c.step(ctx, w.c.kinds["Deployment"], one, false); err != nil {
				t.Fatal(err)
			}
		}
		if n := strings.Count(buffer.String(), "have no effect without"); n != 1 {
			t.Errorf("mentioned %d times, want once:\n%s", n, buffer.String())
		}
	})
}
