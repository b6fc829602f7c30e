// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"hash/maphash"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Entry describes the controller to the host. It is off by default, since a serving certificate lets its
// owner act as a host.
func Entry() controllers.Entry {
	flags, seed := NewConfig(), maphash.MakeSeed()
	return controllers.Entry{
		Name:         Name,
		Summary:      "approves the requests of kubelets for serving certificates",
		OffByDefault: true,
		Config:       &flags,
		Workers:      2,
		Needs:        func(controllers.Settings) ([]informers.Need, error) { return needs(seed), nil },
		Permissions:  func(controllers.Settings) []rbacv1.PolicyRule { return permissions() },
		NamespacePermissions: func(controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{metav1.NamespaceDefault: namespacePermissions()}
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags
			cfg.DryRun = cfg.DryRun || h.Settings.DryRun
			cfg.Pod = h.Settings.Pod
			return newController(cfg, seed, informers.For[*informers.Object](h, requestResource), informers.For[*informers.Object](h, nodeResource),
				h.Client, h.Events, h.LoopOptions, h.Metrics)
		},
	}
}
