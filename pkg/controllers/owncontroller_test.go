// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// forgetful is an informer whose cache holds no owner references.
type forgetful struct {
	informers.Informer[metav1.Object]
}

func (forgetful) KeepsOwnerReferences() bool { return false }

func TestLoopMistakesAreErrors(t *testing.T) {
	m := NewMetrics(metrics.NewKubeRegistry())
	fine := LoopOptions{Name: "x", Metrics: m}
	for _, loop := range []LoopOptions{{Name: "two", Loop: "a", Metrics: m}, {Name: "two", Cluster: "far", Metrics: m}} {
		if _, err := NewLoop(loop, nothing); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		opts      LoopOptions
		reconcile func(context.Context, cache.ObjectName) (time.Duration, error)
		watches   []Watch[cache.ObjectName]
		want      string
	}{
		"no name":                       {LoopOptions{Metrics: m}, nothing, nil, "loop without LoopOptions.Name"},
		"no metrics":                    {LoopOptions{Name: "x"}, nothing, nil, "loop x without LoopOptions.Metrics"},
		"no function":                   {fine, nil, nil, "loop x: reconcile is nil"},
		"a back-off that ends too soon": {LoopOptions{Name: "x", Metrics: m, MaxBackoff: 1}, nothing, nil, "loop x: LoopOptions.MaxBackoff 1ns must be at least MinBackoff, which is 1s"},
		"a drain that ended before":     {LoopOptions{Name: "x", Metrics: m, DrainTimeout: -1}, nothing, nil, "loop x: no duration of LoopOptions may be negative"},
		"a short back-off is fine":      {LoopOptions{Name: "x", Metrics: m, MaxBackoff: minBackoff}, nothing, nil, ""},
		"a watch in another cluster":    {LoopOptions{Name: "x", Cluster: "far", Metrics: m}, nothing, []Watch[cache.ObjectName]{WatchSelf[metav1.Object](forgetful{})}, "loop x/far: the loop of a cluster has no watches, use informers.Follow and Enqueue"},
		"a second loop of a controller": {LoopOptions{Name: "two", Loop: "b", Metrics: m}, nothing, nil, ""},
		"a second loop of one name":     {LoopOptions{Name: "two", Loop: "a", Metrics: m}, nothing, nil, "loop two-a: there is a loop of this name; each has a LoopOptions.Loop of its own, and one that has ended must be closed"},
		"a second loop of one cluster":  {LoopOptions{Name: "two", Cluster: "far", Metrics: m}, nothing, nil, "loop two/far: there is a loop of this name; each has a LoopOptions.Loop of its own, and one that has ended must be closed"},
		"a watch without an informer":   {fine, nothing, []Watch[cache.ObjectName]{WatchSelf[metav1.Object](nil)}, "loop x: watch: the informer is nil"},
		"a watch without a function":    {fine, nothing, []Watch[cache.ObjectName]{WatchMapped[metav1.Object, cache.ObjectName](forgetful{}, nil)}, "loop x: watch: a function that maps or chooses events is nil"},
		"a filter without a function":   {fine, nothing, []Watch[cache.ObjectName]{WatchSelf[metav1.Object](forgetful{}, nil)}, "loop x: watch: a function that maps or chooses events is nil"},
		"owners that the cache lacks":   {fine, nothing, []Watch[cache.ObjectName]{WatchOwner[metav1.Object](forgetful{}, schema.GroupKind{})}, "loop x: watch: WatchOwner needs owner references, but no need of the resource has Fields: OwnerReferences"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewLoop(tc.opts, tc.reconcile, tc.watches...)
			if got := fmt.Sprint(err); err != nil && got != tc.want || err == nil && tc.want != "" {
				t.Errorf("NewLoop returned %v, want %q", err, tc.want)
			}
		})
	}
}

