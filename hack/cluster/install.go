// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

// localFlags are the flags that differ between a Pod and a process on this machine: how it finds the
// API server, and where it listens. StartBare sets them.
var localFlags = []string{"--kubeconfig", "--bind-address", "--secure-port", "--insecure-port"}

// InstallComponents calls Install with the default installation and components of deploy/components.
func (c *Cluster) InstallComponents(ctx context.Context, components ...string) error {
	overlay, err := c.Overlay(components...)
	if err != nil {
		return err
	}
	return c.Install(ctx, overlay)
}

// Overlay writes a kustomization of the default installation with the named components of
// deploy/components, and returns its directory, which is removed with the cluster.
func (c *Cluster) Overlay(components ...string) (string, error) {
	root, err := controlplane.Root()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(c.Dir(), "overlay-")
	if err != nil {
		return "", err
	}
	// Kustomize does not accept absolute paths.
	deploy, err := filepath.Rel(dir, filepath.Join(root, "deploy"))
	if err != nil {
		return "", err
	}
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n- " + deploy + "\n"
	if len(components) > 0 {
		text += "components:\n"
	}
	for _, name := range components {
		text += "- " + filepath.Join(deploy, "components", name) + "\n"
	}
	return dir, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600)
}

// Install applies a kustomization without its Deployment. Managers that start from now on get that
// Deployment's arguments and environment.
func (c *Cluster) Install(ctx context.Context, kustomization string) error {
	manifests, err := c.render(ctx, kustomization)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(manifests, func(m manifest) bool { return m.kind == "Deployment" })
	if i < 0 {
		return fmt.Errorf("%s: there is no Deployment", kustomization)
	}
	d := new(appsv1.Deployment)
	if err := yaml.UnmarshalStrict(manifests[i].text, d); err != nil {
		return fmt.Errorf("%s: %w", kustomization, err)
	}
	c.installed = &d.Spec.Template.Spec
	return c.apply(ctx, slices.Delete(manifests, i, i+1))
}

// DeployedOptions puts the arguments and the environment of a Pod's manager before those in the options.
func DeployedOptions(pod corev1.PodSpec, r *Replica, o ManagerOptions) (ManagerOptions, error) {
	fields := map[string]string{"metadata.name": r.Pod, "metadata.uid": string(r.UID), "status.podIP": loopback}
	manager := pod.Containers[0]
	args := slices.DeleteFunc(slices.Clone(manager.Args), func(arg string) bool {
		flag, _, _ := strings.Cut(arg, "=")
		return slices.Contains(localFlags, flag)
	})
	var env []string
	for _, e := range manager.Env {
		value := e.Value
		if source := e.ValueFrom; source != nil {
			known := false
			if source.FieldRef != nil {
				value, known = fields[source.FieldRef.FieldPath]
			}
			if !known {
				return o, fmt.Errorf("environment variable %s: no process can have it from %v", e.Name, source)
			}
		}
		env = append(env, e.Name+"="+value)
	}
	o.Args = append(args, o.Args...)
	o.Env = append(env, o.Env...)
	return o, nil
}

// NewDeployment returns a Deployment that takes its environment from a ConfigMap.
func NewDeployment(name, configMap string, annotations map[string]string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](1),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{
					Name: "web", Image: "web",
					EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
						LocalObjectReference: corev1.LocalObjectReference{Name: configMap}}}},
				}}},
			},
		},
	}
}
