// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Clients are those that the informers read through.
type Clients struct {
	Typed    kubernetes.Interface
	Metadata metadata.Interface
	// Content reads ConfigMaps and Secrets of which a digest is needed, and leaves no data in its
	// buffers. Without it, as in tests with fake clients, Typed is used.
	Content rest.Interface
}

// NewClients builds the clients of the informers: in protobuf, without a rate limit, since an informer makes
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

// wipingSerializer overwrites the buffer in which client-go's decoder of a watch keeps the last event:
// otherwise that event stays there until a longer one comes, or for as long as the watch lives.
type wipingSerializer struct {
	runtime.NegotiatedSerializer
}

func (s wipingSerializer) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := s.NegotiatedSerializer.SupportedMediaTypes()
	wiping := make([]runtime.SerializerInfo, len(infos))
	for i, info := range infos {
		if stream := info.StreamSerializer; stream != nil {
			wrapped := *stream
			wrapped.Framer = wipingFramer{stream.Framer}
			info.StreamSerializer = &wrapped
		}
		wiping[i] = info
	}
	return wiping
}

type wipingFramer struct {
	runtime.Framer
}

func (f wipingFramer) NewFrameReader(r io.ReadCloser) io.ReadCloser {
	return &wipingReader{ReadCloser: f.Framer.NewFrameReader(r)}
}

// wipingReader relies on how the decoder reads: it passes its whole buffer for the beginning of a frame,
// and the unused rest for the continuation of one that did not fit.
type wipingReader struct {
	io.ReadCloser
	used      int // bytes of the last frame at the beginning of the decoder's buffer
	continues bool
}

// Read overwrites the last frame, which has been decoded by now, before it waits for the next one.
func (r *wipingReader) Read(p []byte) (int, error) {
	if !r.continues {
		clear(p[:min(r.used, len(p))])
		r.used = 0
	}
	n, err := r.ReadCloser.Read(p)
	r.used += n
	r.continues = errors.Is(err, io.ErrShortBuffer)
	return n, err
}
