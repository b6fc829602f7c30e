// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

func annotated(name string) *corev1.Secret {
	s := named(name, "1")
	s.Annotations = map[string]string{"match": "true"}
	return s
}

// spoil changes an object in the cache. The lock orders the change before the next check, since the
// race detector would report it otherwise.
func spoil(f *Factory, e *Object) {
	f.mutations.mu.Lock()
	defer f.mutations.mu.Unlock()
	e.GetAnnotations()["match"] = "false"
}

func TestAChangedObjectIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(annotated("a"), annotated("b"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		defer f.Shutdown()
		pass(time.Minute)
		if err := f.CheckMutation(nil); err != nil {
			t.Fatalf("nothing was changed: %v", err)
		}
		informer, _ := f.Informer("reload", Secrets)
		obj, _, _ := informer.GetStore().GetByKey("shop/b")
		spoil(f, obj.(*Object))
		pass(time.Minute)
		if err := f.CheckMutation(nil); err == nil || !strings.Contains(err.Error(), "secrets shop/b was changed") {
			t.Errorf("health check: %v", err)
		}
		if n := f.Status(false).CacheMutations; n != 1 {
			t.Errorf("%d mutations counted", n)
		}
	})
}

func TestAChangeIsFoundAtTheEndToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(annotated("a"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		informer, _ := f.Informer("reload", Secrets)
		obj, _, _ := informer.GetStore().GetByKey("shop/a")
		spoil(f, obj.(*Object))
		f.Shutdown()
		if err := f.CheckMutation(nil); err == nil {
			t.Error("the change was not found")
		}
	})
}

func TestAnObjectIsCheckedOnceMoreAfterItHasLeftTheCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(annotated("a"))
		f := newTestFactory(t, c, reloadNeed)
		startSynced(t, f)
		defer f.Shutdown()
		pass(time.Minute)
		informer, _ := f.Informer("reload", Secrets)
		obj, _, _ := informer.GetStore().GetByKey("shop/a")
		spoil(f, obj.(*Object))
		c.remove("shop/a")
		pass(time.Minute)
		if f.CheckMutation(nil) == nil {
			t.Error("the change was not found")
		}
		for _, w := range f.mutations.watched {
			if len(w.fresh)+len(w.settled) != 0 {
				t.Errorf("%d objects are still held", len(w.fresh)+len(w.settled))
			}
		}
	})
}

func TestChecksumsSeeEveryPartThatCanBeChanged(t *testing.T) {
	p := mustPlan(t, Need{For: "a", Resource: Secrets, Annotations: []string{"match"}, Fields: Labels | OwnerReferences})
	rich := func() runtime.Object {
		now := metav1.Unix(1700000000, 0)
		s := annotated("a")
		s.Labels = map[string]string{"l": "1"}
		s.OwnerReferences = []metav1.OwnerReference{{Name: "o"}}
		s.DeletionTimestamp = &now
		return reduced(t, p, s)
	}
	deployment := func() runtime.Object {
		return &appsv1.Deployment{Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}}}
	}
	cases := map[string]struct {
		object runtime.Object
		change func(runtime.Object)
	}{
		"annotations of an entry": {rich(), func(o runtime.Object) { o.(*Object).GetAnnotations()["match"] = "" }},
		"labels of an entry":      {rich(), func(o runtime.Object) { delete(o.(*Object).GetLabels(), "l") }},
		"owners of an entry":      {rich(), func(o runtime.Object) { o.(*Object).GetOwnerReferences()[0].Name = "p" }},
		"deletion of an entry":    {rich(), func(o runtime.Object) { o.(*Object).GetDeletionTimestamp().Time = time.Unix(1, 0) }},
		"a container of a Deployment": {deployment(), func(o runtime.Object) {
			o.(*appsv1.Deployment).Spec.Template.Spec.Containers[0].Name = "d"
		}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			d := newMutationDetector(clock.RealClock{})
			store := cache.NewStore(cache.MetaNamespaceKeyFunc)
			d.watch("things", store)(tc.object)
			if err := store.Add(tc.object); err != nil {
				t.Fatal(err)
			}
			d.check(context.Background())
			if err := d.err(); err != nil {
				t.Fatalf("nothing was changed: %v", err)
			}
			tc.change(tc.object)
			d.check(context.Background())
			if d.count() != 1 {
				t.Error("the change was not found")
			}
		})
	}
}

func TestWithoutDetectionNothingIsHeldOrReported(t *testing.T) {
	f := &Factory{}
	if err := f.CheckMutation(nil); err != nil {
		t.Error(err)
	}
}
