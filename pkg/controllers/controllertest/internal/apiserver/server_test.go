// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	appsv1ac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

var gadgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgetries"}

// world is a server with the custom resource gadgetries and clients of it.
type world struct {
	*testing.T
	ctx     context.Context
	server  *Server
	kube    kubernetes.Interface
	gadgets dynamic.ResourceInterface
}

func newWorld(t *testing.T) world {
	t.Helper()
	s := New(clientscheme.Scheme, Hooks{})
	w := world{T: t, ctx: t.Context(), server: s}
	w.put(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"gadgetries.example.com"},"spec":{
		"group":"example.com","names":{"kind":"Gadget","plural":"gadgetries"},"scope":"Namespaced",
		"versions":[{"name":"v1","served":true,"storage":true,"subresources":{"status":{}}}]}}`)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	config := &rest.Config{Host: server.URL, QPS: -1}
	w.kube = kubernetes.NewForConfigOrDie(config)
	w.gadgets = dynamic.NewForConfigOrDie(config).Resource(gadgets).Namespace("shop")
	return w
}

func (w world) put(text string) {
	w.Helper()
	if err := w.server.Put(w.parse(text)); err != nil {
		w.Fatal(err)
	}
}

func (w world) parse(text string) *unstructured.Unstructured {
	w.Helper()
	obj := &unstructured.Unstructured{}
	if err := obj.UnmarshalJSON([]byte(text)); err != nil {
		w.Fatal(err)
	}
	return obj
}

func (w world) gadget(fields string) *unstructured.Unstructured {
	w.Helper()
	return w.parse(`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"a"}` + fields + `}`)
}

func (w world) must(obj *unstructured.Unstructured, err error) *unstructured.Unstructured {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
	return obj
}

func (w world) created(fields string) *unstructured.Unstructured {
	w.Helper()
	return w.must(w.gadgets.Create(w.ctx, w.gadget(fields), metav1.CreateOptions{}))
}

func str(obj *unstructured.Unstructured, path ...string) string {
	text, _, _ := unstructured.NestedString(obj.Object, path...)
	return text
}

func TestWritesHaveTheEffectsOfTheAPIServer(t *testing.T) {
	for name, test := range map[string]func(w world){
		"a creation drops the status and sets UID, version, generation and time": func(w world) {
			got := w.created(`,"spec":{"color":"red"},"status":{"phase":"x"}`)
			created := got.GetCreationTimestamp()
			if got.GetUID() == "" || got.GetResourceVersion() == "" || got.GetGeneration() != 1 || created.IsZero() || got.Object["status"] != nil {
				w.Error(got)
			}
		},
		"a second creation is refused": func(w world) {
			w.created("")
			if _, err := w.gadgets.Create(w.ctx, w.gadget(""), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
				w.Error(err)
			}
		},
		"an update keeps the status, and raises the generation with the spec": func(w world) {
			obj := w.created(`,"spec":{"color":"red"}`)
			_ = unstructured.SetNestedField(obj.Object, "ready", "status", "phase")
			obj = w.must(w.gadgets.UpdateStatus(w.ctx, obj, metav1.UpdateOptions{}))
			if obj.GetGeneration() != 1 || str(obj, "status", "phase") != "ready" {
				w.Errorf("after the update of the status: %v", obj)
			}
			_ = unstructured.SetNestedField(obj.Object, "lost", "status", "phase")
			_ = unstructured.SetNestedField(obj.Object, "blue", "spec", "color")
			obj = w.must(w.gadgets.Update(w.ctx, obj, metav1.UpdateOptions{}))
			if obj.GetGeneration() != 2 || str(obj, "status", "phase") != "ready" || str(obj, "spec", "color") != "blue" {
				w.Errorf("after the update: %v", obj)
			}
		},
		"an update of the status changes neither spec nor metadata": func(w world) {
			obj := w.created(`,"spec":{"color":"red"}`)
			_ = unstructured.SetNestedField(obj.Object, "blue", "spec", "color")
			obj.SetLabels(map[string]string{"a": "b"})
			obj = w.must(w.gadgets.UpdateStatus(w.ctx, obj, metav1.UpdateOptions{}))
			if str(obj, "spec", "color") != "red" || len(obj.GetLabels()) > 0 {
				w.Error(obj)
			}
		},
		"an update of an old version is a conflict": func(w world) {
			old := w.created(`,"spec":{"color":"red"}`)
			w.must(w.gadgets.Patch(w.ctx, "a", types.MergePatchType, []byte(`{"spec":{"color":"blue"}}`), metav1.PatchOptions{}))
			if _, err := w.gadgets.Update(w.ctx, old, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
				w.Error(err)
			}
		},
		"an update of a custom resource without a version is invalid": func(w world) {
			obj := w.created("")
			obj.SetResourceVersion("")
			if _, err := w.gadgets.Update(w.ctx, obj, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
				w.Error(err)
			}
		},
		"an update that changes nothing keeps the version": func(w world) {
			obj := w.created(`,"spec":{"color":"red"}`)
			if again := w.must(w.gadgets.Update(w.ctx, obj.DeepCopy(), metav1.UpdateOptions{})); again.GetResourceVersion() != obj.GetResourceVersion() {
				w.Errorf("version %s, then %s", obj.GetResourceVersion(), again.GetResourceVersion())
			}
		},
		"a merge patch with an old version is a conflict": func(w world) {
			w.created("")
			_, err := w.gadgets.Patch(w.ctx, "a", types.MergePatchType, []byte(`{"metadata":{"resourceVersion":"1"},"spec":{"color":"blue"}}`), metav1.PatchOptions{})
			if !apierrors.IsConflict(err) {
				w.Error(err)
			}
		},
		"a JSON patch whose test fails is invalid": func(w world) {
			w.created(`,"spec":{"color":"red"}`)
			_, err := w.gadgets.Patch(w.ctx, "a", types.JSONPatchType, []byte(`[{"op":"test","path":"/spec/color","value":"blue"}]`), metav1.PatchOptions{})
			if !apierrors.IsInvalid(err) {
				w.Error(err)
			}
		},
		"a custom resource has no strategic merge patch": func(w world) {
			w.created("")
			_, err := w.gadgets.Patch(w.ctx, "a", types.StrategicMergePatchType, []byte(`{}`), metav1.PatchOptions{})
			if !apierrors.IsUnsupportedMediaType(err) {
				w.Error(err)
			}
		},
		"an object with a finalizer goes when that is removed": func(w world) {
			obj := w.created("")
			obj.SetFinalizers([]string{"example.com/f"})
			w.must(w.gadgets.Update(w.ctx, obj, metav1.UpdateOptions{}))
			if err := w.gadgets.Delete(w.ctx, "a", metav1.DeleteOptions{}); err != nil {
				w.Fatal(err)
			}
			obj = w.must(w.gadgets.Get(w.ctx, "a", metav1.GetOptions{}))
			if obj.GetDeletionTimestamp() == nil {
				w.Fatalf("not marked: %v", obj)
			}
			more := obj.DeepCopy()
			more.SetFinalizers([]string{"example.com/f", "example.com/g"})
			if _, err := w.gadgets.Update(w.ctx, more, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
				w.Errorf("a finalizer was added: %v", err)
			}
			obj.SetFinalizers(nil)
			w.must(w.gadgets.Update(w.ctx, obj, metav1.UpdateOptions{}))
			if _, err := w.gadgets.Get(w.ctx, "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				w.Error(err)
			}
		},
		"a deletion with another UID is a conflict": func(w world) {
			w.created("")
			err := w.gadgets.Delete(w.ctx, "a", metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions("other")})
			if !apierrors.IsConflict(err) {
				w.Error(err)
			}
		},
		"a dry run stores nothing": func(w world) {
			w.must(w.gadgets.Create(w.ctx, w.gadget(""), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}))
			if _, err := w.gadgets.Get(w.ctx, "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				w.Error(err)
			}
		},
		"an apply creates, and a second one changes nothing": func(w world) {
			config := corev1ac.ConfigMap("a", "shop").WithData(map[string]string{"k": "v"})
			first, err := w.kube.CoreV1().ConfigMaps("shop").Apply(w.ctx, config, metav1.ApplyOptions{FieldManager: "m"})
			if err != nil {
				w.Fatal(err)
			}
			second, err := w.kube.CoreV1().ConfigMaps("shop").Apply(w.ctx, config, metav1.ApplyOptions{FieldManager: "m"})
			if err != nil || first.ResourceVersion != second.ResourceVersion || second.Data["k"] != "v" {
				w.Error(first, second, err)
			}
		},
		"an apply removes what it no longer names, and leaves what others wrote": func(w world) {
			maps := w.kube.CoreV1().ConfigMaps("shop")
			_, err := maps.Apply(w.ctx, corev1ac.ConfigMap("a", "shop").WithData(map[string]string{"mine": "1", "old": "1"}), metav1.ApplyOptions{FieldManager: "m"})
			if err != nil {
				w.Fatal(err)
			}
			if _, err = maps.Patch(w.ctx, "a", types.MergePatchType, []byte(`{"data":{"theirs":"2"}}`), metav1.PatchOptions{FieldManager: "other"}); err != nil {
				w.Fatal(err)
			}
			got, err := maps.Apply(w.ctx, corev1ac.ConfigMap("a", "shop").WithData(map[string]string{"mine": "1"}), metav1.ApplyOptions{FieldManager: "m"})
			if err != nil || len(got.Data) != 2 || got.Data["theirs"] != "2" {
				w.Error(got, err)
			}
		},
		"an apply of another's field is a conflict unless it is forced": func(w world) {
			config := func(replicas int32) *appsv1ac.DeploymentApplyConfiguration {
				return appsv1ac.Deployment("a", "shop").WithSpec(appsv1ac.DeploymentSpec().WithReplicas(replicas).WithSelector(metav1ac.LabelSelector()).
					WithTemplate(corev1ac.PodTemplateSpec().WithSpec(corev1ac.PodSpec().WithContainers(corev1ac.Container().WithName("c").WithImage("i")))))
			}
			deployments := w.kube.AppsV1().Deployments("shop")
			if _, err := deployments.Apply(w.ctx, config(1), metav1.ApplyOptions{FieldManager: "m"}); err != nil {
				w.Fatal(err)
			}
			if _, err := deployments.Apply(w.ctx, config(2), metav1.ApplyOptions{FieldManager: "other"}); !apierrors.IsConflict(err) {
				w.Error(err)
			}
			got, err := deployments.Apply(w.ctx, config(2), metav1.ApplyOptions{FieldManager: "other", Force: true})
			if err != nil || *got.Spec.Replicas != 2 || got.Generation != 2 {
				w.Error(got, err)
			}
		},
		"a list selects by label and by field, and metadata has no content": func(w world) {
			w.put(`{"apiVersion":"v1","kind":"Secret","metadata":{"namespace":"shop","name":"a","labels":{"x":"y"}},"type":"t"}`)
			w.put(`{"apiVersion":"v1","kind":"Secret","metadata":{"namespace":"shop","name":"b"},"type":"u"}`)
			for selector, want := range map[string]metav1.ListOptions{
				"a": {LabelSelector: "x=y"}, "b": {FieldSelector: "type!=t"},
			} {
				list, err := w.kube.CoreV1().Secrets("").List(w.ctx, want)
				if err != nil || len(list.Items) != 1 || list.Items[0].Name != selector {
					w.Error(selector, list, err)
				}
			}
			if _, err := w.kube.CoreV1().Secrets("").List(w.ctx, metav1.ListOptions{FieldSelector: "data.k=v"}); !apierrors.IsBadRequest(err) {
				w.Error(err)
			}
		},
		"a subresource that is not there is refused by name": func(w world) {
			_, err := w.kube.AppsV1().Deployments("shop").GetScale(w.ctx, "a", metav1.GetOptions{})
			if err == nil || !strings.Contains(err.Error(), "does not support the subresource scale of deployments.apps") {
				w.Error(err)
			}
		},
		"an unknown resource is not found": func(w world) {
			if _, err := w.kube.Discovery().ServerResourcesForGroupVersion("nowhere.example.com/v1"); !apierrors.IsNotFound(err) {
				w.Error(err)
			}
		},
		"discovery knows the custom resource and its status": func(w world) {
			list, err := w.kube.Discovery().ServerResourcesForGroupVersion("example.com/v1")
			if err != nil || len(list.APIResources) != 2 || list.APIResources[1].Name != "gadgetries/status" {
				w.Error(list, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { test(newWorld(t)) })
	}
}

func TestAWatchShowsWhatItsSelectorSelects(t *testing.T) {
	w := newWorld(t)
	events, err := w.kube.CoreV1().ConfigMaps("shop").Watch(w.ctx, metav1.ListOptions{LabelSelector: "x=y", SendInitialEvents: ptr.To(true),
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Stop()
	for _, labels := range []string{`"x":"n"`, `"x":"y"`, `"x":"y","z":"1"`, `"x":"n"`} {
		w.put(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"namespace":"shop","name":"a","labels":{` + labels + `}}}`)
	}
	for _, want := range []watch.EventType{watch.Bookmark, watch.Added, watch.Modified, watch.Deleted} {
		e := <-events.ResultChan()
		if e.Type != want {
			t.Fatalf("%s %v, want %s", e.Type, e.Object, want)
		}
		if want == watch.Bookmark && e.Object.(*corev1.ConfigMap).Annotations[metav1.InitialEventsAnnotationKey] != "true" {
			t.Error("the bookmark does not end the initial events")
		}
	}
}
