// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package chart tests deploy/helm, with Helm's own module.
package chart

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

var (
	deployDir = filepath.Join("..", "..", "deploy")
	chartDir  = filepath.Join(deployDir, "helm", "quartermaster")
)

// objects are manifests by kind, namespace and name.
type objects map[string]map[string]any

// render renders the chart with values, which are YAML, for a release in the namespace.
func render(values, namespace string) (objects, error) {
	chart, err := loader.LoadDir(chartDir)
	if err != nil {
		return nil, err
	}
	return renderChart(chart, values, namespace)
}

func renderChart(chart *chart.Chart, values, namespace string) (objects, error) {
	files, err := renderFiles(engine.Engine{Strict: true}, chart, values, namespace)
	if err != nil {
		return nil, err
	}
	var manifests []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			manifests = append(manifests, files[name])
		}
	}
	return parse(strings.Join(manifests, "\n---\n"))
}

// renderFiles returns what each template becomes. A strict engine finds values that are misspelt.
func renderFiles(renderer engine.Engine, chart *chart.Chart, values, namespace string) (map[string]string, error) {
	var userValues map[string]any
	if err := yaml.Unmarshal([]byte(values), &userValues); err != nil {
		return nil, err
	}
	all, err := util.ToRenderValues(chart, userValues,
		common.ReleaseOptions{Name: "any", Namespace: namespace, IsInstall: true, Revision: 1}, &common.Capabilities{
			KubeVersion: common.KubeVersion{Version: "v1.36.0", Major: "1", Minor: "36"}})
	if err != nil {
		return nil, err
	}
	return renderer.RenderWithContext(context.Background(), chart, all)
}

