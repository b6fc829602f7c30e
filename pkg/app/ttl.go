// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"os"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// ttlEntry returns the entry of ttl. It is off by default, since it deletes what anybody has annotated.
func ttlEntry(o *Options) Entry {
	// config is called only after the flags have been parsed, some of which belong to the host.
	config := func() ttl.Config {
		cfg := o.TTL
		if o.compat("ttl-controller") {
			cfg.Compat = append(cfg.Compat, policy.Twin)
		}
		if o.compat("janitor") {
			cfg.Compat = append(cfg.Compat, policy.Janitor)
		}
		cfg.DryRun = cfg.DryRun || o.Generic.DryRun
		cfg.Scope = o.Informers.Namespaces
		lease := types.NamespacedName{Namespace: o.Election.ResourceNamespace, Name: o.Election.ResourceName}
		cfg.OwnNamespaces = []string{lease.Namespace, election.LeaderNamespaceName(lease)}
		cfg.Pod = toolscache.ObjectName{Namespace: lease.Namespace, Name: os.Getenv("POD_NAME")}
		return cfg
	}
	// need returns what is kept of a type, of the objects with one of the annotations.
	need := func(w ttl.Wish) informers.Need {
		return informers.Need{
			For: ttl.Name, Resource: w.Resource, ClusterScoped: w.ClusterScoped, Annotations: w.Annotations, When: w.When,
			Fields:      informers.OwnerReferences | informers.CreationTimestamp,
			SecretTypes: secretTypes(w),
		}
	}
	return Entry{
		Name:         ttl.Name,
		Summary:      "deletes annotated objects whose time has passed",
		OffByDefault: true,
		Config:       &o.TTL,
		Needs: func() ([]informers.Need, error) {
			cfg := config()
			shared := need(cfg.Wish())
			shared.Shared = true
			return []informers.Need{shared}, nil
		},
		Rules: func() []rbacv1.PolicyRule {
			cfg := config()
			return cfg.Rules()
		},
		New: func(h Host) (controllers.Controller, error) {
			follow := func(ctx context.Context, w ttl.Wish, handler toolscache.ResourceEventHandler) (ttl.Following, error) {
				following, err := h.Follow(ctx, need(w), w.Lists, handler)
				if err != nil {
					return nil, err
				}
				return followed{following}, nil
			}
			return ttl.New(config(), follow, h.Client, h.RESTConfig, h.Events, h.Loop, h.Metrics)
		},
	}
}

// secretTypes returns the types of Secrets that are left out unless a need names them. Those of Helm's
// releases stay out, whose content would pass through the cache.
func secretTypes(w ttl.Wish) []corev1.SecretType {
	if w.Resource.Resource != "" && w.Resource != informers.Secrets {
		return nil
	}
	return []corev1.SecretType{corev1.SecretTypeServiceAccountToken}
}

// followed implements ttl.Following.
type followed struct{ *informers.Following }

// Status implements ttl.Following.
func (f followed) Status() (synced bool, failures int64, problem string) {
	s := f.Following.Status()
	return s.Synced, s.Failures, s.Problem
}
