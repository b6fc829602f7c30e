// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// requestTimeout keeps an API that does not answer from occupying the workers.
const requestTimeout = 10 * time.Second

// objects reads and deletes live objects.
type objects interface {
	// get returns the metadata of an object, and the time on the server's clock; zero if that is unknown.
	get(ctx context.Context, t policy.Type, name cache.ObjectName) (*metav1.PartialObjectMetadata, time.Time, error)
	// delete deletes exactly the object that was read.
	delete(ctx context.Context, t policy.Type, live *metav1.PartialObjectMetadata) error
}

// api implements objects.
type api struct{ client metadata.Interface }

func newAPI(config *rest.Config) (api, error) {
	config = rest.CopyConfig(config)
	config.Timeout = requestTimeout
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return dateReader{next} })
	client, err := metadata.NewForConfig(config)
	return api{client}, err
}

func (a api) get(ctx context.Context, t policy.Type, name cache.ObjectName) (*metav1.PartialObjectMetadata, time.Time, error) {
	var date time.Time
	ctx = context.WithValue(ctx, dateKey{}, &date)
	live, err := a.client.Resource(t.GroupVersionResource).Namespace(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	return live, date, err
}

func (a api) delete(ctx context.Context, t policy.Type, live *metav1.PartialObjectMetadata) error {
	background := metav1.DeletePropagationBackground
	return a.client.Resource(t.GroupVersionResource).Namespace(live.Namespace).Delete(ctx, live.Name, metav1.DeleteOptions{
		Preconditions:     &metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion},
		PropagationPolicy: &background,
	})
}

type dateKey struct{}

// dateReader notes the date of a response where the request's context asks for it.
type dateReader struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (r dateReader) RoundTrip(req *http.Request) (*http.Response, error) {
	response, err := r.RoundTripper.RoundTrip(req)
	if date, ok := req.Context().Value(dateKey{}).(*time.Time); ok && err == nil {
		*date, _ = http.ParseTime(response.Header.Get("Date")) // zero if there is none
	}
	return response, err
}
