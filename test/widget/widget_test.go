// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package widget tests examples/widget, a build of the manager from a module of its own, on a real
// control plane.
package widget

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var shared *fleet.Fleet

// leaseFlag makes the build use the Lease and the ServiceAccount of the installation that the
// fleet has.
const leaseFlag = "--leader-elect-resource-name=quartermaster"

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Program: "examples/widget"}, install))
}

const widgetCRD = "../../examples/widget/config/crd/example.com_widgets.yaml"

// install applies the CustomResourceDefinition and the roles that the build prints.
func install(ctx context.Context) error {
	if err := shared.ApplyDir(ctx, widgetCRD); err != nil {
		return err
	}
	if err := shared.WaitForCRDs(ctx, widgetCRD); err != nil {
		return err
	}
	roles, err := exec.CommandContext(ctx, shared.Binary, "rbac", leaseFlag).Output()
	if err != nil {
		return err
	}
	text := strings.ReplaceAll(string(roles), "  name: widget\n  namespace: kube-system", "  name: quartermaster\n  namespace: kube-system")
	file := filepath.Join(shared.Dir(), "widget-rbac.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	return shared.ApplyDir(ctx, file)
}

var (
	widgets     = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	configMaps  = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
)

// count returns how many objects in a namespace fit.
func count(ctx context.Context, t *testing.T, resource schema.GroupVersionResource, namespace string, match func(*unstructured.Unstructured) bool) int {
	t.Helper()
	list, err := shared.Objects.Resource(resource).Namespace(namespace).List(ctx, metav1.ListOptions{})
	assert.NoError(t, err)
	n := 0
	for i := range list.Items {
		if match(&list.Items[i]) {
			n++
		}
	}
	return n
}

func isOwned(o *unstructured.Unstructured) bool { return metav1.GetControllerOf(o) != nil }

func hasReason(reason string) func(*unstructured.Unstructured) bool {
	return func(o *unstructured.Unstructured) bool {
		conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
		if len(conditions) != 1 {
			return false
		}
		return conditions[0].(map[string]any)["reason"] == reason
	}
}

// TestLongHandoverFinishesTheWork creates Widgets and deletes them again. In the middle of either, the leader
// is told to stop, and the other replica does the rest.
func TestLongHandoverFinishesTheWork(t *testing.T) {
	const all = 60
	ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
	begin := time.Now()
	namespace := shared.NewNamespace(ctx, t, nil)
	settings := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": "common"}, "data": map[string]any{"COLOR": "red"}}}
	if _, err := shared.Objects.Resource(configMaps).Namespace(namespace).Create(ctx, settings, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await := func(what string, holds func() bool) {
		t.Helper()
		fleet.Eventually(ctx, t, func() error {
			if !holds() {
				return fmt.Errorf("waiting until %s", what)
			}
			return nil
		})
	}
	leader := shared.RunLeader(ctx, t, leaseFlag)
	standby := shared.RunStandby(ctx, t, leaseFlag)
	handover := func() {
		t.Helper()
		assert.NoError(t, leader.Signal(syscall.SIGTERM))
		shared.WaitForLeader(ctx, t, standby)
		leader, standby = standby, shared.RunStandby(ctx, t, leaseFlag)
	}

	for i := range all {
		w := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget",
			"metadata": map[string]any{"name": fmt.Sprintf("w%d", i)},
			"spec":     map[string]any{"image": "nginx", "message": "hello", "settings": "common"}}}
		if _, err := shared.Objects.Resource(widgets).Namespace(namespace).Create(ctx, w, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if i == all/2 {
			handover()
		}
	}
	await("each Widget has its objects and its condition", func() bool {
		return count(ctx, t, widgets, namespace, hasReason("Progressing")) == all &&
			count(ctx, t, deployments, namespace, isOwned) == all && count(ctx, t, configMaps, namespace, isOwned) == all
	})

	// A change of the shared ConfigMap reaches all.
	before := environments(ctx, t, namespace)
	_ = unstructured.SetNestedField(settings.Object, "blue", "data", "COLOR")
	if _, err := shared.Objects.Resource(configMaps).Namespace(namespace).Update(ctx, settings, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await("each Deployment has the new settings", func() bool {
		after := environments(ctx, t, namespace)
		return len(before) == 1 && len(after) == 1 && before[0] != after[0]
	})

	assert.NoError(t, shared.Objects.Resource(widgets).Namespace(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	await("the first Widgets are gone", func() bool {
		return count(ctx, t, widgets, namespace, func(*unstructured.Unstructured) bool { return true }) < all*9/10
	})
	handover()
	await("all are gone, with what they owned", func() bool {
		return count(ctx, t, widgets, namespace, func(*unstructured.Unstructured) bool { return true }) == 0 &&
			count(ctx, t, deployments, namespace, isOwned) == 0 && count(ctx, t, configMaps, namespace, isOwned) == 0
	})

	// Nothing was created twice, and no write of a controller was refused but for a conflict.
	created, writes := map[string]int{}, 0
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Namespace == namespace && strings.HasSuffix(e.UserAgent, "/widget")
	}) {
		writes++
		switch code := e.ResponseStatus.Code; {
		case code == 201:
			created[e.ObjectRef.Resource+" "+e.ObjectRef.Name]++
		case code >= 400 && code != 409 && code != 404:
			t.Errorf("%s %s %s: %d", e.Verb, e.ObjectRef.Resource, e.ObjectRef.Name, code)
		}
	}
	t.Logf("%.1f requests for a Widget's whole life", float64(writes)/all)
	if len(created) != 2*all {
		t.Errorf("%d objects were created, want %d", len(created), 2*all)
	}
	for object, n := range created {
		if n != 1 {
			t.Errorf("%s was created %d times", object, n)
		}
	}
}

// environments returns the different values of the annotation of the Deployments' Pods.
func environments(ctx context.Context, t *testing.T, namespace string) (values []string) {
	t.Helper()
	seen := map[string]bool{}
	count(ctx, t, deployments, namespace, func(o *unstructured.Unstructured) bool {
		value, _, _ := unstructured.NestedString(o.Object, "spec", "template", "metadata", "annotations", "example.com/environment")
		if !seen[value] {
			seen[value] = true
			values = append(values, value)
		}
		return true
	})
	return values
}
