// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// Runs reports whether a Deployment that is not scaled to 0 has a container whose image contains one
// of the names. So a controller finds the operator that it replaces.
func Runs(d *appsv1.Deployment, images ...string) bool {
	return (d.Spec.Replicas == nil || *d.Spec.Replicas > 0) && slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(ctr corev1.Container) bool {
		return slices.ContainsFunc(images, func(image string) bool { return strings.Contains(ctr.Image, image) })
	})
}
