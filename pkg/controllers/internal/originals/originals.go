// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package originals looks for the operators that a controller replaces.
package originals

import (
	"context"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// runsImage reports whether a Deployment that is not scaled to 0 has a container whose image contains one
// of the names.
func runsImage(d *appsv1.Deployment, images ...string) bool {
	return (d.Spec.Replicas == nil || *d.Spec.Replicas > 0) && slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(ctr corev1.Container) bool {
		return slices.ContainsFunc(images, func(image string) bool { return strings.Contains(ctr.Image, image) })
	})
}

// Warn logs the Deployments that a label selector selects and that run one of the images, in
// the namespaces of scope, or in all namespaces if scope is empty. A controller that replaces another
// operator calls it, since an operator that still runs does the same work a second time.
func Warn(ctx context.Context, client kubernetes.Interface, scope []string, selector string, images ...string) {
	logger := klog.FromContext(ctx)
	if len(scope) == 0 {
		scope = []string{metav1.NamespaceAll}
	}
	for _, namespace := range scope {
		for options := (metav1.ListOptions{LabelSelector: selector, Limit: 250}); ; {
			list, err := client.AppsV1().Deployments(namespace).List(ctx, options)
			if err != nil {
				logger.Error(err, "Cannot look for the operators that this controller replaces")
				return
			}
			for i := range list.Items {
				if d := &list.Items[i]; runsImage(d, images...) {
					logger.Error(nil, "The operator that this controller replaces is still running", "deployment", klog.KObj(d))
				}
			}
			if options.Continue = list.Continue; options.Continue == "" {
				break
			}
		}
	}
}
