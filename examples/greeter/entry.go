// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package greeter

import (
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Entry returns the controller's entry for the registry.
func Entry() controllers.Entry {
	return controllers.Entry{
		Name:    Name,
		Summary: "greets ConfigMaps that ask for it",
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{{Resource: informers.ConfigMaps, Annotations: []string{Annotation}}}, nil
		},
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"patch"}}}
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			return New(informers.For[metav1.Object](h, informers.ConfigMaps), h.Client, h.Events, h.LoopOptions)
		},
	}
}
