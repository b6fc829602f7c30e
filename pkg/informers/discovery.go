// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
)

// discoveryTimeout is how long an API server may take to say in which version it has a resource.
const discoveryTimeout = 30 * time.Second

// anyVersion lists and watches the metadata of a resource whose need names no version. It uses the group's
// preferred version or, if the resource is not in it, another. It looks the version up at the first request,
// and again when the server does not know it any more.
type anyVersion struct {
	resource  schema.GroupResource
	namespace string
	clients   Readers

	mu      sync.Mutex
	version string
}

func (a *anyVersion) List(ctx context.Context, opts metav1.ListOptions) (*metav1.PartialObjectMetadataList, error) {
	client, err := a.client(ctx)
	if err != nil {
		return nil, err
	}
	list, err := client.List(ctx, opts)
	a.forgetIfNotFound(err)
	return list, err
}

func (a *anyVersion) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	client, err := a.client(ctx)
	if err != nil {
		return nil, err
	}
	w, err := client.Watch(ctx, opts)
	a.forgetIfNotFound(err)
	return w, err
}

// forgetIfNotFound forgets the version if the server does not serve it.
func (a *anyVersion) forgetIfNotFound(err error) {
	if apierrors.IsNotFound(err) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.version = ""
	}
}

func (a *anyVersion) client(ctx context.Context) (metadata.ResourceInterface, error) {
	a.mu.Lock()
	version := a.version
	a.mu.Unlock()
	if version == "" {
		var err error
		if version, err = a.clients.servedVersion(ctx, a.resource); err != nil {
			return nil, err
		}
		a.mu.Lock()
		a.version = version
		a.mu.Unlock()
	}
	return a.clients.metadata.Resource(a.resource.WithVersion(version)).Namespace(a.namespace), nil
}

// ServerGroups returns the API groups of a server, without their resources. It is an error if there are none:
// a load balancer without a backend may answer 404 to everything, and that says nothing of any resource.
func ServerGroups(ctx context.Context, d discovery.DiscoveryInterfaceWithContext) (*metav1.APIGroupList, error) {
	// The aggregated format would hold all resources.
	groups, err := d.WithLegacyWithContext(ctx).ServerGroupsWithContext(ctx)
	switch {
	case apierrors.IsNotFound(err) || err == nil && len(groups.Groups) == 0:
		return nil, errors.New("discover API groups: the server has none, so it is no API server")
	case err != nil:
		return nil, fmt.Errorf("discover API groups: %w", err)
	}
	return groups, nil
}

// servedVersion returns a version in which the server has the resource, or a NotFound error if it has none.
// It asks discovery for this group only, so that an aggregated API that is down affects only those who need
// it.
func (c Readers) servedVersion(ctx context.Context, resource schema.GroupResource) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, discoveryTimeout) // the client has none
	defer cancel()
	groups, err := ServerGroups(ctx, c.discovery)
	if err != nil {
		return "", err
	}
	notFound := apierrors.NewNotFound(resource, "")
	at := slices.IndexFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == resource.Group })
	if at < 0 {
		return "", notFound
	}
	group := &groups.Groups[at]
	for _, v := range append([]metav1.GroupVersionForDiscovery{group.PreferredVersion}, group.Versions...) {
		list, err := c.discovery.ServerResourcesForGroupVersionWithContext(ctx, v.GroupVersion)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("discover %s: %w", v.GroupVersion, err)
		}
		if slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource.Resource }) {
			return v.Version, nil
		}
	}
	return "", notFound
}
