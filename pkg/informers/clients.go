// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Clients are those that the informers read through.
type Clients struct {
	Typed    kubernetes.Interface
	Metadata metadata.Interface
	// Dynamic is for more than the metadata of custom resources, and may be nil without such a need.
	Dynamic dynamic.Interface
	// Content reads ConfigMaps and Secrets of which a digest is needed, and leaves no data in its
	// buffers. Without it, as in tests with fake clients, Typed is used.
	Content rest.Interface
}

// NewClients builds the clients of the informers: in protobuf but for custom resources, without a rate limit, since an informer makes
// few requests and its reflector backs off by itself. The content client has connections of its own, unless
// config brings a Transport.
func NewClients(config *rest.Config) (Clients, error) {
	config = rest.CopyConfig(config)
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.QPS, config.RateLimiter = -1, nil
	if config.UserAgent == "" {
		config.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return Clients{}, fmt.Errorf("informers' HTTP client: %w", err)
	}
	var c Clients
	if c.Typed, err = kubernetes.NewForConfigAndClient(config, httpClient); err != nil {
		return Clients{}, fmt.Errorf("informers' typed client: %w", err)
	}
	if c.Metadata, err = metadata.NewForConfigAndClient(config, httpClient); err != nil {
		return Clients{}, fmt.Errorf("informers' metadata client: %w", err)
	}
	if c.Dynamic, err = dynamic.NewForConfigAndClient(config, httpClient); err != nil {
		return Clients{}, fmt.Errorf("informers' dynamic client: %w", err)
	}
	content := rest.CopyConfig(config)
	content.APIPath = "/api"
	content.GroupVersion = &corev1.SchemeGroupVersion
	content.NegotiatedSerializer = wipingSerializer{rest.CodecFactoryForGeneratedClient(scheme.Scheme, scheme.Codecs).WithoutConversion()}
	if config.Transport == nil { // else somebody wants his own
		wiping, err := newWipingTransport(config)
		if err != nil {
			return Clients{}, fmt.Errorf("informers' content transport: %w", err)
		}
		httpClient = &http.Client{Transport: wiping}
	}
	if c.Content, err = rest.RESTClientForConfigAndClient(content, httpClient); err != nil {
		return Clients{}, fmt.Errorf("informers' content client: %w", err)
	}
	return c, nil
}
