// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The originals by their names in --compat.
const (
	ttlController = "ttl-controller"
	janitor       = "janitor"
)

// Entry describes the controller to the host. It is off by default, since it deletes what anybody has
// annotated, or what rules choose.
func Entry() controllers.Entry {
	flags := NewConfig()
	return controllers.Entry{
		Name:         Name,
		Summary:      "deletes objects whose time has passed, by annotations or by rules",
		OffByDefault: true,
		Compat:       []string{ttlController, janitor},
		Config:       &flags,
		Workers:      2,
		Permissions:  func(s controllers.Settings) []rbacv1.PolicyRule { return flags.withSettings(s).permissions() },
		Command: func(connect func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
			return newCommand(&flags, connect)
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags.withSettings(h.Settings)
			var set *rules.Set
			if cfg.RulesFile != "" {
				var err error
				if set, err = rules.Read(cfg.RulesFile); err != nil {
					return nil, fmt.Errorf("--"+flagPrefix+"rules: %w", err)
				}
			}
			follow := func(need informers.Need, handler func(old, current metav1.Object, initial bool)) (*informers.Following[metav1.Object], error) {
				following, err := informers.Follow[metav1.Object](h, need)
				if err != nil {
					return nil, err
				}
				following.AddHandler(handler)
				return following, nil
			}
			return newController(*cfg, set, follow, h.Client, h.RESTConfig, h.Events, h.LoopOptions, h.Metrics)
		},
	}
}

// withSettings returns the configuration under these settings.
func (c Config) withSettings(s controllers.Settings) *Config {
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

// typeNeed returns what is kept of a type.
func typeNeed(options policy.Options, typ policy.Type, typeRules *typeRules) informers.Need {
	need := informers.Need{
		Resource: typ.GroupVersionResource, ClusterScoped: !typ.Namespaced, Filter: options.Annotated,
		Annotations: append(options.Keys(), corev1.MirrorPodAnnotationKey), MaxAnnotation: policy.MaxValue,
		Fields: informers.OwnerReferences | informers.CreationTimestamp,
	}
	if typeRules != nil {
		need.Filter, need.Digest, need.Fields = typeRules.mayExpire, informers.DigestOf(typeRules.digest), 0
		if !typeRules.NeedsWhole {
			need.Form = informers.Metadata
		}
	}
	if need.Resource == informers.Secrets {
		need.FieldSelector = informers.NotHelm
	}
	return need
}
