// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
)

// anyVersion lists and watches the metadata of a resource whose need names no version. It asks discovery for
// the version once, and again when the server does not know it any more.
type anyVersion struct {
	resource  schema.GroupResource
	namespace string
	clients   readers
}

func (a anyVersion) List(ctx context.Context, opts metav1.ListOptions) (list *metav1.PartialObjectMetadataList, err error) {
	err = a.do(ctx, func(c metadata.ResourceInterface) (err error) { list, err = c.List(ctx, opts); return err })
	return list, err
}

func (a anyVersion) Watch(ctx context.Context, opts metav1.ListOptions) (w watch.Interface, err error) {
	err = a.do(ctx, func(c metadata.ResourceInterface) (err error) { w, err = c.Watch(ctx, opts); return err })
	return w, err
}

func (a anyVersion) do(ctx context.Context, request func(metadata.ResourceInterface) error) error {
	version, err := a.clients.discovery.KnownVersion(ctx, a.resource)
	if err != nil {
		return err
	}
	err = request(a.clients.metadata.Resource(a.resource.WithVersion(version)).Namespace(a.namespace))
	if apierrors.IsNotFound(err) {
		a.clients.discovery.ForgetVersion(a.resource)
	}
	return err
}
