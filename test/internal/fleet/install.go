// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

// localFlags are those that differ between a Pod and a process on this machine: how it finds the
// API server, and where it listens. cluster.StartManager sets them.
var localFlags = []string{"--kubeconfig", "--bind-address", "--secure-port", "--insecure-port"}

// Overlay writes a kustomization of the default installation with the named components of
// deploy/components, and returns its directory, which is removed with the fleet.
func (f *Fleet) Overlay(components ...string) (string, error) {
	root, err := controlplane.Root()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(f.Dir(), "overlay-")
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
func (f *Fleet) Install(ctx context.Context, kustomization string) error {
	if err := f.ApplyDir(ctx, kustomization, "Deployment"); err != nil {
		return err
	}
	manifests, err := f.Kubectl(ctx, "kustomize", kustomization)
	if err != nil {
		return err
	}
	d, err := deploymentIn([]byte(manifests))
	if err != nil {
		return fmt.Errorf("%s: %w", kustomization, err)
	}
	f.deployment = d
	return nil
}

// InstallWith installs further components for the rest of the test.
func (f *Fleet) InstallWith(ctx context.Context, t testing.TB, components ...string) {
	t.Helper()
	t.Cleanup(func() {
		if err := f.installComponents(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := f.installComponents(ctx, components...); err != nil {
		t.Fatal(err)
	}
}

// installComponents installs the default with the fleet's components and others.
func (f *Fleet) installComponents(ctx context.Context, others ...string) error {
	overlay, err := f.Overlay(slices.Concat(f.components, others)...)
	if err != nil {
		return err
	}
	return f.Install(ctx, overlay)
}

func deploymentIn(manifests []byte) (*appsv1.Deployment, error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifests)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil, errors.New("there is no Deployment")
		}
		if err != nil {
			return nil, err
		}
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &meta); err != nil {
			return nil, err
		}
		if meta.Kind == "Deployment" {
			d := new(appsv1.Deployment)
			return d, yaml.UnmarshalStrict(doc, d)
		}
	}
}

// AsDeployed puts the arguments and the environment of a Pod's manager before those in the options.
func AsDeployed(pod corev1.PodSpec, r *cluster.Replica, o cluster.ManagerOptions) (cluster.ManagerOptions, error) {
	fields := map[string]string{"metadata.name": r.Pod, "metadata.uid": string(r.UID), "status.podIP": "127.0.0.1"}
	manager := pod.Containers[0]
	args := slices.DeleteFunc(slices.Clone(manager.Args), func(arg string) bool {
		flag, _, _ := strings.Cut(arg, "=")
		return slices.Contains(localFlags, flag)
	})
	var env []string
	for _, e := range manager.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil {
			known := false
			if from.FieldRef != nil {
				value, known = fields[from.FieldRef.FieldPath]
			}
			if !known {
				return o, fmt.Errorf("environment variable %s: no process can have it from %v", e.Name, from)
			}
		}
		env = append(env, e.Name+"="+value)
	}
	o.Args = append(args, o.Args...)
	o.Env = append(env, o.Env...)
	return o, nil
}
