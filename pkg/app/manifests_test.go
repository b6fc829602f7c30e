// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
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
			o, err := NewOptions()
			if err != nil {
				return err
			}
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
