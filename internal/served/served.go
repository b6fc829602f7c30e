// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package served asks an API server by discovery what it serves. It asks for the resources of one version of
// a group at a time, so that an aggregated API that is down affects only the controllers that need it. A
// server without any group is no API server: a load balancer without a backend may answer 404 to everything,
// and such an answer does not say that a resource is absent.
package served

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
	"k8s.io/client-go/discovery"
)

// Timeout is how long an API server may take to answer.
const Timeout = 30 * time.Second

// Discovery asks one API server.
type Discovery struct {
	client   discovery.DiscoveryInterfaceWithContext
	versions sync.Map // the last versions that Version has found, by schema.GroupResource
}

// New returns a Discovery that asks with the client.
func New(client discovery.DiscoveryInterface) *Discovery {
	return &Discovery{client: discovery.ToDiscoveryInterfaceWithContext(client)}
}

// Resources returns the resources that the server has in a version: none if it does not have the version.
func (d *Discovery) Resources(ctx context.Context, version schema.GroupVersion) ([]metav1.APIResource, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	list, err := d.client.ServerResourcesForGroupVersionWithContext(ctx, version.String())
	if apierrors.IsNotFound(err) || err == nil && len(list.APIResources) == 0 { // client-go's answer to a 404 for v1
		_, err = d.groups(ctx)
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("discover %s: %w", version, err)
	}
	return list.APIResources, nil
}

// Version returns a version in which the server has the resource: the group's preferred version or, if the
// resource is not in it, another. It returns a NotFound error if the server has the resource in none.
func (d *Discovery) Version(ctx context.Context, resource schema.GroupResource) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout) // the client may have no time-out
	defer cancel()
	groups, err := d.groups(ctx)
	if err != nil {
		return "", err
	}
	notFound := apierrors.NewNotFound(resource, "")
	i := slices.IndexFunc(groups, func(g metav1.APIGroup) bool { return g.Name == resource.Group })
	if i < 0 {
		return "", notFound
	}
	preferred := groups[i].PreferredVersion
	versions := slices.DeleteFunc(groups[i].Versions, func(v metav1.GroupVersionForDiscovery) bool { return v == preferred })
	for _, v := range slices.Insert(versions, 0, preferred) {
		resources, err := d.Resources(ctx, resource.WithVersion(v.Version).GroupVersion())
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(resources, func(r metav1.APIResource) bool { return r.Name == resource.Resource }) {
			d.versions.Store(resource, v.Version)
			return v.Version, nil
		}
	}
	return "", notFound
}

// KnownVersion returns the version that Version has found last, until ForgetVersion; otherwise it asks.
func (d *Discovery) KnownVersion(ctx context.Context, resource schema.GroupResource) (string, error) {
	if known, ok := d.versions.Load(resource); ok {
		return known.(string), nil
	}
	return d.Version(ctx, resource)
}

// ForgetVersion is called when the server does not serve the known version any more.
func (d *Discovery) ForgetVersion(resource schema.GroupResource) { d.versions.Delete(resource) }

// groups returns the API groups of the server, without their resources. It is an error if there are none.
func (d *Discovery) groups(ctx context.Context) ([]metav1.APIGroup, error) {
	// The aggregated format would hold all resources.
	list, err := d.client.WithLegacyWithContext(ctx).ServerGroupsWithContext(ctx)
	switch {
	case apierrors.IsNotFound(err) || err == nil && len(list.Groups) == 0:
		return nil, errors.New("discover API groups: the server has none, so it is no API server")
	case err != nil:
		return nil, fmt.Errorf("discover API groups: %w", err)
	}
	return list.Groups, nil
}