func mustRender(t *testing.T, values, namespace string) objects {
	t.Helper()
	objects, err := render(values, namespace)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// kustomize returns the default installation with components, in the namespace if it is not empty.
func kustomize(t *testing.T, namespace string, components ...string) objects {
	t.Helper()
	dir := t.TempDir()
	deploy, err := filepath.Abs(deployDir)
	if err == nil {
		deploy, err = filepath.Rel(dir, deploy) // kustomize does not accept absolute paths
	}
	if err != nil {
		t.Fatal(err)
	}
	overlay := map[string]any{"resources": []string{deploy}}
	if namespace != "" {
		overlay["namespace"] = namespace
	}
	var paths []string
	for _, name := range components {
		paths = append(paths, filepath.Join(deploy, "components", name))
	}
	overlay["components"] = paths
	text, err := yaml.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "kustomization.yaml"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return kustomizeDir(t, dir)
}

// kustomizeDir returns what the kustomization in dir renders.
func kustomizeDir(t *testing.T, dir string) objects {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	objects, err := parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// parse parses documents strictly: a key must not occur twice.
func parse(manifests string) (objects, error) {
	all := objects{}
	for documents := utilyaml.NewDocumentDecoder(io.NopCloser(strings.NewReader(manifests))); ; {
		document := make([]byte, len(manifests)+1)
		n, err := documents.Read(document)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		var fields map[string]any
		if err := yaml.UnmarshalStrict(document[:n], &fields); err != nil {
			return nil, fmt.Errorf("%w in:\n%s", err, document[:n])
		}
		if len(fields) == 0 {
			continue
		}
		o := unstructured.Unstructured{Object: fields}
		if o.GetKind() == "FlowSchema" {
			o.SetNamespace("") // kustomize takes it for an object in a namespace
		}
		key := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
		if all[key] != nil {
			return nil, fmt.Errorf("two of %s", key)
		}
		all[key] = fields
	}
}

// args returns the arguments of the manager, with the variables that the kubelet replaces replaced.
func (o objects) args(t *testing.T) (args []string) {
	t.Helper()
	for key, deployment := range o {
		if !strings.HasPrefix(key, "Deployment ") {
			continue
		}
		namespace := unstructured.Unstructured{Object: deployment}
		containers, _, err := unstructured.NestedSlice(deployment, "spec", "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		list, _, err := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
		if err != nil {
			t.Fatal(err)
		}
		for _, arg := range list {
			args = append(args, strings.ReplaceAll(arg, "$(POD_NAMESPACE)", namespace.GetNamespace()))
		}
		return args
	}
	t.Fatal("there is no Deployment")
	return nil
}

// manager runs the manager in this process.
func manager(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := app.NewCommand(app.With(builtin.Entries()...))
	cmd.SetOut(&out)
	cmd.SetArgs(args)
	err := cmd.Execute()
	return out.String(), err
}

// effectiveConfig returns the configuration that arguments result in, however they are written.
func effectiveConfig(t *testing.T, args []string) string {
	t.Helper()
	config, err := manager(append([]string{"--print-effective-config"}, args...)...)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return config
}

// permissions returns what the roles of the manager grant, with the accounts to which they are bound.
// ServiceAccounts are among it; what manager rbac does not print is not.
func (o objects) permissions(t *testing.T) map[string]bool {
	t.Helper()
	granted := map[string]bool{}
	for key, object := range o {
		kind, name, _ := strings.Cut(key, " ")
		switch {
		case strings.Contains(name, "quartermaster-metrics-reader"):
		case kind == "ServiceAccount" && !strings.HasSuffix(name, "/quartermaster"):
			granted[key] = true
		case strings.HasSuffix(kind, "RoleBinding"):
			granted[fmt.Sprint(key, object["roleRef"], object["subjects"])] = true
		case strings.HasSuffix(kind, "Role"):
			for _, rule := range object["rules"].([]any) {
				for _, permission := range singlePermissions(rule.(map[string]any)) {
					granted[key+permission] = true
				}
			}
		}
	}
	return granted
}

// singlePermissions returns what a rule grants, each verb for each resource by itself.
func singlePermissions(rule map[string]any) (permissions []string) {
	list := func(field string) []any {
		if values, ok := rule[field].([]any); ok && len(values) > 0 {
			return values
		}
		return []any{"-"}
	}
	for _, group := range list("apiGroups") {
		for _, resource := range list("resources") {
			for _, name := range list("resourceNames") {
				for _, url := range list("nonResourceURLs") {
					for _, verb := range list("verbs") {
						permissions = append(permissions, fmt.Sprintf(" %s %s.%s %s %s", verb, resource, group, name, url))
					}
				}
			}
		}
	}
	return permissions
}

// comparable returns the objects without differences of no consequence.
func (o objects) comparable(t *testing.T) objects {
	t.Helper()
	config := effectiveConfig(t, o.args(t))
	for key, object := range o {
		kind, _, _ := strings.Cut(key, " ")
		switch {
		case kind == "Deployment":
			containers, _, _ := unstructured.NestedSlice(object, "spec", "template", "spec", "containers")
			containers[0].(map[string]any)["args"] = config
			if err := unstructured.SetNestedSlice(object, containers, "spec", "template", "spec", "containers"); err != nil {
				t.Fatal(err)
			}
		case strings.HasSuffix(kind, "Role"):
			var permissions []string
			for _, rule := range object["rules"].([]any) {
				permissions = append(permissions, singlePermissions(rule.(map[string]any))...)
			}
			slices.Sort(permissions)
			object["rules"] = permissions
		}
		// Helm needs this one not to delete an object.
		unstructured.RemoveNestedField(object, "metadata", "annotations", "helm.sh/resource-policy")
		if annotations, _, _ := unstructured.NestedMap(object, "metadata", "annotations"); len(annotations) == 0 {
			unstructured.RemoveNestedField(object, "metadata", "annotations")
		}
	}
	return o
}

func TestChartPassesHelmLint(t *testing.T) {
	result := lint.RunAll(chartDir, nil, "kube-system")
	for _, message := range result.Messages {
		if !strings.Contains(message.Error(), "icon is recommended") {
			t.Error(message)
		}
	}
}

// readSchema reads the schema.
var readSchema = sync.OnceValues(func() (map[string]any, error) {
	text, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		return nil, err
	}
	var schema map[string]any
	return schema, yaml.Unmarshal(text, &schema)
})
