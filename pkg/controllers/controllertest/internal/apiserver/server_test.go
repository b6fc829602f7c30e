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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// fixture is a server with the custom resource gadgetries and a client of it.
type fixture struct {
	*testing.T
	ctx    context.Context
	server *Server
	kube   kubernetes.Interface
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	s := New(clientscheme.Scheme, Hooks{})
	f := fixture{T: t, ctx: t.Context(), server: s}
	f.put(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"gadgetries.example.com"},"spec":{
		"group":"example.com","names":{"kind":"Gadget","plural":"gadgetries"},"scope":"Namespaced",
		"versions":[{"name":"v1","served":true,"storage":true,"subresources":{"status":{}}}]}}`)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	f.kube = kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	return f
}

func (f fixture) put(text string) {
	f.Helper()
	obj := &unstructured.Unstructured{}
	assert.NoError(f, obj.UnmarshalJSON([]byte(text)))
	assert.NoError(f, f.server.Put(obj))
}

// What the server has in common with the real one is tested on both, in test/widget.
func TestServerRefusesWhatItDoesNotServe(t *testing.T) {
	for name, tc := range map[string]func(f fixture){
		"a subresource that is not there is refused by name": func(f fixture) {
			_, err := f.kube.AppsV1().Deployments("shop").GetScale(f.ctx, "a", metav1.GetOptions{})
			if err == nil || !strings.Contains(err.Error(), "does not support the subresource scale of deployments.apps") {
				f.Error(err)
			}
		},
		"an unknown resource is not found": func(f fixture) {
			if _, err := f.kube.Discovery().ServerResourcesForGroupVersion("nowhere.example.com/v1"); !apierrors.IsNotFound(err) {
				f.Error(err)
			}
		},
		"discovery knows the custom resource and its status": func(f fixture) {
			list, err := f.kube.Discovery().ServerResourcesForGroupVersion("example.com/v1")
			if err != nil || len(list.APIResources) != 2 || list.APIResources[1].Name != "gadgetries/status" {
				f.Error(list, err)
			}
		},
		"an update that removes what kubectl last applied is refused": func(f fixture) {
			f.put(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"namespace":"shop","name":"a","annotations":{"` + corev1.LastAppliedConfigAnnotation + `":"{}"}}}`)
			cached := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}}
			if _, err := f.kube.CoreV1().ConfigMaps("shop").Update(f.ctx, cached, metav1.UpdateOptions{}); !apierrors.IsBadRequest(err) {
				f.Error(err)
			}
			cached.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "{}"}
			if _, err := f.kube.CoreV1().ConfigMaps("shop").Update(f.ctx, cached, metav1.UpdateOptions{}); err != nil {
				f.Error(err)
			}
		},
		"an object does not take the place of another UID": func(f fixture) {
			f.put(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"a","uid":"1"}}`)
			other := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": "a", "uid": "2"}}}
			if err := f.server.Put(other); err == nil {
				f.Error("no error")
			}
		},
	} {
		t.Run(name, func(t *testing.T) { tc(newFixture(t)) })
	}
}

func TestWatchShowsWhatItsSelectorSelects(t *testing.T) {
	f := newFixture(t)
	events, err := f.kube.CoreV1().ConfigMaps("shop").Watch(f.ctx, metav1.ListOptions{LabelSelector: "x=y", SendInitialEvents: ptr.To(true),
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true})
	assert.NoError(t, err)
	defer events.Stop()
	for _, labels := range []string{`"x":"n"`, `"x":"y"`, `"x":"y","z":"1"`, `"x":"n"`} {
		f.put(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"namespace":"shop","name":"a","labels":{` + labels + `}}}`)
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
