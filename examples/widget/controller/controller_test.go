// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	v1 "github.com/quartermaster-dev/quartermaster/examples/widget/api/v1"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// fixture is a manager with the controller, and the objects in shop.
type fixture struct {
	*testing.T
	*controllertest.Host
}

// test runs a test in a bubble with the CustomResourceDefinition and the given objects.
func test(t *testing.T, objects []runtime.Object, do func(f fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		crd := controllertest.ReadYAML(t, "../config/crd/example.com_widgets.yaml")
		do(fixture{t, controllertest.NewHost(t, Entry(), append(crd, objects...)...)})
	})
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "shop", Name: name} }

func widget(changes ...func(*v1.WidgetSpec)) *v1.Widget {
	w := &v1.Widget{ObjectMeta: named("a"), Spec: v1.WidgetSpec{Image: "nginx", Replicas: 2, Message: "hello"}}
	w.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "{}"} // the kit refuses an Update that would remove it
	for _, change := range changes {
		change(&w.Spec)
	}
	return w
}

func settings(value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: named("common"), Data: map[string]string{"COLOR": value}}
}

func withSettings(s *v1.WidgetSpec)  { s.Settings = "common" }
func withALifetime(s *v1.WidgetSpec) { s.Lifetime = &metav1.Duration{Duration: time.Hour} }
func (f fixture) widget() *v1.Widget { return controllertest.Get[v1.Widget](f.Host, "shop", "a") }
func (f fixture) pods() *appsv1.Deployment {
	return controllertest.Get[appsv1.Deployment](f.Host, "shop", "a")
}

// change replaces an object that somebody else has changed.
func (f fixture) change(obj runtime.Object) {
	f.Put(obj)
	f.Settle()
}

// ready lets the Pods become ready.
func (f fixture) ready() {
	d := f.pods()
	d.Status.ReadyReplicas = *d.Spec.Replicas
	f.change(d)
}

func (f fixture) wrote(want ...string) {
	f.Helper()
	if diff := cmp.Diff(want, f.Writes()); diff != "" {
		f.Errorf("writes (-want +got):\n%s", diff)
	}
}

func (f fixture) is(reason string) {
	f.Helper()
	c := meta.FindStatusCondition(f.widget().Status.Conditions, "Ready")
	if c == nil || c.Reason != reason || (c.Status == metav1.ConditionTrue) != (reason == "Running") {
		f.Errorf("the condition Ready is %+v, want the reason %s", c, reason)
	}
}

func TestDryRunSendsDryWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		crd := controllertest.ReadYAML(t, "../config/crd/example.com_widgets.yaml")
		h := controllertest.Setup{Entries: []controllers.Entry{Entry()}, Flags: []string{"--dry-run"}}.NewHost(t, append(crd, widget())...)
		if writes := h.Writes(); len(writes) == 0 || writes[0] != "dry run: patch widgets.example.com shop/a" {
			t.Errorf("writes %q", writes)
		}
	})
}

