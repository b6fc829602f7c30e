// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
)

// These tests compare Containerfile and the files of deploy/podman with the manager's real flags,
// with each other and with the Deployment: outside of a cluster a manager runs as it does in one.

// how is how a manifest runs the manager.
type how struct {
	Image string
	User  string
	Args  []string
	Grace time.Duration // from SIGTERM to SIGKILL
}

func TestManifestsRunTheManagerAlike(t *testing.T) {
	pod := fromPod(t)
	manifests := map[string]how{
		"pod.yaml":                pod,
		"quartermaster.container": fromQuadlet(t),
		"quartermaster.service":   fromService(t),
	}
	user := match(t, "Containerfile", `(?m)^USER (\d+:\d+)$`)
	if strings.HasPrefix(user, "0:") {
		t.Error("Containerfile: USER is root")
	}
	for name, got := range manifests {
		if diff := cmp.Diff(pod, got); diff != "" {
			t.Errorf("pod.yaml and %s differ:\n%s", name, diff)
		}
		if got.User != user {
			t.Errorf("%s: the user is %s, in Containerfile %s", name, got.User, user)
		}
		if timeout := shutdownTimeout(t, got.Args); got.Grace <= timeout {
			t.Errorf("%s: killed after %s, but --shutdown-timeout=%s", name, got.Grace, timeout)
		}
	}

	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict([]byte(read(t, "deploy/base/deployment.yaml")), &deployment); err != nil {
		t.Fatal(err)
	}
	spec := deployment.Spec.Template.Spec
	if want := "localhost/" + spec.Containers[0].Image; pod.Image != want {
		t.Errorf("the image is %s, the Deployment's %s", pod.Image, want)
	}
	if name := match(t, "Makefile", `(?m)^IMAGE +\?= (\S+)$`) + ":latest"; name != spec.Containers[0].Image {
		t.Errorf("make image builds %s, the Deployment runs %s", name, spec.Containers[0].Image)
	}
	if want := fmt.Sprintf("%d:%d", *spec.SecurityContext.RunAsUser, *spec.SecurityContext.RunAsGroup); user != want {
		t.Errorf("Containerfile: USER %s, but the Deployment runs as %s", user, want)
	}
	if port := match(t, "Containerfile", `(?m)^EXPOSE (\d+)$`); port != fmt.Sprint(spec.Containers[0].Ports[0].ContainerPort) {
		t.Errorf("Containerfile: EXPOSE %s is not the Deployment's port", port)
	}
}

// shutdownTimeout parses the arguments as the manager does.
func shutdownTimeout(t *testing.T, args []string) time.Duration {
	t.Helper()
	cmd := app.NewCommand()
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
		t.Error(err)
	}
	timeout, err := cmd.Flags().GetDuration("shutdown-timeout")
	if err != nil {
		t.Fatal(err)
	}
	return timeout
}

func fromPod(t *testing.T) how {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(read(t, "deploy/podman/pod.yaml")), &pod); err != nil {
		t.Fatal(err)
	}
	c := pod.Spec.Containers[0]
	return how{
		Image: c.Image,
		User:  fmt.Sprintf("%d:%d", *c.SecurityContext.RunAsUser, *c.SecurityContext.RunAsGroup),
		Args:  c.Args,
		Grace: time.Duration(*pod.Spec.TerminationGracePeriodSeconds) * time.Second,
	}
}

func fromQuadlet(t *testing.T) how {
	t.Helper()
	unit := readUnit(t, "deploy/podman/quartermaster.container")
	container := unit["Container"]
	return how{
		Image: container["Image"],
		User:  container["User"] + ":" + container["Group"],
		Args:  strings.Fields(container["Exec"]),
		Grace: stopTimeout(t, unit, strings.Fields(container["PodmanArgs"])),
	}
}

