// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

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
	o, err := NewOptions()
	if err == nil {
		err = o.Parse(manager.Args)
	}
	if err != nil {
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
