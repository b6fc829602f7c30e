// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// originals are the label that the originals' charts and manifests set, and parts of their images.
const originalsSelector = "app.kubernetes.io/name in (reflector,kubernetes-reflector,replicator,kubernetes-replicator)"

var originalImages = []string{"emberstack/kubernetes-reflector", "mittwald/kubernetes-replicator"}

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
			d := &list.Items[i]
			if d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
				continue
			}
			for j := range d.Spec.Template.Spec.Containers {
				for _, image := range originalImages {
					if strings.Contains(d.Spec.Template.Spec.Containers[j].Image, image) {
						logger.Info("Warning: The operator that this controller replaces is still running", "deployment", klog.KObj(d))
					}
				}
			}
		}
	}
}
