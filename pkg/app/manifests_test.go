// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

var deployDir = filepath.Join("..", "..", "deploy")

// TestManifestsParse parses the arguments of the Deployment in deploy/ with the flags that the
// manager really has.
func TestManifestsParse(t *testing.T) {
	file, err := os.ReadFile(filepath.Join(deployDir, "base", "deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict(file, &deployment); err != nil {
		t.Fatal(err)
	}
	pod := deployment.Spec.Template.Spec
	manager := pod.Containers[0]

	o := newOptions(t)
	if err := o.Parse(manager.Args); err != nil {
		t.Fatal(err)
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
	if pod.ServiceAccountName != defaultName || deployment.Name != defaultName {
		t.Errorf("Deployment %q runs as %q, but the roles are bound to %q", deployment.Name, pod.ServiceAccountName, defaultName)
	}
}

// argument matches an item of args, or what a JSON patch adds to them.
var argument = regexp.MustCompile(`(?m)^\s*(?:- |value: )['"]?(--[^\s'"]+)['"]?$`)

// TestManifestsUseFlagsThatExist checks the flags in all manifests, also those in patches of
// components and examples.
func TestManifestsUseFlagsThatExist(t *testing.T) {
	found := 0
	err := filepath.WalkDir(deployDir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range argument.FindAllStringSubmatch(string(text), -1) {
			found++
			o := newOptions(t)
			// The kubelet replaces variables of the environment.
			if err := o.Parse([]string{strings.ReplaceAll(match[1], "$(POD_NAMESPACE)", "team-a")}); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if err := o.Validate(); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 5 {
		t.Errorf("%d flags were found: the test does not see them", found)
	}
}

// TestPodmanManifestsRunTheManagerAlike compares the units of systemd in deploy/podman with pod.yaml,
// whose flags TestManifestsUseFlagsThatExist checks.
func TestPodmanManifestsRunTheManagerAlike(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(deployDir, "podman", name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(string(text), "\\\n    ", "")
	}
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(read("pod.yaml")), &pod); err != nil {
		t.Fatal(err)
	}
	manager, grace := pod.Spec.Containers[0], *pod.Spec.TerminationGracePeriodSeconds
	o := newOptions(t)
	if err := o.Parse(manager.Args); err != nil {
		t.Fatal(err)
	}
	if time.Duration(grace)*time.Second <= o.Generic.ShutdownTimeout {
		t.Errorf("terminationGracePeriodSeconds: %d s is not longer than --shutdown-timeout=%s", grace, o.Generic.ShutdownTimeout)
	}
	args := strings.Join(manager.Args, " ")
	user, group := *manager.SecurityContext.RunAsUser, *manager.SecurityContext.RunAsGroup
	for name, wanted := range map[string][]string{
		"quartermaster.container": {"Image=" + manager.Image + "\n", "Exec=" + args + "\n", fmt.Sprintf("User=%d\nGroup=%d\n", user, group)},
		"quartermaster.service":   {" " + manager.Image + " " + args + "\n", fmt.Sprintf(" --user=%d:%d ", user, group)},
	} {
		// systemd waits longer than podman.
		wanted = append(wanted, fmt.Sprintf("--stop-timeout=%d", grace), fmt.Sprintf("TimeoutStopSec=%d\n", grace+10))
		for _, want := range wanted {
			if !strings.Contains(read(name), want) {
				t.Errorf("%s does not have %q", name, want)
			}
		}
	}
}
