// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"os"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// ttlEntry returns the entry of ttl. It is off by default, since it deletes what anybody has annotated.
func ttlEntry(o *Options) Entry {
	// config is called only after the flags have been parsed, some of which belong to the host.
	config := func() *ttl.Config {
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
		cfg.OwnNamespaces = []string{lease.Namespace, apifence.NamespaceFor(lease)}
		cfg.Pod = toolscache.ObjectName{Namespace: lease.Namespace, Name: os.Getenv("POD_NAME")}
		return &cfg
	}
	// need returns what is kept of a type.
	need := func(t policy.Type, when func(metav1.Object) bool) informers.Need {
		rules := config().Policy()
		n := informers.Need{
			For: ttl.Name, Resource: t.GroupVersionResource, ClusterScoped: !t.Namespaced, When: when,
			Annotations: append(rules.Keys(), corev1.MirrorPodAnnotationKey), MaxAnnotation: policy.MaxValue, Fields: informers.OwnerReferences | informers.CreationTimestamp,
		}
		if n.Resource == informers.Secrets || n.Resource.Resource == "" {
			// Those of Helm's releases stay out, whose content would pass through the cache.
			n.SecretTypes = []corev1.SecretType{corev1.SecretTypeServiceAccountToken}
		}
		return n
	}
	return Entry{
		Name:         ttl.Name,
		Summary:      "deletes annotated objects whose time has passed",
		OffByDefault: true,
		Config:       &o.TTL,
		Needs: func() ([]informers.Need, error) {
			rules := config().Policy()
			shared := need(policy.Type{Namespaced: true}, rules.Annotated)
			shared.Shared = true
			return []informers.Need{shared}, nil
		},
		Rules: func() []rbacv1.PolicyRule { return config().Rules() },
		New: func(h Host) (controllers.Controller, error) {
			lists := make(chan struct{}, 2) // at once
			follow := func(ctx context.Context, t policy.Type, when func(metav1.Object) bool, handler toolscache.ResourceEventHandler) (ttl.Following, error) {
				following, err := h.Follow(ctx, need(t, when), lists, handler)
				return followed{following}, err
			}
			return ttl.New(*config(), follow, h.Client, h.RESTConfig, h.Events, h.Loop, h.Metrics)
		},
	}
}

// followed implements ttl.Following.
type followed struct{ *informers.Following }

// Status implements ttl.Following.
func (f followed) Status() (synced bool, problem string) {
	s := f.Following.Status()
	return s.Synced, s.Problem
}
