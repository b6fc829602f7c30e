// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Entry describes the controller to the host.
func Entry() controllers.Entry {
	flags := NewConfig()
	return controllers.Entry{
		Name:        Name,
		Summary:     "rolls workloads whose ConfigMaps or Secrets changed",
		Compat:      []string{original},
		Config:      &flags,
		Workers:     4,
		Needs:       func(s controllers.Settings) ([]informers.Need, error) { return needs(flags.withSettings(s)) },
		Permissions: func(s controllers.Settings) []rbacv1.PolicyRule { return permissions(flags.withSettings(s)) },
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags.withSettings(h.Settings)
			var set informerSet
			sources := map[schema.GroupVersionResource]**informers.Informer[cachedSource]{
				informers.ConfigMaps: &set.ConfigMaps, informers.Secrets: &set.Secrets, PodStatusesResource: &set.PodStatuses,
			}
			others := map[schema.GroupVersionResource]**informers.Informer[metav1.Object]{
				informers.Deployments: &set.Deployments, informers.StatefulSets: &set.StatefulSets, informers.DaemonSets: &set.DaemonSets,
				informers.CronJobs: &set.CronJobs, informers.Jobs: &set.Jobs, RolloutsResource: &set.Rollouts,
				informers.Namespaces: &set.Namespaces,
			}
			for _, resource := range resources(cfg) {
				if source := sources[resource]; source != nil {
					*source = informers.For[cachedSource](h, resource)
				} else {
					*others[resource] = informers.For[metav1.Object](h, resource)
				}
			}
			return newController(cfg, set, h.Clients, h.Events, h.LoopOptions, h.Metrics)
		},
	}
}

// original is the name in --compat of stakater/Reloader.
const original = "reloader"

// withSettings returns the configuration under these settings.
func (c Config) withSettings(s controllers.Settings) Config {
	c.Compat = slices.Contains(s.Compat, original)
	c.DryRun = c.DryRun || s.DryRun
	c.Scope = s.Namespaces
	return c
}

// needs returns what the cache keeps: a digest of each source and the references of each workload.
func needs(cfg Config) ([]informers.Need, error) {
	digest, err := sourceDigest(cfg)
	if err != nil {
		return nil, err
	}
	var needs []informers.Need
	for _, resource := range resources(cfg) {
		need := informers.Need{Resource: resource}
		switch resource {
		case informers.ConfigMaps, informers.Secrets:
			need.Annotations = sourceAnnotations(cfg)
			need.Digest, need.History = informers.DigestOf(digest), true
			if resource == informers.Secrets {
				need.FieldSelector = informers.NotHelm
			}
		case PodStatusesResource:
			need.Digest, need.History, need.Optional = informers.DigestOf(digest), true, true
		case informers.Namespaces:
			need.Fields, need.ClusterScoped = informers.Labels, true
		default:
			need.Annotations = workloadAnnotations(cfg)
			need.Digest, need.History = informers.DigestOf(workloadDigest(cfg)), true
			need.Optional = resource == RolloutsResource
		}
		needs = append(needs, need)
	}
	return needs, nil
}
