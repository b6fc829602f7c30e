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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

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
func test(t *testing.T, objects []runtime.Object, do func(w fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		crd := controllertest.ReadYAML(t, "../config/crd/example.com_widgets.yaml")
		do(fixture{t, controllertest.NewHost(t, Entry(), append(crd, objects...)...)})
	})
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "shop", Name: name} }

func widget(changes ...func(*v1.WidgetSpec)) *v1.Widget {
	w := &v1.Widget{ObjectMeta: named("a"), Spec: v1.WidgetSpec{Image: "nginx", Replicas: 2, Message: "hello"}}
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
func (w fixture) widget() *v1.Widget { return controllertest.Get[v1.Widget](w.Host, "shop", "a") }
func (w fixture) pods() *appsv1.Deployment {
	return controllertest.Get[appsv1.Deployment](w.Host, "shop", "a")
}

// change replaces an object that somebody else has changed.
func (w fixture) change(obj runtime.Object) {
	w.Put(obj)
	w.Settle()
}

// ready lets the Pods become ready.
func (w fixture) ready() {
	d := w.pods()
	d.Status.ReadyReplicas = *d.Spec.Replicas
	w.change(d)
}

func (w fixture) wrote(want ...string) {
	w.Helper()
	if diff := cmp.Diff(want, w.Writes()); diff != "" {
		w.Errorf("writes (-want +got):\n%s", diff)
	}
}

func (w fixture) is(reason string) {
	w.Helper()
	c := meta.FindStatusCondition(w.widget().Status.Conditions, "Ready")
	if c == nil || c.Reason != reason || (c.Status == metav1.ConditionTrue) != (reason == "Running") {
		w.Errorf("the condition Ready is %+v, want the reason %s", c, reason)
	}
}

func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		crd := controllertest.ReadYAML(t, "../config/crd/example.com_widgets.yaml")
		h := controllertest.Setup{Entries: []controllers.Entry{Entry()}, Flags: []string{"--dry-run"}}.NewHost(t, append(crd, widget())...)
		if writes := h.Writes(); len(writes) == 0 || writes[0] != "dry run: update widgets.example.com shop/a" {
			t.Errorf("writes %q", writes)
		}
	})
}

