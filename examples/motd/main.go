// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command motd makes a ConfigMap motd in every Namespace that has the label motd.
package main

import (
	"context"
	"os"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

func main() {
	os.Exit(cli.Run(app.NewCommand(app.Named("motd"), app.With(entry()))))
}

// entry describes the controller to the host.
func entry() controllers.Entry {
	return controllers.Entry{
		Name:    "motd",
		Summary: "makes a ConfigMap motd in Namespaces with the label motd",
		// What the cache keeps of each Namespace, besides its name.
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{{Resource: informers.Namespaces, ClusterScoped: true, Fields: informers.Labels}}, nil
		},
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create", "patch"}}}
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			namespaces := informers.For[metav1.Object](h, informers.Namespaces)
			reconcile := func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
				namespace, exists := namespaces.Get(key)
				if !exists || namespace.GetDeletionTimestamp() != nil {
					return 0, nil
				}
				if _, wanted := namespace.GetLabels()["motd"]; !wanted {
					return 0, nil
				}
				return 0, h.Apply(ctx, applycorev1.ConfigMap("motd", key.Name).
					WithData(map[string]string{"motd": "Welcome to " + key.Name + "."}))
			}
			return controllers.NewLoop(h.LoopOptions, reconcile, controllers.WatchSelf(namespaces))
		},
	}
}
