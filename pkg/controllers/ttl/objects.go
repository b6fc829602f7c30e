// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// requestTimeout keeps an API that does not answer from occupying the workers.
const requestTimeout = 10 * time.Second

// objects reads and deletes live objects.
type objects interface {
	// get returns an object, or no more than its metadata, and the time on the server's clock; zero if
	// that is unknown.
	get(ctx context.Context, t policy.Type, name cache.ObjectName, whole bool) (metav1.Object, time.Time, error)
	// delete deletes exactly the object that was read.
	delete(ctx context.Context, t policy.Type, live metav1.Object) error
}

// api implements objects.
type api struct {
	metadata metadata.Interface
	dynamic  dynamic.Interface
}

func newAPI(config *rest.Config) (api, error) {
	config = rest.CopyConfig(config)
	config.Timeout = requestTimeout
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return dateReader{next} })
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return api{}, err
	}
	whole, err := dynamic.NewForConfig(config)
	return api{client, whole}, err
}

func (a api) get(ctx context.Context, t policy.Type, name cache.ObjectName, whole bool) (live metav1.Object, serverTime time.Time, err error) {
	ctx = context.WithValue(ctx, dateKey{}, &serverTime)
	if whole {
		live, err = a.dynamic.Resource(t.GroupVersionResource).Namespace(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	} else {
		live, err = a.metadata.Resource(t.GroupVersionResource).Namespace(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	}
	return live, serverTime, err
}

func (a api) delete(ctx context.Context, t policy.Type, live metav1.Object) error {
	background := metav1.DeletePropagationBackground
	uid, version := live.GetUID(), live.GetResourceVersion()
	return a.metadata.Resource(t.GroupVersionResource).Namespace(live.GetNamespace()).Delete(ctx, live.GetName(), metav1.DeleteOptions{
		Preconditions:     &metav1.Preconditions{UID: &uid, ResourceVersion: &version},
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
