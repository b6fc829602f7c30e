// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

// TestManifestsParse holds the Deployment of deploy/ against the flags that the manager really has.
func TestManifestsParse(t *testing.T) {
	file, err := os.ReadFile(filepath.Join("..", "..", "deploy", "base", "deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict(file, &deployment); err != nil {
		t.Fatal(err)
	}
	pod := deployment.Spec.Template.Spec
	manager := pod.Containers[0]

	o, err := NewOptions()
	if err != nil {
		t.Fatal(err)
	}
	flags := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	for _, fs := range o.flags.FlagSets {
		flags.AddFlagSet(fs)
	}
	if err := flags.Parse(manager.Args); err != nil {
		t.Fatal(err)
	}
	if flags.NArg() > 0 {
		t.Errorf("stray arguments: %v", flags.Args())
	}
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	if grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; grace <= o.Generic.ShutdownTimeout {
		t.Errorf("terminationGracePeriodSeconds: %s is not longer than --shutdown-timeout=%s", grace, o.Generic.ShutdownTimeout)
	}
	if port := int32(o.Secure.BindPort); manager.Ports[0].ContainerPort != port {
		t.Errorf("containerPort %d is not --secure-port=%d", manager.Ports[0].ContainerPort, port)
	}
	if pod.ServiceAccountName != serviceAccount {
		t.Errorf("serviceAccountName %q, but the roles are bound to %q", pod.ServiceAccountName, serviceAccount)
	}
}

// TestManifestsGrantWhatControllersDeclare holds deploy/rbac against the registry; make generate writes it.
func TestManifestsGrantWhatControllersDeclare(t *testing.T) {
	roles, err := Roles()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("..", "..", "deploy", "rbac")
	kustomization, err := os.ReadFile(filepath.Join(dir, "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for controller, want := range roles {
		got, err := os.ReadFile(filepath.Join(dir, controller+".yaml"))
		if err != nil || string(got) != string(want) {
			t.Errorf("deploy/rbac/%s.yaml is not what make generate writes (%v)", controller, err)
		}
		if !strings.Contains(string(kustomization), "- "+controller+".yaml\n") {
			t.Errorf("deploy/rbac/kustomization.yaml lacks %s.yaml", controller)
		}
		if slices.Contains(strings.Fields(string(want)), "'*'") {
			t.Errorf("deploy/rbac/%s.yaml has a wildcard", controller)
		}
	}
}