func TestWidgets(t *testing.T) {
	created := []string{"update widgets.example.com shop/a", "apply configmaps shop/a", "apply deployments.apps shop/a", "update widgets.example.com/status shop/a"}
	for name, tc := range map[string]struct {
		objects []runtime.Object
		do      func(w fixture)
	}{
		"a new Widget gets a ConfigMap and a Deployment, and is ready with its Pods": {
			[]runtime.Object{widget()},
			func(w fixture) {
				w.wrote(created...)
				w.is("Progressing")
				w.ready()
				w.wrote("update widgets.example.com/status shop/a")
				w.is("Running")
				if got := w.widget().Status; got.ReadyReplicas != 2 || got.ObservedGeneration != 1 {
					w.Errorf("status %+v", got)
				}
				if diff := cmp.Diff([]string{"Normal Progressing shop/a: its Pods are not ready", "Normal Running shop/a: its Pods are ready"}, w.Events()); diff != "" {
					w.Errorf("Events (-want +got):\n%s", diff)
				}
				if got := controllertest.Get[corev1.ConfigMap](w.Host, "shop", "a").Data["MESSAGE"]; got != "hello" {
					w.Errorf("message %q", got)
				}
			},
		},
		"nothing is written while nothing changes, nor by the next leader": {
			[]runtime.Object{widget()},
			func(w fixture) {
				w.ready()
				w.Writes()
				w.Sleep(24 * time.Hour)
				w.Restart()
				w.wrote()
			},
		},
		"a change of the image is applied": {
			[]runtime.Object{widget()},
			func(w fixture) {
				w.ready()
				w.Writes()
				obj := w.widget()
				obj.Spec.Image = "httpd"
				w.change(obj)
				w.wrote("apply deployments.apps shop/a", "update widgets.example.com/status shop/a")
				if got := w.pods().Spec.Template.Spec.Containers[0].Image; got != "httpd" {
					w.Errorf("image %q", got)
				}
			},
		},
		"a change of what it owns is undone": {
			[]runtime.Object{widget()},
			func(w fixture) {
				w.ready()
				w.Writes()
				d := w.pods()
				*d.Spec.Replicas = 7
				w.change(d)
				own := controllertest.Get[corev1.ConfigMap](w.Host, "shop", "a")
				own.Data["MESSAGE"] = "bye"
				w.change(own)
				w.wrote("apply deployments.apps shop/a", "apply configmaps shop/a")
				if got := *w.pods().Spec.Replicas; got != 2 {
					w.Errorf("%d replicas", got)
				}
			},
		},
		"a change of the settings replaces the Pods": {
			[]runtime.Object{settings("red"), widget(withSettings)},
			func(w fixture) {
				w.wrote(created...)
				before := w.pods().Spec.Template.Annotations[environment]
				w.change(settings("blue"))
				w.wrote("apply deployments.apps shop/a")
				if after := w.pods().Spec.Template.Annotations[environment]; after == before {
					w.Error("the Pods are the same")
				}
			},
		},
		"a Widget waits for its settings": {
			[]runtime.Object{widget(withSettings)},
			func(w fixture) {
				w.wrote("update widgets.example.com shop/a", "update widgets.example.com/status shop/a")
				w.is("SettingsMissing")
				w.change(settings("red"))
				w.wrote(created[1:]...)
				w.is("Progressing")
			},
		},
		"a Widget loses its Pods when its lifetime is over": {
			[]runtime.Object{widget(withALifetime)},
			func(w fixture) {
				w.ready()
				w.Writes()
				w.Sleep(59 * time.Minute)
				w.wrote()
				w.Sleep(time.Minute)
				w.wrote("apply deployments.apps shop/a", "update widgets.example.com/status shop/a")
				w.is("Expired")
				if got := *w.pods().Spec.Replicas; got != 0 {
					w.Errorf("%d replicas", got)
				}
			},
		},
		"a Widget that is deleted goes after its Deployment": {
			[]runtime.Object{widget()},
			func(w fixture) {
				d := w.pods()
				d.Finalizers = []string{"somebody/else"}
				w.change(d)
				w.Writes()
				w.Delete(widget())
				w.Settle()
				w.wrote("delete deployments.apps shop/a")
				if w.widget() == nil {
					w.Fatal("the Widget is gone before its Deployment")
				}
				d = w.pods()
				d.Finalizers = nil
				w.change(d)
				if w.widget() != nil || !slices.Contains(w.Writes(), "update widgets.example.com shop/a") {
					w.Error("the Widget is there after its Deployment")
				}
			},
		},
		"a Widget that is deleted leaves alone a Deployment of its name that is not its own": {
			[]runtime.Object{
				&appsv1.Deployment{ObjectMeta: named("a")},
				func() *v1.Widget {
					w := widget()
					w.Finalizers, w.DeletionTimestamp = []string{finalizer}, &metav1.Time{Time: time.Now()}
					return w
				}(),
			},
			func(w fixture) {
				w.wrote("update widgets.example.com shop/a")
				if w.pods() == nil {
					w.Error("the Deployment is gone")
				}
			},
		},
		"a late cache makes it ask twice, and change nothing twice": {
			nil,
			func(w fixture) {
				w.Lag(20 * time.Millisecond)
				w.change(widget())
				for _, write := range w.Writes()[len(created):] {
					if !strings.HasSuffix(write, " (unchanged)") && !strings.HasSuffix(write, ": Conflict") {
						w.Errorf("%s, although everything is there", write)
					}
				}
				w.is("Progressing")
			},
		},
		"a write that meets a change is tried again": {
			nil,
			func(w fixture) {
				raced := false
				w.OnWrite(func(write controllertest.Request) error {
					if write.Resource == "widgets.example.com" && !raced {
						raced = true
						w.Put(widget(func(s *v1.WidgetSpec) { s.Message = "other" }))
					}
					return nil
				})
				w.change(widget())
				w.wrote(append([]string{"update widgets.example.com shop/a: Conflict"}, created...)...)
			},
		},
	} {
		t.Run(name, func(t *testing.T) { test(t, tc.objects, tc.do) })
	}
}
