// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The originals by their names in --compat.
const (
	ttlController = "ttl-controller"
	janitor       = "janitor"
)

// listsAtOnce is how many types are listed at the same time.
const listsAtOnce = 2

// Entry describes the controller to the host. It is off by default, since it deletes what anybody has
// annotated.
func Entry() controllers.Entry {
	flags := NewConfig()
	return controllers.Entry{
		Name:         Name,
		Summary:      "deletes annotated objects whose time has passed",
		OffByDefault: true,
		Compat:       []string{ttlController, janitor},
		Config:       &flags,
		Follows:      true,
		Needs:        func(controllers.Settings) ([]informers.Need, error) { return nil, nil },
		Permissions:  func(s controllers.Settings) []rbacv1.PolicyRule { return flags.with(s).permissions() },
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags.with(h.Settings)
			rules, lists := cfg.Policy(), make(chan struct{}, listsAtOnce)
			follow := func(ctx context.Context, t policy.Type, when func(metav1.Object) bool, handler cache.ResourceEventHandler) (Following, error) {
				following, err := h.Follow(ctx, need(rules, t, when), lists, handler)
				return followed{following}, err
			}
			return New(*cfg, follow, h.Client, h.RESTConfig, h.Events, h.Loop, h.Metrics)
		},
	}
}

// with returns the configuration under these settings.
func (c Config) with(s controllers.Settings) *Config {
	if slices.Contains(s.Compat, ttlController) {
		c.Compat = append(c.Compat, policy.TTLController)
	}
	if slices.Contains(s.Compat, janitor) {
		c.Compat = append(c.Compat, policy.Janitor)
	}
	c.DryRun = c.DryRun || s.DryRun
	c.Scope, c.OwnNamespaces, c.Pod = s.Namespaces, s.OwnNamespaces, s.Pod
	return &c
}

// need returns what is kept of a type.
func need(rules policy.Options, t policy.Type, when func(metav1.Object) bool) informers.Need {
	n := informers.Need{
		For: Name, Resource: t.GroupVersionResource, ClusterScoped: !t.Namespaced, When: when,
		Annotations: append(rules.Keys(), corev1.MirrorPodAnnotationKey), MaxAnnotation: policy.MaxValue,
		Fields: informers.OwnerReferences | informers.CreationTimestamp,
	}
	if n.Resource == informers.Secrets {
		n.FieldSelector = informers.NotHelm
	}
	return n
}

// followed implements [Following].
type followed struct{ *informers.Following }

// Status implements [Following].
func (f followed) Status() (synced bool, problem string) {
	s := f.Following.Status()
	return s.Synced, s.Problem
}
