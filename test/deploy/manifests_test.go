// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const deployDir = "../../deploy"

// parseObjects parses the objects of manifests.
func parseObjects(t *testing.T, manifests string) []*unstructured.Unstructured {
	t.Helper()
	var list []*unstructured.Unstructured
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(manifests)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}
		assert.NoError(t, err)
		o := &unstructured.Unstructured{}
		assert.NoError(t, yaml.Unmarshal(doc, &o.Object))
		list = append(list, o)
	}
}

// findDeployment returns the Deployment in manifests.
func findDeployment(t *testing.T, manifests string) *appsv1.Deployment {
	t.Helper()
	for _, o := range parseObjects(t, manifests) {
		if o.GetKind() != "Deployment" {
			continue
		}
		d := &appsv1.Deployment{}
		assert.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, d, true))
		return d
	}
	t.Fatal("there is no Deployment")
	return nil
}

// installations returns the manifests of the default, of the default with each component, with all
// components, and of each example, by name.
func installations(t *testing.T) map[string]string {
	t.Helper()
	names := map[string]string{"the default": deployDir, "managers outside of the cluster": filepath.Join(deployDir, "podman")}
	var all []string
	for _, dir := range kustomizations(t, "components") {
		name := filepath.Base(dir)
		if name == "fence" { // part of the default
			continue
		}
		all = append(all, name)
		names["the default with "+name] = overlay(t, name)
	}
	names["all components"] = overlay(t, all...)
	for _, dir := range kustomizations(t, "examples") {
		names["example "+filepath.Base(dir)] = dir
	}
	if len(all) < 3 || len(names) < len(all)+3 {
		t.Fatalf("components or examples were not found: %v", names)
	}
	return names
}

func kustomizations(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(deployDir, dir))
	assert.NoError(t, err)
	var list []string
	for _, e := range entries {
		path := filepath.Join(deployDir, dir, e.Name())
		// The examples for Helm have none; hack/chart tests them.
		if _, err := os.Stat(filepath.Join(path, "kustomization.yaml")); err == nil {
			list = append(list, path)
		}
	}
	return list
}

func TestManifestsAreAccepted(t *testing.T) {
	ctx := fleet.Context(t)
	installCRDs(ctx, t)
	// The namespace of the example second-installation.
	_, err := shared.Admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ops"}}, metav1.CreateOptions{})
	assert.NoError(t, err)
	// One kubectl for all, which reads the API server's schema once. Its errors name the object.
	dir, want := t.TempDir(), 0
	for name, kustomization := range installations(t) {
		manifests := render(ctx, t, kustomization)
		want += len(parseObjects(t, manifests))
		assert.NoError(t, os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(manifests), 0o600))
	}
	out, err := shared.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--output=name", "-f", dir)
	assert.NoError(t, err)
	if got := len(strings.Fields(out)); got != want {
		t.Errorf("%d objects were accepted of %d", got, want)
	}
}

func TestPodIsAllowedInARestrictedNamespace(t *testing.T) {
	ctx := fleet.Context(t)
	ns, err := shared.Admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "restricted-", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}, metav1.CreateOptions{})
	assert.NoError(t, err)
	template := findDeployment(t, render(ctx, t, deployDir)).Spec.Template
	pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	pod.Name, pod.Spec.ServiceAccountName = "manager", "default"
	create := func() error {
		_, err := shared.Admin.CoreV1().Pods(ns.Name).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	fleet.Eventually(ctx, t, func() error { // the ServiceAccount takes a moment
		_, err := shared.Admin.CoreV1().ServiceAccounts(ns.Name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if err := create(); err != nil {
		t.Error(err)
	}
	pod.Spec.SecurityContext.SeccompProfile = nil
	if err := create(); err == nil {
		t.Error("a Pod without a seccomp profile is accepted too: the test does not see Pod security")
	}
}

// TestControllerLeftOutLeavesNothing checks that an overlay can remove a controller together
// with its permissions.
func TestControllerLeftOutLeavesNothing(t *testing.T) {
	ctx := fleet.Context(t)
	manifests := render(ctx, t, filepath.Join(deployDir, "examples", "without-config-reload"))
	for _, o := range parseObjects(t, manifests) {
		if strings.HasSuffix(o.GetName(), "config-reload") {
			t.Errorf("%s %s is left", o.GetKind(), o.GetName())
		}
	}
	o, err := cluster.DeployedOptions(findDeployment(t, manifests).Spec.Template.Spec, &cluster.Replica{}, cluster.ManagerOptions{})
	assert.NoError(t, err)
	m := shared.RunLeader(ctx, t, o.Args...)
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error {
		code, body, err := fleet.Get(m.SecureURL+"/debug/controllers/", token)
		if err == nil && (code != 200 || strings.TrimSpace(body) != "{}") {
			err = fmt.Errorf("/debug/controllers/ returned %d: %s", code, body)
		}
		return err
	})
	if err := fleet.Ready(m); err != nil {
		t.Error(err)
	}
}

// TestManifestsAppliedAgainDisturbNobody applies the manifests again, which include the Lease.
func TestManifestsAppliedAgainDisturbNobody(t *testing.T) {
	ctx := fleet.Context(t)
	m := shared.RunLeader(ctx, t)
	before := shared.Lease(ctx, t)
	assert.NoError(t, shared.Install(ctx, overlay(t)))
	fleet.Eventually(ctx, t, func() error { // the leader continues to renew it
		if now := shared.Lease(ctx, t).Spec.RenewTime; !now.After(before.Spec.RenewTime.Time) {
			return errors.New("the Lease is not renewed")
		}
		return nil
	})
	if after := shared.Lease(ctx, t); *after.Spec.HolderIdentity != *before.Spec.HolderIdentity || *after.Spec.LeaseTransitions != *before.Spec.LeaseTransitions {
		t.Errorf("the Lease changed from %+v to %+v", before.Spec, after.Spec)
	}
	if m.ExitCode() != -1 {
		t.Errorf("the leader ended with %d", m.ExitCode())
	}
}
