// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// TestExamplesRender renders the chart with each file of values in deploy/examples. The manager must
// accept the arguments, and need the roles.
func TestExamplesRender(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(deployDir, "examples", "*", "values.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files: the test does not see them: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			values, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			o := mustRender(t, string(values), "kube-system")
			config := effectiveConfig(t, o.args(t))
			missing, further := compareRoles(t, o)
			if missing != "" || further != "" {
				t.Errorf("manager rbac prints, and the chart does not grant:%s\nthe chart grants besides:%s", missing, further)
			}
			if strings.Contains(file, "migrate-from-") && (!strings.Contains(config, "-dry-run: true") ||
				strings.Contains(config, "compat: []") && !strings.HasSuffix(filepath.Dir(file), "csr-approver")) { // which has no annotations
				t.Error("it is not a dry run with the annotations of the original")
			}
		})
	}
}

// TestGitOpsExamplesInstallTheChart renders the chart with the values in the examples for Argo CD and
// Flux, and looks up what else they name.
func TestGitOpsExamplesInstallTheChart(t *testing.T) {
	read := func(t *testing.T, file, key string) map[string]any {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(deployDir, "examples", "gitops", file))
		if err != nil {
			t.Fatal(err)
		}
		all, err := parse(string(text))
		if err != nil {
			t.Fatal(err)
		}
		if all[key] == nil {
			t.Fatalf("%s has no %s", file, key)
		}
		return all[key]
	}
	field := func(t *testing.T, object map[string]any, path ...string) any {
		t.Helper()
		value, ok, err := unstructured.NestedFieldNoCopy(object, path...)
		if err != nil || !ok {
			t.Fatalf("no %s: %v", path, err)
		}
		return value
	}
	renders := func(t *testing.T, chart, values, namespace any) {
		t.Helper()
		if filepath.Join("..", "..", chart.(string)) != chartDir {
			t.Errorf("the chart is not in %s", chart)
		}
		text, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		effectiveConfig(t, mustRender(t, string(text), namespace.(string)).args(t))
	}
	t.Run("Argo CD", func(t *testing.T) {
		o := read(t, "argocd-application.yaml", "Application argocd/quartermaster")
		renders(t, field(t, o, "spec", "source", "path"), field(t, o, "spec", "source", "helm", "valuesObject"),
			field(t, o, "spec", "destination", "namespace"))
	})
	t.Run("Argo CD ignores what the controllers write", func(t *testing.T) {
		o := read(t, "argocd-shop.yaml", "Application argocd/shop")
		ignored := map[string]bool{}
		for _, item := range field(t, o, "spec", "ignoreDifferences").([]any) {
			for _, manager := range field(t, item.(map[string]any), "managedFieldsManagers").([]any) {
				ignored[manager.(string)] = true
			}
		}
		want := map[string]bool{}
		for _, source := range []string{"configreload", "replication", "scaleschedule", "ttl"} {
			files, err := filepath.Glob(filepath.Join("..", "..", "pkg", "controllers", source, "*.go"))
			if err != nil || len(files) == 0 {
				t.Fatal(source, err)
			}
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, match := range fieldManager.FindAllStringSubmatch(string(text), -1) {
					want[match[1]] = true
				}
			}
		}
		if diff := cmp.Diff(want, ignored); diff != "" || len(want) < 2 {
			t.Errorf("(-written by +ignored):\n%s", diff)
		}
	})
	t.Run("Flux", func(t *testing.T) {
		o := read(t, "flux-helmrelease.yaml", "HelmRelease flux-system/quartermaster")
		renders(t, field(t, o, "spec", "chart", "spec", "chart"), field(t, o, "spec", "values"), field(t, o, "spec", "targetNamespace"))
		name := field(t, o, "spec", "chart", "spec", "sourceRef", "name").(string)
		read(t, "flux-helmrelease.yaml", "GitRepository flux-system/"+name)
	})
}

// fieldManager matches where a controller says under which name it writes.
var fieldManager = regexp.MustCompile(`(?i)fieldManager *= *"([^"]+)"`)

// code matches the name of a value, which is written as code.
var code = regexp.MustCompile("`([a-z][A-Za-z]*(?:\\.[A-Za-z0-9-]+)*)`")

// TestTablesNameValuesThatExist looks up the values of this chart that the last columns of the
// migration tables name.
func TestTablesNameValuesThatExist(t *testing.T) {
	schema, err := readSchema()
	if err != nil {
		t.Fatal(err)
	}
	names := 0
	for _, doc := range []string{"config-reload", "replication", "scale-schedule", "ttl", "csr-approver"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "docs", "migrate", doc+".md"))
		if err != nil {
			t.Fatal(err)
		}
		for table := range strings.SplitSeq(string(text), "\n\n") {
			if !strings.HasPrefix(table, "| value | here |") {
				continue
			}
			for row := range strings.Lines(table) {
				columns := strings.Split(strings.TrimSuffix(strings.TrimSpace(row), "|"), "|")
				for _, match := range code.FindAllStringSubmatch(columns[len(columns)-1], -1) {
					path := strings.Split(match[1], ".")
					if len(path) == 1 && !strings.Contains(match[1], "-") && schemaAt(schema, path) == nil {
						continue // a component, or a value of a flag
					}
					names++
					if schemaAt(schema, path) == nil {
						t.Errorf("%s.md: %s is not a value", doc, match[1])
					}
				}
			}
		}
	}
	if names < 20 {
		t.Errorf("%d names: the test does not see them", names)
	}
}

// schemaAt returns the schema of the value at the path, nil if there is none.
func schemaAt(schema map[string]any, path []string) map[string]any {
	for _, name := range path {
		properties, _ := schema["properties"].(map[string]any)
		schema, _ = properties[name].(map[string]any)
	}
	return schema
}
