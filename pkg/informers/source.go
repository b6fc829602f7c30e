// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/watchlist"
)

// source lists and watches one resource in all namespaces.
type source struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
	// example has the type of the objects in the cache.
	example runtime.Object
	// noStreaming is set for fake clients, which cannot stream a list.
	noStreaming bool
}

// listWatcher is what the typed clients and the metadata client have in common.
type listWatcher[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

func sourceOf[L runtime.Object](c listWatcher[L], client any, example runtime.Object) source {
	return source{
		list: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return c.List(ctx, opts)
		},
		watch:       c.Watch,
		example:     example,
		noStreaming: watchlist.DoesClientNotSupportWatchListSemantics(client),
	}
}

// wipedSource is for ConfigMaps and Secrets, see Clients.Content.
func wipedSource(client rest.Interface, resource string) source {
	lw := cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, func(*metav1.ListOptions) {})
	return source{list: lw.ListWithContext, watch: lw.WatchWithContext}
}

// newSource picks the client that suffices for the plan.
func newSource(p *plan, c Clients) (source, error) {
	if !p.whole && len(p.digests) == 0 {
		if p.resource.Version == "" {
			return sourceOf(newAnyVersion(p.resource.GroupResource(), c), c.Metadata, &Entry{}), nil
		}
		return sourceOf(c.Metadata.Resource(p.resource), c.Metadata, &Entry{}), nil
	}
	s, err := newContentSource(p, c)
	if !p.whole {
		s.example = &Entry{}
	}
	return s, err
}

// newContentSource is newSource for more than metadata.
func newContentSource(p *plan, c Clients) (source, error) {
	custom := !scheme.Scheme.IsGroupRegistered(p.resource.Group)
	if c.Dynamic != nil && custom && (p.unstructured || !p.whole) {
		return sourceOf(c.Dynamic.Resource(p.resource), c.Dynamic, &unstructured.Unstructured{}), nil
	}
	all := metav1.NamespaceAll
	switch p.resource {
	case ConfigMaps, Secrets:
		if c.Content != nil {
			return wipedSource(c.Content, p.resource.Resource), nil
		}
		if p.resource == Secrets {
			return sourceOf(c.Typed.CoreV1().Secrets(all), c.Typed, &corev1.Secret{}), nil
		}
		return sourceOf(c.Typed.CoreV1().ConfigMaps(all), c.Typed, &corev1.ConfigMap{}), nil
	case Namespaces:
		return sourceOf(c.Typed.CoreV1().Namespaces(), c.Typed, &corev1.Namespace{}), nil
	case Deployments:
		return sourceOf(c.Typed.AppsV1().Deployments(all), c.Typed, &appsv1.Deployment{}), nil
	case StatefulSets:
		return sourceOf(c.Typed.AppsV1().StatefulSets(all), c.Typed, &appsv1.StatefulSet{}), nil
	case DaemonSets:
		return sourceOf(c.Typed.AppsV1().DaemonSets(all), c.Typed, &appsv1.DaemonSet{}), nil
	case CronJobs:
		return sourceOf(c.Typed.BatchV1().CronJobs(all), c.Typed, &batchv1.CronJob{}), nil
	case Jobs:
		return sourceOf(c.Typed.BatchV1().Jobs(all), c.Typed, &batchv1.Job{}), nil
	}
	return source{}, fmt.Errorf("%s cannot be had in %s form", resourceName(p.resource), p.form())
}