func fromService(t *testing.T) how {
	t.Helper()
	unit := readUnit(t, "deploy/podman/quartermaster.service")
	command := strings.Fields(unit["Service"]["ExecStart"])
	i := slices.IndexFunc(command, func(s string) bool { return strings.HasPrefix(s, "localhost/") })
	if i < 0 {
		t.Fatalf("no image in %q", command)
	}
	return how{
		Image: command[i],
		User:  option(command[:i], "--user"),
		Args:  command[i+1:],
		Grace: stopTimeout(t, unit, command[:i]),
	}
}

// stopTimeout returns podman's; systemd's must be longer.
func stopTimeout(t *testing.T, unit map[string]map[string]string, podmanArgs []string) time.Duration {
	t.Helper()
	podman := seconds(t, option(podmanArgs, "--stop-timeout"))
	if systemd := seconds(t, unit["Service"]["TimeoutStopSec"]); systemd <= podman {
		t.Errorf("TimeoutStopSec=%s is not longer than --stop-timeout=%s", systemd, podman)
	}
	return podman
}

// TestQuadletHasKeysOfPodman44 also runs on machines without the generator, which podman has had
// since 4.4.
func TestQuadletHasKeysOfPodman44(t *testing.T) {
	// The keys that podman-systemd.unit(5) of 4.4 lists and the unit uses.
	known := []string{"ContainerName", "DropCapability", "Exec", "Group", "Image", "Network", "NoNewPrivileges", "PodmanArgs",
		"ReadOnly", "User", "Volume"}
	for key := range readUnit(t, "deploy/podman/quartermaster.container")["Container"] {
		if !slices.Contains(known, key) {
			t.Errorf("%s= is none of %q", key, known)
		}
	}
}

func TestQuadletIsAccepted(t *testing.T) {
	var generator string
	for _, dir := range []string{"/usr/libexec/podman", "/usr/lib/podman"} {
		if _, err := os.Stat(filepath.Join(dir, "quadlet")); err == nil {
			generator = filepath.Join(dir, "quadlet")
		}
	}
	if generator == "" {
		t.Skip("podman 4.4 or newer is not installed")
	}
	cmd := exec.CommandContext(t.Context(), generator, "-dryrun")
	cmd.Env = append(os.Environ(), "QUADLET_UNIT_DIRS="+path(t, "deploy/podman"))
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "---quartermaster.service---") || strings.Contains(string(out), "nsupported key") {
		t.Errorf("%v:\n%s", err, out)
	}
}

func TestServiceIsAccepted(t *testing.T) {
	if _, err := os.Stat("/usr/bin/podman"); err != nil {
		t.Skip("/usr/bin/podman is not there, which the unit runs")
	}
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", path(t, "deploy/podman/quartermaster.service")).CombinedOutput()
	// It also warns about other units of the machine.
	if err != nil || strings.Contains(string(out), "quartermaster.service") {
		t.Errorf("%v:\n%s", err, out)
	}
}

func path(t *testing.T, name string) string {
	t.Helper()
	abs, err := filepath.Abs(filepath.Join("..", "..", name))
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(path(t, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// match returns what the pattern's group matches in a file.
func match(t *testing.T, name, pattern string) string {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(read(t, name))
	if found == nil {
		t.Fatalf("%s: nothing matches %s", name, pattern)
	}
	return found[1]
}

// readUnit reads a unit file of systemd as section, key and value. No relevant key may occur twice.
func readUnit(t *testing.T, name string) map[string]map[string]string {
	t.Helper()
	unit, section := map[string]map[string]string{}, ""
	for line := range strings.Lines(strings.ReplaceAll(read(t, name), "\\\n", " ")) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] == '[' {
			section = strings.Trim(line, "[]")
			unit[section] = map[string]string{}
			continue
		}
		key, value, found := strings.Cut(line, "=")
		if !found || section == "" {
			t.Fatalf("%s: %q is not KEY=VALUE in a section", name, line)
		}
		unit[section][key] = value
	}
	return unit
}

func option(args []string, name string) string {
	for _, arg := range args {
		if value, found := strings.CutPrefix(arg, name+"="); found {
			return value
		}
	}
	return ""
}

func seconds(t *testing.T, s string) time.Duration {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatalf("%q is not a number of seconds", s)
	}
	return time.Duration(n) * time.Second
}
