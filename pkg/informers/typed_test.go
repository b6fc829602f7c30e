// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// podsIn returns an informer that was filled with Pods of these names.
func podsIn(t *testing.T, indexers cache.Indexers, names ...string) Informer[*corev1.Pod] {
	t.Helper()
	informer := cache.NewSharedIndexInformer(nil, &corev1.Pod{}, 0, indexers)
	for _, name := range names {
		namespace, name, _ := strings.Cut(name, "/")
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": name[:1]}}}
		if err := informer.GetIndexer().Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	return For[*corev1.Pod](func(schema.GroupVersionResource) cache.SharedIndexInformer { return informer }, schema.GroupVersionResource{})
}

func TestATypedInformerReadsTheCache(t *testing.T) {
	byLetter := cache.Indexers{"letter": func(obj any) ([]string, error) { return []string{obj.(*corev1.Pod).Name[:1]}, nil }}
	byNamespace := cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}
	b := labels.SelectorFromSet(labels.Set{"app": "b"})
	for name, tc := range map[string]struct {
		indexers cache.Indexers
		list     func(Informer[*corev1.Pod]) []*corev1.Pod
		want     []string
	}{
		"all":                               {nil, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("", labels.Everything()) }, []string{"bar/b1", "shop/a1", "shop/b1"}},
		"a namespace":                       {nil, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("shop", labels.Everything()) }, []string{"shop/a1", "shop/b1"}},
		"a namespace that has nothing":      {nil, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("no", labels.Everything()) }, nil},
		"labels":                            {nil, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("", b) }, []string{"bar/b1", "shop/b1"}},
		"both, with an index of namespaces": {byNamespace, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("shop", b) }, []string{"shop/b1"}},
		"all, with an index of namespaces":  {byNamespace, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.List("", b) }, []string{"bar/b1", "shop/b1"}},
		"an index":                          {byLetter, func(i Informer[*corev1.Pod]) []*corev1.Pod { return i.ByIndex("letter", "a") }, []string{"shop/a1"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, pod := range tc.list(podsIn(t, tc.indexers, "shop/a1", "shop/b1", "bar/b1")) {
				got = append(got, pod.Namespace+"/"+pod.Name)
			}
			slices.Sort(got)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	}
	pods := podsIn(t, nil, "shop/a1")
	if pod, ok := pods.Get(cache.NewObjectName("shop", "a1")); !ok || pod.Name != "a1" {
		t.Errorf("Get returned %v, %v", pod, ok)
	}
	if pod, ok := pods.Get(cache.NewObjectName("shop", "a2")); ok || pod != nil {
		t.Errorf("Get of what is not there returned %v, %v", pod, ok)
	}
	t.Run("an index that is not there is a mistake", func(t *testing.T) {
		defer func() {
			if got := fmt.Sprint(recover()); !strings.Contains(got, "letter") {
				t.Errorf("it panicked with %s", got)
			}
		}()
		pods.ByIndex("letter", "a")
	})
}
