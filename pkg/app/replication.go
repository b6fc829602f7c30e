// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// replicationEntry returns the entry of replication. It is off by default, since it may write every
// Secret of the cluster.
func replicationEntry(o *Options) Entry {
	// config is called only after the flags have been parsed, some of which belong to the host.
	config := func() replication.Config {
		cfg := o.Replication
		cfg.Reflector, cfg.Mittwald = o.compat("reflector"), o.compat("replicator")
		cfg.DryRun = cfg.DryRun || o.Generic.DryRun
		cfg.Scope = o.Informers.Namespaces
		cfg.ProtectedNamespaces = append(slices.Clone(cfg.ProtectedNamespaces), o.Election.ResourceNamespace)
		return cfg
	}
	// The cache and the controller compare hashes, so they share the key.
	digester := sync.OnceValue(func() *policy.Digester { return policy.NewDigester(config().Options) })
	return Entry{
		Name:         replication.Name,
		Summary:      "copies Secrets and ConfigMaps to other namespaces",
		OffByDefault: true,
		Config:       &o.Replication,
		Needs: func() ([]informers.Need, error) {
			cfg := config()
			var needs []informers.Need
			for _, kind := range cfg.CopiedKinds() {
				need := informers.Need{Resource: replication.ResourceOf(kind), Digest: digester().Digest}
				if kind == policy.Secret {
					need.SecretTypes = []corev1.SecretType{corev1.SecretTypeServiceAccountToken}
				}
				needs = append(needs, need)
			}
			if len(cfg.Scope) == 0 {
				needs = append(needs, informers.Need{Resource: informers.Namespaces, Fields: informers.Labels | informers.CreationTimestamp, ClusterScoped: true})
			}
			return needs, nil
		},
		Rules: func() []rbacv1.PolicyRule {
			cfg := config()
			return cfg.Rules()
		},
		New: func(h Host) (controllers.Controller, error) {
			cfg := config()
			in := replication.Informers{Objects: map[policy.Kind]toolscache.SharedIndexInformer{}}
			for _, kind := range cfg.CopiedKinds() {
				in.Objects[kind] = h.Informer(replication.ResourceOf(kind))
			}
			if len(cfg.Scope) == 0 {
				in.Namespaces = h.Informer(informers.Namespaces)
			}
			return replication.New(cfg, digester(), in, h.Client, h.Events, h.Loop, h.Metrics)
		},
	}
}
