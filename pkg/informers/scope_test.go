// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/clock"
)

// inNamespaces builds a factory that watches two namespaces. Each has a server of its own, with its
// own versions.
func inNamespaces(t *testing.T, a, b *cluster) *Factory {
	t.Helper()
	f := newTestFactory(t, newCluster())
	p := mustPlan(t, reloadNeed)
	if err := f.add(p, []*scope{{source: a.source(), namespace: "a"}, {source: b.source(), namespace: "b"}}); err != nil {
		t.Fatal(err)
	}
	return f
}

func in(namespace, name, value string) *corev1.Secret {
	s := named(name, value)
	s.ObjectMeta = metav1.ObjectMeta{Namespace: namespace, Name: name}
	return s
}

func TestTheCacheFollowsSeveralNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newCluster(in("a", "x", "1")), newCluster(in("b", "x", "1"))
		for range 900 { // far ahead of a
			b.bookmark()
		}
		f := inNamespaces(t, a, b)
		startSynced(t, f)
		defer f.Shutdown()
		wantNames(t, f, "a/x", "b/x")
		a.put(in("a", "y", "1"))
		b.put(in("b", "y", "1"))
		synctest.Wait()
		wantNames(t, f, "a/x", "a/y", "b/x", "b/y")

		// After an interruption, each watch resumes where it was, without another list.
		lists := secretsStatus(f).Lists
		a.breakWatches(false)
		a.put(in("a", "z", "1"))
		b.remove("b/x")
		pass(10 * time.Second)
		wantNames(t, f, "a/x", "a/y", "a/z", "b/y")
		if now := secretsStatus(f).Lists; now != lists {
			t.Errorf("%d lists, want %d", now, lists)
		}

		// If one cannot resume, its namespace is listed again, and so are the others.
		a.breakWatches(true)
		a.remove("a/y")
		pass(time.Minute)
		wantNames(t, f, "a/x", "a/z", "b/y")
		if n := secretsStatus(f).Objects; n != 3 {
			t.Errorf("counts %d objects", n)
		}
	})
}

func TestABookmarkOfANamespaceMovesItsVersionOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newCluster(in("a", "x", "1")), newCluster(in("b", "x", "1"))
		f := inNamespaces(t, a, b)
		startSynced(t, f)
		defer f.Shutdown()
		for range 10 {
			b.bookmark()
		}
		synctest.Wait()
		a.breakWatches(false)
		pass(10 * time.Second)
		last := func(c *cluster) string { return strings.Fields(c.requests[len(c.requests)-1])[1] }
		if last(a) != "rv=101" || last(b) != "rv=111" {
			t.Errorf("resumed at %s and %s, want rv=101 and rv=111", last(a), last(b))
		}
	})
}

func TestANamespaceThatMayNotBeReadIsAProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newCluster(in("a", "x", "1")), newCluster()
		b.failWith(func(string) error { return forbidden })
		f := inNamespaces(t, a, b)
		f.Start(t.Context())
		defer f.Shutdown()
		pass(time.Minute)
		if err := f.Problem("reload"); err == nil || !strings.Contains(err.Error(), "Forbidden") {
			t.Errorf("problem %v", err)
		}
		b.failWith(nil)
		pass(2 * time.Minute)
		wantNames(t, f, "a/x")
	})
}

func TestNamespacesRefuseAClusterScopedResource(t *testing.T) {
	_, err := New(t.Name(), Config{Namespaces: []string{"a"}}, clientsOf(t, &rest.Config{}), []Need{{For: "nodes", Resource: Namespaces, ClusterScoped: true}},
		metrics.NewKubeRegistry(), clock.RealClock{}, func(string) {})
	if err == nil || !strings.Contains(err.Error(), "--namespaces") || !strings.Contains(err.Error(), "nodes") {
		t.Errorf("error %v", err)
	}
}
