// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	argoCD     = "github.com/argoproj/argo-cd/v3"
	flux       = "github.com/fluxcd/"
	prometheus = "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
)

// crds returns the CRDs of the tools that deploy/ has objects for, in the versions that hack/crds pins.
// Argo CD's is in its module. The others are made of Go types, as their projects do.
func crds(t *testing.T) (files []string) {
	t.Helper()
	pinned := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir, cmd.Env = filepath.Join("..", "..", "crds"), append(os.Environ(), "GOFLAGS=", "GOWORK=off")
		out, err := cmd.Output()
		if err != nil {
			if failed, ok := errors.AsType[*exec.ExitError](err); ok {
				err = fmt.Errorf("%w: %s%s", err, out, failed.Stderr)
			}
			t.Fatalf("go %s: %v", strings.Join(args, " "), err)
		}
		return string(out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal([]byte(pinned("mod", "download", "-json", argoCD)), &module); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	pinned("tool", "controller-gen", "crd", "output:crd:dir="+dir,
		"paths="+flux+"helm-controller/api/v2;"+flux+"source-controller/api/v1;"+prometheus)
	return []string{
		filepath.Join(module.Dir, "manifests", "crds", "application-crd.yaml"),
		filepath.Join(dir, "helm.toolkit.fluxcd.io_helmreleases.yaml"),
		filepath.Join(dir, "source.toolkit.fluxcd.io_gitrepositories.yaml"),
		filepath.Join(dir, "monitoring.coreos.com_prometheusrules.yaml"),
		filepath.Join(dir, "monitoring.coreos.com_servicemonitors.yaml"),
	}
}

// TestGitOpsObjectsFitTheirCRDs has the API server check the examples for Argo CD and Flux, and
// what the component monitoring has for the Prometheus operator, as strictly as it can. The chart
// has the same objects.
func TestGitOpsObjectsFitTheirCRDs(t *testing.T) {
	ctx := t.Context()
	kubectl := func(args ...string) {
		t.Helper()
		if _, err := shared.Kubectl(ctx, args...); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range crds(t) {
		kubectl("create", "-f", file)
		t.Cleanup(func() { _, _ = shared.Kubectl(ctx, "delete", "-f", file) })
		if err := shared.WaitForCRDs(ctx, file); err != nil {
			t.Fatal(err)
		}
	}
	for _, namespace := range []string{"argocd", "flux-system"} {
		kubectl("create", "namespace", namespace)
	}
	deploy := filepath.Join("..", "..", "..", "deploy")
	check := func(file string) error {
		out, err := shared.Kubectl(ctx, "create", "--dry-run=server", "--validate=strict", "-f", file)
		if err == nil && !strings.Contains(out, "created (server dry run)") {
			err = fmt.Errorf("%s has no objects: %q", file, out)
		}
		return err
	}
	for name, tc := range map[string]struct{ file, right, wrong, refused string }{
		"the Application for Argo CD": {"examples/gitops/argocd-application.yaml",
			"selfHeal: true", "selfHealing: true", `unknown field "spec.syncPolicy.automated.selfHealing"`},
		"the ignoreDifferences of an Application": {"examples/gitops/argocd-shop.yaml",
			"managedFieldsManagers: [quartermaster-replication]", "managedFieldsManagers: quartermaster-replication", "must be of type array"},
		"the HelmRelease for Flux": {"examples/gitops/flux-helmrelease.yaml",
			"mode: enabled", "mode: on", "spec.driftDetection.mode"},
		"the ServiceMonitor": {"components/monitoring/servicemonitor.yaml",
			"interval: 5s", "interval: half a minute", "spec.endpoints[0].interval"},
		"the PrometheusRule": {"components/monitoring/alerts.yaml",
			"expr: >-", "expression: >-", "spec.groups[0].rules[0].expression"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(deploy, tc.file)
			if err := check(file); err != nil {
				t.Error(err)
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			mistaken := strings.ReplaceAll(string(text), tc.right, tc.wrong)
			if mistaken == string(text) {
				t.Fatalf("%s has no %q", file, tc.right)
			}
			file = filepath.Join(t.TempDir(), "mistaken.yaml")
			if err := os.WriteFile(file, []byte(mistaken), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := check(file); err == nil || !strings.Contains(err.Error(), tc.refused) {
				t.Errorf("with %q: %v, want an error with %q", tc.wrong, err, tc.refused)
			}
		})
	}
}
