// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The originals by their names in --compat.
const (
	reflector  = "reflector"
	replicator = "replicator"
)

// Entry describes the controller to the host. It is off by default, since it may write every Secret of
// the cluster.
func Entry() controllers.Entry {
	flags := NewConfig()
	key := policy.NewDigesterKey() // the cache and the controller compare hashes
	return controllers.Entry{
		Name:         Name,
		Summary:      "copies Secrets and ConfigMaps to other namespaces",
		OffByDefault: true,
		Compat:       []string{reflector, replicator},
		Config:       &flags,
		Workers:      4,
		Needs: func(s controllers.Settings) ([]informers.Need, error) {
			cfg := flags.withSettings(s)
			return cfg.needs(policy.NewDigester(cfg.Options, key)), nil
		},
		Permissions: func(s controllers.Settings) []rbacv1.PolicyRule {
			cfg := flags.withSettings(s)
			return cfg.permissions()
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags.withSettings(h.Settings)
			set := informerSet{Objects: map[policy.Kind]*informers.Informer[policy.Cached]{}}
			for _, kind := range cfg.CopiedKinds() {
				set.Objects[kind] = informers.For[policy.Cached](h, resourceOf(kind))
			}
			if len(cfg.Scope) == 0 {
				set.Namespaces = informers.For[metav1.Object](h, informers.Namespaces)
			}
			return newController(cfg, policy.NewDigester(cfg.Options, key), set, h.Client, h.Events, h.LoopOptions, h.Metrics)
		},
	}
}

// withSettings returns the configuration under these settings.
func (c Config) withSettings(s controllers.Settings) Config {
	c.Reflector, c.Replicator = slices.Contains(s.Compat, reflector), slices.Contains(s.Compat, replicator)
	c.DryRun = c.DryRun || s.DryRun
	c.Scope = s.Namespaces
	c.ProtectedNamespaces = slices.Concat(c.ProtectedNamespaces, s.OwnNamespaces)
	return c
}

func (c *Config) needs(digester *policy.Digester) (needs []informers.Need) {
	for _, kind := range c.CopiedKinds() {
		need := informers.Need{Resource: resourceOf(kind), Digest: informers.DigestOf(digester.Digest)}
		if kind == policy.Secret {
			need.FieldSelector = informers.NotHelm
		}
		needs = append(needs, need)
	}
	if len(c.Scope) == 0 {
		needs = append(needs, informers.Need{Resource: informers.Namespaces, Fields: informers.Labels | informers.CreationTimestamp, ClusterScoped: true})
	}
	return needs
}
