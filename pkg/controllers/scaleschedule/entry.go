// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// original is the name in --compat of py-kube-downscaler and GoKubeDownscaler, which share annotations.
const original = "downscaler"

// Entry describes the controller to the host. It is off by default, since it stops what anybody has
// annotated.
func Entry() controllers.Entry {
	flags := NewConfig()
	return controllers.Entry{
		Name:         Name,
		Summary:      "scales workloads down outside working hours, and back",
		OffByDefault: true,
		Compat:       []string{original},
		Config:       &flags,
		Workers:      2,
		Needs:        func(s controllers.Settings) ([]informers.Need, error) { return flags.withSettings(s).needs(), nil },
		Permissions:  func(s controllers.Settings) []rbacv1.PolicyRule { return flags.withSettings(s).permissions() },
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags.withSettings(h.Settings)
			kinds := cfg.watchedKinds()
			for _, k := range kinds {
				k.informer = informers.For[*informers.Object](h, k.resource)
			}
			var namespaces *informers.Informer[*informers.Object]
			if len(cfg.Scope) == 0 {
				namespaces = informers.For[*informers.Object](h, informers.Namespaces)
			}
			return newController(*cfg, kinds, namespaces, h.Client, h.RESTConfig, h.Events, h.LoopOptions, h.Metrics)
		},
	}
}

// withSettings returns the configuration under these settings.
func (c Config) withSettings(s controllers.Settings) *Config {
	c.Compat = slices.Contains(s.Compat, original)
	c.DryRun = c.DryRun || s.DryRun
	c.Scope, c.OwnNamespaces = s.Namespaces, s.OwnNamespaces
	return &c
}
