// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// originalsSelector has the label that the originals' charts and manifests set.
const originalsSelector = "app.kubernetes.io/name in (reflector,kubernetes-reflector,replicator,kubernetes-replicator)"

// warnOfOriginals warns if one of the operators that this controller replaces is still running.
// Somebody meant to switch it off.
func (c *Controller) warnOfOriginals(ctx context.Context) {
	logger := klog.FromContext(ctx)
	scope := c.cfg.Scope
	if len(scope) == 0 {
		scope = []string{metav1.NamespaceAll}
	}
	for _, namespace := range scope {
		list, err := c.client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{LabelSelector: originalsSelector})
		if err != nil {
			logger.Info("Could not look for the operators that this controller replaces", "reason", err.Error())
			return
		}
		for i := range list.Items {
			if d := &list.Items[i]; controllers.Runs(d, "emberstack/kubernetes-reflector", "mittwald/kubernetes-replicator") {
				logger.Info("Warning: The operator that this controller replaces is still running", "deployment", klog.KObj(d))
			}
		}
	}
}