func TestWidgetGetsItsObjects(t *testing.T) {
	created := []string{"patch widgets.example.com shop/a", "apply configmaps shop/a", "apply deployments.apps shop/a", "update widgets.example.com/status shop/a"}
	for name, tc := range map[string]struct {
		objects []runtime.Object
		do      func(f fixture)
	}{
		"a new Widget gets a ConfigMap and a Deployment, and is ready with its Pods": {
			[]runtime.Object{widget()},
			func(f fixture) {
				f.wrote(created...)
				f.is("Progressing")
				f.ready()
				f.wrote("update widgets.example.com/status shop/a")
				f.is("Running")
				if got := f.widget().Status; got.ReadyReplicas != 2 || got.ObservedGeneration != 1 {
					f.Errorf("status %+v", got)
				}
				if diff := cmp.Diff([]string{"Normal Progressing shop/a: its Pods are not ready", "Normal Running shop/a: its Pods are ready"}, f.Events()); diff != "" {
					f.Errorf("Events (-want +got):\n%s", diff)
				}
				if got := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "a").Data["MESSAGE"]; got != "hello" {
					f.Errorf("message %q", got)
				}
			},
		},
		"nothing is written while nothing changes, nor by the next leader": {
			[]runtime.Object{widget()},
			func(f fixture) {
				f.ready()
				f.Writes()
				f.Sleep(24 * time.Hour)
				f.Restart()
				f.wrote()
			},
		},
		"a change of the image is applied": {
			[]runtime.Object{widget()},
			func(f fixture) {
				f.ready()
				f.Writes()
				obj := f.widget()
				obj.Spec.Image = "httpd"
				f.change(obj)
				f.wrote("apply deployments.apps shop/a", "update widgets.example.com/status shop/a")
				if got := f.pods().Spec.Template.Spec.Containers[0].Image; got != "httpd" {
					f.Errorf("image %q", got)
				}
			},
		},
		"a change of what it owns is undone": {
			[]runtime.Object{widget()},
			func(f fixture) {
				f.ready()
				f.Writes()
				d := f.pods()
				*d.Spec.Replicas = 7
				f.change(d)
				own := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "a")
				own.Data["MESSAGE"] = "bye"
				f.change(own)
				f.wrote("apply deployments.apps shop/a", "apply configmaps shop/a")
				if got := *f.pods().Spec.Replicas; got != 2 {
					f.Errorf("%d replicas", got)
				}
			},
		},
		"a change of the settings replaces the Pods": {
			[]runtime.Object{settings("red"), widget(withSettings)},
			func(f fixture) {
				f.wrote(created...)
				before := f.pods().Spec.Template.Annotations[environment]
				f.change(settings("blue"))
				f.wrote("apply deployments.apps shop/a")
				if after := f.pods().Spec.Template.Annotations[environment]; after == before {
					f.Error("the Pods are the same")
				}
			},
		},
		"a Widget waits for its settings": {
			[]runtime.Object{widget(withSettings)},
			func(f fixture) {
				f.wrote("patch widgets.example.com shop/a", "update widgets.example.com/status shop/a")
				f.is("SettingsMissing")
				f.change(settings("red"))
				f.wrote(created[1:]...)
				f.is("Progressing")
			},
		},
		"a Widget loses its Pods when its lifetime is over": {
			[]runtime.Object{widget(withALifetime)},
			func(f fixture) {
				f.ready()
				f.Writes()
				f.Sleep(59 * time.Minute)
				f.wrote()
				f.Sleep(time.Minute)
				f.wrote("apply deployments.apps shop/a", "update widgets.example.com/status shop/a")
				f.is("Expired")
				if got := *f.pods().Spec.Replicas; got != 0 {
					f.Errorf("%d replicas", got)
				}
			},
		},
		"a Widget that is deleted goes after its Deployment": {
			[]runtime.Object{widget()},
			func(f fixture) {
				d := f.pods()
				d.Finalizers = []string{"somebody/else"}
				f.change(d)
				f.Writes()
				f.Delete(widget())
				f.Settle()
				f.wrote("delete deployments.apps shop/a")
				if f.widget() == nil {
					f.Fatal("the Widget is gone before its Deployment")
				}
				d = f.pods()
				d.Finalizers = nil
				f.change(d)
				if f.widget() != nil || !slices.Contains(f.Writes(), "patch widgets.example.com shop/a") {
					f.Error("the Widget is there after its Deployment")
				}
			},
		},
		"a Widget that is deleted leaves alone a Deployment of its name that is not its own": {
			[]runtime.Object{
				&appsv1.Deployment{ObjectMeta: named("a")},
				func() *v1.Widget {
					f := widget()
					f.Finalizers, f.DeletionTimestamp = []string{finalizer}, &metav1.Time{Time: time.Now()}
					return f
				}(),
			},
			func(f fixture) {
				f.wrote("patch widgets.example.com shop/a")
				if f.pods() == nil {
					f.Error("the Deployment is gone")
				}
			},
		},
		"a Widget leaves alone a Deployment of its name that is not its own, until it is gone": {
			[]runtime.Object{widget(), &appsv1.Deployment{ObjectMeta: named("a")}},
			func(f fixture) {
				f.wrote("patch widgets.example.com shop/a", "update widgets.example.com/status shop/a")
				f.is("NameTaken")
				f.Delete(f.pods())
				f.Sleep(time.Minute)
				f.wrote(created[1:]...)
				f.is("Progressing")
			},
		},
		"a Widget leaves alone a ConfigMap of its name that is not its own": {
			[]runtime.Object{widget(), &corev1.ConfigMap{ObjectMeta: named("a")}},
			func(f fixture) {
				f.wrote("patch widgets.example.com shop/a", "update widgets.example.com/status shop/a")
				f.is("NameTaken")
			},
		},
		"a Deployment that a quota refuses with a conflict is tried again, although no Widget changes": {
			nil,
			func(f fixture) {
				start := time.Now()
				f.OnWrite(func(write controllertest.Request) error {
					if write.Resource == "deployments.apps" && time.Since(start) < time.Minute {
						return apierrors.NewConflict(schema.GroupResource{Resource: "resourcequotas"}, "shop", nil)
					}
					return nil
				})
				f.change(widget())
				f.Sleep(10 * time.Minute)
				if f.pods() == nil {
					f.Errorf("there is no Deployment after %q", f.Writes())
				}
			},
		},
		"a late cache makes it ask twice, and change nothing twice": {
			nil,
			func(f fixture) {
				f.Lag(20 * time.Millisecond)
				f.change(widget())
				for _, write := range f.Writes()[len(created):] {
					if !strings.HasSuffix(write, " (unchanged)") && !strings.HasSuffix(write, ": Conflict") {
						f.Errorf("%s, although everything is there", write)
					}
				}
				f.is("Progressing")
			},
		},
		"a write that meets a change is tried again": {
			nil,
			func(f fixture) {
				raced := false
				f.OnWrite(func(write controllertest.Request) error {
					if write.Resource == "widgets.example.com" && !raced {
						raced = true
						f.Put(widget(func(s *v1.WidgetSpec) { s.Message = "other" }))
					}
					return nil
				})
				f.change(widget())
				f.wrote(append([]string{"patch widgets.example.com shop/a: Conflict"}, created...)...)
			},
		},
	} {
		t.Run(name, func(t *testing.T) { test(t, tc.objects, tc.do) })
	}
}
