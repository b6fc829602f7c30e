// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// originalImages are parts of the originals' images. Their manifests agree on no label.
var originalImages = []string{"k8s-ttl-controller", "kube-janitor"}

// warnOfOriginals warns if one of the operators that this controller replaces is still running. Somebody
// meant to switch it off.
func (c *Controller) warnOfOriginals(ctx context.Context) {
	logger := klog.FromContext(ctx)
	scope := c.cfg.Scope
	if len(scope) == 0 {
		scope = []string{metav1.NamespaceAll}
	}
	for _, namespace := range scope {
		for options := (metav1.ListOptions{Limit: 250}); ; {
			list, err := c.client.AppsV1().Deployments(namespace).List(ctx, options)
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
							logger.Info("Warning: An operator that this controller replaces is still running", "deployment", klog.KObj(d))
						}
					}
				}
			}
			if options.Continue = list.Continue; options.Continue == "" {
				break
			}
		}
	}
}
