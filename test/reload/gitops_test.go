// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// ignoreRule is an item of ignoreDifferences in an Application of Argo CD.
type ignoreRule struct {
	Group, Kind           string
	ManagedFieldsManagers []string
	JSONPointers          []string
	JQPathExpressions     []string
}

// documentedRules returns what the documentation tells Argo CD to ignore.
func documentedRules(t *testing.T) (list []ignoreRule) {
	t.Helper()
	text, err := os.ReadFile("../../docs/controllers/config-reload.md")
	assert.NoError(t, err)
	for block := range strings.SplitSeq(string(text), "```yaml\n") {
		var app struct {
			Spec struct{ IgnoreDifferences []ignoreRule }
		}
		block, _, _ = strings.Cut(block, "```")
		if strings.Contains(block, "ignoreDifferences") {
			assert.NoError(t, yaml.UnmarshalStrict([]byte(strings.ReplaceAll(block, "syncPolicy:\n    syncOptions: [RespectIgnoreDifferences=true]   # or a sync takes the mark away, and rolls the pods\n  ", "")), &app))
			list = append(list, app.Spec.IgnoreDifferences...)
		}
	}
	return list
}

// ourVariables is the documented expression for variables. The test removes them without jq.
const ourVariables = `.spec.template.spec.containers[].env[]? | select(.name | startswith("STAKATER_"))`

// What the documentation tells Argo CD to ignore is all that a reload changes.
func TestGitOpsIgnoreRulesCoverAReload(t *testing.T) {
	list := documentedRules(t)
	if len(list) != 2 || len(list[0].ManagedFieldsManagers) != 1 || len(list[1].JSONPointers) != 3 || !slices.Equal(list[1].JQPathExpressions, []string{ourVariables}) {
		t.Fatalf("the documentation says %+v", list)
	}
	manager, paths := list[0].ManagedFieldsManagers[0], list[1]
	s := newTestNamespace(t, nil)
	s.configMap("app-config", "blue")
	s.create(newDeployment("web", annotated(auto, "true"), uses(cm)), newDeployment("worker", annotated(fleet.ReloadAnnotation, "auto"), uses(cm)))
	shared.RunLeader(fleet.Context(t), t, immediateArgs()...)
	for _, object := range []string{web, worker} {
		s.waitForState(object, cm)
	}
	before := map[string]*unstructured.Unstructured{web: s.get(web), worker: s.get(worker)}
	changeColor(s, "red")
	s.waitForMark(worker, cm)
	for object, mark := range map[string]string{web: `k:{\"name\":\"STAKATER_APP_CONFIG_CONFIGMAP\"}`, worker: "f:quartermaster.dev/reloaded-from"} {
		after := s.get(object)
		var owned string
		for _, m := range after.GetManagedFields() {
			if m.Manager == manager {
				owned += m.FieldsV1.GetRawString()
			}
		}
		for _, field := range []string{mark, "f:" + fleet.StateAnnotation} {
			if !strings.Contains(owned, field) {
				t.Errorf("%s: %s owns %s, want %s among it", object, manager, owned, field)
			}
		}
		if diff := cmp.Diff(paths.stripIgnored(t, before[object]), paths.stripIgnored(t, after)); diff != "" {
			t.Errorf("%s differs in what is not ignored (-before +after):\n%s", object, diff)
		}
	}

	// Flux applies the manifest on the server. It takes away nothing that it does not own.
	manifest := newDeployment("web", annotated(auto, "true"), uses(cm))
	data, err := json.Marshal(map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "web", "annotations": manifest.Annotations}, "spec": manifest.Spec})
	assert.NoError(t, err)
	client, name := s.client(web)
	if _, err := client.Patch(t.Context(), name, types.ApplyPatchType, data, metav1.PatchOptions{FieldManager: "kustomize-controller", Force: ptr.To(true)}); err != nil {
		t.Fatal(err)
	}
	s.waitForMark(web, cm)
	s.waitForState(web, cm)
}

// stripIgnored returns metadata and spec of an object without what is to be ignored.
func (i ignoreRule) stripIgnored(t *testing.T, o *unstructured.Unstructured) map[string]any {
	t.Helper()
	c := o.DeepCopy()
	for _, pointer := range i.JSONPointers {
		var fields []string
		for field := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
			fields = append(fields, strings.NewReplacer("~1", "/", "~0", "~").Replace(field))
		}
		unstructured.RemoveNestedField(c.Object, fields...)
	}
	containers, _, err := unstructured.NestedSlice(c.Object, "spec", "template", "spec", "containers")
	assert.NoError(t, err)
	for _, container := range containers {
		fields := container.(map[string]any)
		env, _ := fields["env"].([]any)
		env = slices.DeleteFunc(env, func(v any) bool { return strings.HasPrefix(v.(map[string]any)["name"].(string), "STAKATER_") })
		delete(fields, "env")
		if len(env) > 0 {
			fields["env"] = env
		}
	}
	assert.NoError(t, unstructured.SetNestedSlice(c.Object, containers, "spec", "template", "spec", "containers"))
	if annotations, _, _ := unstructured.NestedMap(c.Object, "spec", "template", "metadata", "annotations"); len(annotations) == 0 {
		unstructured.RemoveNestedField(c.Object, "spec", "template", "metadata", "annotations")
	}
	delete(c.Object["metadata"].(map[string]any)["annotations"].(map[string]any), "deployment.kubernetes.io/revision")
	return map[string]any{"annotations": c.GetAnnotations(), "spec": c.Object["spec"]}
}