func TestLoopTakesKeysFromOutside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.build()
		f.loop.Enqueue(keyOf("too-early"))
		f.run()
		f.loop.Enqueue(keyOf("one"), keyOf("two"))
		synctest.Wait()
		f.end()
		f.loop.Enqueue(keyOf("too-late"))
		synctest.Wait()
		f.expect("one", "two")
	})
}

// owned returns a Deployment with the given owner.
func owned(apiVersion, kind, name string, controller bool) *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "ConfigMap", Name: "other"},
		{APIVersion: apiVersion, Kind: kind, Name: name, Controller: ptr.To(controller)},
	}}}
}

func TestWatchOwner(t *testing.T) {
	type changed = Event[metav1.Object]
	widget := schema.GroupKind{Group: "example.com", Kind: "Widget"}
	mine := owned("example.com/v1", "Widget", "a", true)
	for name, tc := range map[string]struct {
		event changed
		want  []string
	}{
		"an object is added":                                  {changed{New: mine}, []string{"shop/a"}},
		"an object is changed":                                {changed{Old: mine, New: mine}, []string{"shop/a"}},
		"an object is deleted":                                {changed{Old: mine}, []string{"shop/a"}},
		"an owner in another version of the API":              {changed{New: owned("example.com/v2", "Widget", "a", true)}, []string{"shop/a"}},
		"an object gets another owner":                        {changed{Old: mine, New: owned("example.com/v1", "Widget", "b", true)}, []string{"shop/a", "shop/b"}},
		"an object loses its owner":                           {changed{Old: mine, New: &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}}, []string{"shop/a"}},
		"an owner that does not control it":                   {changed{New: owned("example.com/v1", "Widget", "a", false)}, nil},
		"an owner of another group":                           {changed{New: owned("example.org/v1", "Widget", "a", true)}, nil},
		"an owner of another kind":                            {changed{New: owned("example.com/v1", "Gadget", "a", true)}, nil},
		"an owner whose version is no version":                {changed{New: owned("a/b/c", "Widget", "a", true)}, nil},
		"an object without a namespace, whose owner has none": {changed{New: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x", OwnerReferences: mine.OwnerReferences}}}, []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got, ofCluster, wantOfCluster []string
			for _, key := range ownersOf(tc.event, widget, metav1.Object.GetNamespace) {
				got = append(got, key.String())
				wantOfCluster = append(wantOfCluster, key.Name)
			}
			for _, key := range ownersOf(tc.event, widget, noNamespace) {
				ofCluster = append(ofCluster, key.String())
			}
			same(t, "keys", tc.want, got)
			if diff := cmp.Diff(wantOfCluster, ofCluster); diff != "" {
				t.Errorf("keys of owners without a namespace (-want +got):\n%s", diff)
			}
		})
	}
}

func TestGenerationChanged(t *testing.T) {
	type changed = Event[*appsv1.Deployment]
	with := func(generation int64, status int32) *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Generation: generation}, Status: appsv1.DeploymentStatus{Replicas: status}}
	}
	for name, tc := range map[string]struct {
		event changed
		kept  bool
	}{
		"an addition":             {changed{New: with(1, 0)}, true},
		"a deletion":              {changed{Old: with(1, 0)}, true},
		"a change of the spec":    {changed{Old: with(1, 0), New: with(2, 0)}, true},
		"a change of the status":  {changed{Old: with(1, 0), New: with(1, 1)}, false},
		"a relist":                {changed{Old: with(1, 0), New: with(1, 0)}, false},
		"one without generations": {changed{Old: with(0, 0), New: with(0, 0)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if kept := GenerationChanged(tc.event); kept != tc.kept {
				t.Errorf("with the Go type: kept %v", kept)
			}
			var untyped Event[metav1.Object]
			if tc.event.Old != nil {
				untyped.Old = tc.event.Old
			}
			if tc.event.New != nil {
				untyped.New = tc.event.New
			}
			if kept := GenerationChanged(untyped); kept != tc.kept {
				t.Errorf("with the interface: kept %v", kept)
			}
		})
	}
}
