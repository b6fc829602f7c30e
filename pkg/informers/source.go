// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/gotype"
	"github.com/quartermaster-dev/quartermaster/internal/served"
)

// readers are what the informers read through. They share one HTTP client.
type readers struct {
	config    *rest.Config
	http      *http.Client
	scheme    *runtime.Scheme
	metadata  metadata.Interface
	dynamic   dynamic.Interface
	discovery *served.Discovery
}

func newReaders(config *rest.Config, scheme *runtime.Scheme) (readers, error) {
	config = rest.CopyConfig(config)
	if config.ContentType == "" {
		config.ContentType = runtime.ContentTypeProtobuf
	}
	if config.AcceptContentTypes == "" {
		// Custom resources have no protobuf.
		config.AcceptContentTypes = config.ContentType + "," + runtime.ContentTypeJSON
	}
	if config.UserAgent == "" {
		config.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	c := readers{config: config, scheme: scheme}
	var err error
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return readers{}, fmt.Errorf("informers' HTTP client: %w", err)
	}
	if c.metadata, err = metadata.NewForConfigAndClient(config, c.http); err != nil {
		return readers{}, fmt.Errorf("informers' metadata client: %w", err)
	}
	if c.dynamic, err = dynamic.NewForConfigAndClient(config, c.http); err != nil {
		return readers{}, fmt.Errorf("informers' dynamic client: %w", err)
	}
	found, err := discovery.NewDiscoveryClientForConfigAndClient(config, c.http)
	if err != nil {
		return readers{}, fmt.Errorf("informers' discovery client: %w", err)
	}
	c.discovery = served.New(found)
	return c, nil
}

// source lists and watches one resource, in one namespace or in all of them.
type source struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// sourceFor returns a source that reads no more of the resource than the plan uses. It reads all
// namespaces if namespace is empty.
func (c readers) sourceFor(p *plan, namespace string) (source, error) {
	switch p.decodedAs {
	case Metadata:
		if p.resource.Version == "" {
			return sourceOf(anyVersion{resource: p.resource.GroupResource(), namespace: namespace, clients: c}), nil
		}
		return sourceOf(c.metadata.Resource(p.resource).Namespace(namespace)), nil
	case Unstructured:
		return sourceOf(c.dynamic.Resource(p.resource).Namespace(namespace)), nil
	}
	return c.typedSource(p, namespace)
}

// typedSource returns a source of any resource whose types are in the scheme.
func (c readers) typedSource(p *plan, namespace string) (source, error) {
	codecs := tolerant{rest.CodecFactoryForGeneratedClient(c.scheme, serializer.NewCodecFactory(c.scheme)).WithoutConversion()}
	client, err := rest.RESTClientForConfigAndClient(gotype.ClientConfig(c.config, p.resource.GroupVersion(), codecs), c.http)
	if err != nil {
		return source{}, fmt.Errorf("client of %s: %w", resourceName(p.resource), err)
	}
	get := func(opts *metav1.ListOptions) *rest.Request {
		return client.Get().Namespace(namespace).Resource(p.resource.Resource).VersionedParams(opts, metav1.ParameterCodec)
	}
	return source{
		list: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return get(&opts).Do(ctx).Get()
		},
		watch: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.Watch = true
			return get(&opts).Watch(ctx)
		},
	}, nil
}

// listWatcher is what the dynamic client and the metadata client have in common.
type listWatcher[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

func sourceOf[L runtime.Object](c listWatcher[L]) source {
	return source{
		list:  func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, opts) },
		watch: c.Watch,
	}
}
