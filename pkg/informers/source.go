// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
)

// Clients are what the informers read through. They share one HTTP client.
type Clients struct {
	config   *rest.Config
	http     *http.Client
	scheme   *runtime.Scheme
	metadata metadata.Interface
	// many reads the metadata of many resources, of which little is expected: over HTTP/2, where a watch
	// takes half the memory that a connection of its own would.
	many      metadata.Interface
	dynamic   dynamic.Interface
	discovery discovery.DiscoveryInterface
}

// NewClients returns clients that read types of scheme as Go types, and others as unstructured
// objects. They use config's content type, or protobuf if it names none, and HTTP/1.1 (ADR 0007). It
// is an error if config is invalid.
func NewClients(config *rest.Config, scheme *runtime.Scheme) (Clients, error) {
	config = rest.CopyConfig(config)
	many := rest.CopyConfig(config)
	config.NextProtos = []string{"http/1.1"}
	if config.Dial == nil {
		config.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAliveConfig: keepAlive}).DialContext
	}
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
	c := Clients{config: config, scheme: scheme}
	var err error
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return Clients{}, fmt.Errorf("informers' HTTP client: %w", err)
	}
	if c.metadata, err = metadata.NewForConfigAndClient(config, c.http); err != nil {
		return Clients{}, fmt.Errorf("informers' metadata client: %w", err)
	}
	if many.UserAgent == "" {
		many.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	if c.many, err = metadata.NewForConfig(many); err != nil {
		return Clients{}, fmt.Errorf("informers' metadata client over HTTP/2: %w", err)
	}
	if c.dynamic, err = dynamic.NewForConfigAndClient(config, c.http); err != nil {
		return Clients{}, fmt.Errorf("informers' dynamic client: %w", err)
	}
	if c.discovery, err = discovery.NewDiscoveryClientForConfigAndClient(config, c.http); err != nil {
		return Clients{}, fmt.Errorf("informers' discovery client: %w", err)
	}
	return c, nil
}

const dialTimeout = 30 * time.Second // client-go's

// keepAlive notices within 30 s that the API server's machine, or the way to it, is gone, since there
// are no pings as in HTTP/2. For a server that stands still, see watchPatience.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// source lists and watches one resource, in one namespace or in all of them.
type source struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (stream, error)
}

// newSource returns a source that reads no more of the resource than the plan uses. It reads all
// namespaces if namespace is empty. It is an error if the scheme does not fit the plan's form.
func newSource(p *plan, c Clients, namespace string) (source, error) {
	content := p.whole || len(p.digests) > 0
	switch {
	case content:
	case p.selective && p.resource.Version != "":
		return sourceOf(c.many.Resource(p.resource).Namespace(namespace)), nil
	default:
		return sourceOf(metadataOf(p.resource, c, namespace)), nil
	}
	known := c.scheme.IsVersionRegistered(p.resource.GroupVersion())
	switch {
	case p.whole && !p.unstructured && !known:
		return source{}, fmt.Errorf("the scheme has no types of %s, so %s cannot be had in typed form",
			p.resource.GroupVersion(), resourceName(p.resource))
	case p.unstructured && known:
		return source{}, fmt.Errorf("the scheme has types of %s, so %s cannot be had in unstructured form",
			p.resource.GroupVersion(), resourceName(p.resource))
	case known:
		return newTypedSource(p, c, namespace)
	}
	return sourceOf(c.dynamic.Resource(p.resource).Namespace(namespace)), nil
}

// metadataOf reads the metadata of a resource, in any version if it names none.
func metadataOf(resource schema.GroupVersionResource, c Clients, namespace string) listWatcher[*metav1.PartialObjectMetadataList] {
	if resource.Version == "" {
		return newAnyVersion(resource.GroupResource(), c, namespace)
	}
	return c.metadata.Resource(resource).Namespace(namespace)
}

// newTypedSource returns a source of any resource whose types are in the scheme.
func newTypedSource(p *plan, c Clients, namespace string) (source, error) {
	config := rest.CopyConfig(c.config)
	version := p.resource.GroupVersion()
	config.GroupVersion = &version
	config.APIPath = "/apis"
	if version.Group == "" {
		config.APIPath = "/api"
	}
	codecs := rest.CodecFactoryForGeneratedClient(c.scheme, serializer.NewCodecFactory(c.scheme))
	serializer := leanSerializer{codecs.WithoutConversion(), c.scheme}
	config.NegotiatedSerializer = serializer
	client, err := rest.RESTClientForConfigAndClient(config, c.http)
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
		watch: func(ctx context.Context, opts metav1.ListOptions) (stream, error) {
			opts.Watch = true
			ctx, cancel := context.WithCancel(ctx)
			// As client-go's watches, it does not wait for --kube-api-qps: ADR 0005.
			body, err := get(&opts).Throttle(flowcontrol.NewFakeAlwaysRateLimiter()).Stream(ctx)
			if err != nil {
				cancel()
				if utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err) {
					err = fmt.Errorf("%w: %w", errNoAnswer, err)
				}
				return nil, err
			}
			return &decodedStream{body: body, cancel: cancel, serializer: serializer, version: version}, nil
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
		list: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, opts) },
		watch: func(ctx context.Context, opts metav1.ListOptions) (stream, error) {
			w, err := c.Watch(ctx, opts)
			if err != nil {
				return nil, err
			}
			return newChannelStream(w)
		},
	}
}
