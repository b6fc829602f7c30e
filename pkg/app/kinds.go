// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/utils/lru"

	"github.com/quartermaster-dev/quartermaster/internal/served"
)

const (
	// unknownKindTTL is how long an unknown kind is not asked for again.
	unknownKindTTL = 10 * time.Second
	// knownKindTTL is how long a known kind is not asked for again: a definition may be made again with another
	// plural or scope.
	knownKindTTL = 10 * time.Minute
	// maxVersions limits the versions of API groups that are remembered, since anybody may name more.
	maxVersions = 1000
)

// kindMapper finds the resources of kinds. Each request is for one version of one API group, so that neither
// an unknown version nor an aggregated API that is down delays requests for others.
type kindMapper struct {
	discovery *served.Discovery
	versions  *lru.Cache         // of versionResources, by GroupVersion
	requests  singleflight.Group // by GroupVersion
}

// versionResources is the API server's answer about the resources of a version, and its time.
type versionResources struct {
	at        time.Time
	resources map[string]*meta.RESTMapping
}

func newKindMapper(config *rest.Config) (*kindMapper, error) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	return &kindMapper{discovery: served.New(client), versions: lru.New(maxVersions)}, nil
}

// mapping returns the resource of a kind. For an unknown kind it asks the API server, every unknownKindTTL at
// most unless the request fails, and waits for the answer until ctx ends. A known kind is returned at once;
// every knownKindTTL, the API server is asked in the background, and unknownKindTTL after a failure.
func (k *kindMapper) mapping(ctx context.Context, kind schema.GroupVersionKind) (*meta.RESTMapping, error) {
	version := kind.GroupVersion()
	known, _ := k.versions.Get(version)
	d, _ := known.(versionResources)
	age, found := time.Since(d.at), d.resources[kind.Kind]
	if found == nil && age >= unknownKindTTL || age >= knownKindTTL {
		answered := k.requests.DoChan(version.String(), func() (any, error) { return k.ask(version) })
		if found != nil {
			return found, nil
		}
		select {
		case answer := <-answered:
			if answer.Err != nil {
				return nil, fmt.Errorf("find the resource of %s: %w", kind, answer.Err)
			}
			found = answer.Val.(versionResources).resources[kind.Kind]
		case <-ctx.Done():
			return nil, fmt.Errorf("find the resource of %s: %w", kind, context.Cause(ctx))
		}
	}
	if found == nil {
		return nil, &meta.NoKindMatchError{GroupKind: kind.GroupKind(), SearchedVersions: []string{kind.Version}}
	}
	return found, nil
}

// ask asks the API server which resources a version has, and remembers its answer. It goes on if the caller
// gives up, since other callers may wait for the same answer.
func (k *kindMapper) ask(version schema.GroupVersion) (versionResources, error) {
	resources, err := k.discovery.Resources(context.Background(), version)
	if err != nil {
		if known, found := k.versions.Get(version); found {
			d := known.(versionResources)
			d.at = time.Now().Add(unknownKindTTL - knownKindTTL)
			k.versions.Add(version, d)
		}
		return versionResources{}, err
	}
	d := versionResources{at: time.Now(), resources: map[string]*meta.RESTMapping{}}
	for _, r := range resources {
		if d.resources[r.Kind] != nil || strings.Contains(r.Name, "/") { // a subresource
			continue
		}
		scope := meta.RESTScopeRoot
		if r.Namespaced {
			scope = meta.RESTScopeNamespace
		}
		d.resources[r.Kind] = &meta.RESTMapping{
			Resource: version.WithResource(r.Name), GroupVersionKind: version.WithKind(r.Kind), Scope: scope,
		}
	}
	k.versions.Add(version, d)
	return d, nil
}
