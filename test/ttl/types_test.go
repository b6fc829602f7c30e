// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var (
	widgets     = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	apiServices = schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}
)

func newObject(apiVersion, kind, name string, fields map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: fields}
	o.SetAPIVersion(apiVersion)
	o.SetKind(kind)
	o.SetName(name)
	return o
}

func widgetDefinition() *unstructured.Unstructured {
	return newObject("apiextensions.k8s.io/v1", "CustomResourceDefinition", "widgets.example.com", map[string]any{"spec": map[string]any{
		"group": "example.com", "scope": "Namespaced", "names": map[string]any{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
		"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}},
	}})
}

// countWatches counts the watches of a resource that a manager has begun and ended.
func (f *fixture) countWatches(resource string) (began, ended int) {
	f.Helper()
	for _, e := range shared.AuditSince(f, f.begin, func(e auditv1.Event) bool {
		return cluster.AuditPod(e) != "" && e.Verb == "watch" && e.ObjectRef != nil && e.ObjectRef.Resource == resource && e.ResponseStatus != nil && e.ResponseStatus.Code == 200
	}) {
		if e.Stage == auditv1.StageResponseStarted {
			began++
		} else {
			ended++
		}
	}
	return began, ended
}

// goroutines returns how many goroutines a manager has.
func goroutines(t *testing.T, m *cluster.Manager) int {
	t.Helper()
	_, body, err := fleet.Get(m.InsecureURL+"/metrics", "")
	assert.NoError(t, err)
	n, err := strconv.Atoi(regexp.MustCompile(`(?m)^go_goroutines (\d+)`).FindStringSubmatch(body)[1])
	assert.NoError(t, err)
	return n
}

// TestTypeComesAndGoes installs a definition, uses it and removes it, several times.
func TestTypeComesAndGoes(t *testing.T) {
	f := newFixture(t)
	m := shared.RunLeader(f.ctx, t, args("--v=2")...)
	f.settle()
	before := 0
	for round := range 2 {
		if _, err := shared.Objects.Resource(definitions).Create(f.ctx, widgetDefinition(), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		objects := shared.Objects.Resource(widgets).Namespace(f.namespace)
		fleet.Eventually(f.ctx, t, func() error {
			o := newObject("example.com/v1", "Widget", "w", map[string]any{})
			o.SetAnnotations(map[string]string{ttlControllerTTL: "0"})
			_, err := objects.Create(f.ctx, o, metav1.CreateOptions{})
			return err
		})
		waitUntilGone(f, func(ctx context.Context, name string, opts metav1.GetOptions) (*unstructured.Unstructured, error) {
			return objects.Get(ctx, name, opts)
		}, "w")
		assert.NoError(t, shared.Objects.Resource(definitions).Delete(f.ctx, "widgets.example.com", metav1.DeleteOptions{}))
		fleet.Eventually(f.ctx, t, func() error {
			if began, ended := f.countWatches("widgets"); began <= round || began != ended {
				return fmt.Errorf("%d watches have begun, %d have ended", began, ended)
			}
			if now := goroutines(t, m); before == 0 {
				before = now // all other types have been listed by now
			} else if now >= before+4 { // a type has more goroutines
				return fmt.Errorf("%d goroutines, %d before", now, before)
			}
			return nil
		})
	}
	began, _ := f.countWatches("widgets")
	<-time.After(2 * time.Second)
	if later, _ := f.countWatches("widgets"); later != began {
		t.Errorf("%d watches of a type that is gone", later-began)
	}
	// It goes on where it was.
	f.createConfigMap("cm", expiresIn(0))
	f.waitUntilGone("cm")
	f.expectDeleted("configmaps/cm", "widgets/w", "widgets/w")
}

// TestTypeWhoseAPIIsDownDisturbsNobody has an APIService whose Service does not exist, before the manager
// starts.
func TestTypeWhoseAPIIsDownDisturbsNobody(t *testing.T) {
	f := newFixture(t)
	down := newObject("apiregistration.k8s.io/v1", "APIService", "v1.down.example.com", map[string]any{"spec": map[string]any{
		"group": "down.example.com", "version": "v1", "groupPriorityMinimum": int64(1000), "versionPriority": int64(15), "insecureSkipTLSVerify": true,
		"service": map[string]any{"namespace": f.namespace, "name": "nobody"},
	}})
	if _, err := shared.Objects.Resource(apiServices).Create(f.ctx, down, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.Objects.Resource(apiServices).Delete(context.Background(), down.GetName(), metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	m := shared.RunLeader(f.ctx, t, args()...)
	f.createConfigMap("cm", expiresIn(0))
	f.waitUntilGone("cm")
	f.expectDeleted("configmaps/cm")
	fleet.Eventually(f.ctx, t, func() error {
		if log := m.Tail(1000); !strings.Contains(log, "down.example.com") || strings.Contains(log, "panic") {
			return fmt.Errorf("the log does not name the group: %s", log)
		}
		return nil
	})
	if err := fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_controller_problem{controller="ttl"} 0`); err != nil {
		t.Error(err)
	}
}

// TestTypesThatAreForbiddenStopNoOther has a manager that may delete ConfigMaps and other chosen types, but
// asks for all.
func TestTypesThatAreForbiddenStopNoOther(t *testing.T) {
	f := newFixture(t)
	patch := `[{"op": "remove", "path": "/rules/%d"}]`
	const role = "quartermaster-controller-ttl"
	r, err := shared.Admin.RbacV1().ClusterRoles().Get(f.ctx, role, metav1.GetOptions{})
	assert.NoError(t, err)
	for i, rule := range r.Rules {
		if rule.Resources[0] == "*" {
			if _, err := shared.Kubectl(f.ctx, "patch", "clusterrole", role, "--type=json", "-p", fmt.Sprintf(patch, i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Cleanup(func() { shared.InstallWith(context.Background(), t) })
	shared.ExpectRefusals(func(e auditv1.Event) bool {
		return e.Verb == "list" || e.Verb == "watch" || e.Verb == "get" && e.ObjectRef != nil && e.ObjectRef.Namespace == f.namespace
	})
	m := shared.RunLeader(f.ctx, t, args("--v=2")...)
	fleet.Eventually(f.ctx, t, func() error {
		_, body, err := fleet.Get(m.InsecureURL+"/metrics", "")
		if err == nil && !regexp.MustCompile(`(?m)^quartermaster_ttl_failing_types [1-9]`).MatchString(body) {
			err = errors.New("no type is failing")
		}
		return err
	})
	if _, err := shared.Kubectl(f.ctx, "-n", f.namespace, "create", "secret", "generic", "s"); err != nil {
		t.Fatal(err)
	}
	f.annotate("secret/s", ttlControllerTTL+"=0") // which it may list for config-reload's sake, and no more
	f.waitForEvent(f.namespace, "s", "FailedToDeleteExpiredTTL")
	f.createConfigMap("cm", expiresIn(0))
	f.waitUntilGone("cm")
	f.expectDeleted("configmaps/cm")
	if err := fleet.Answers(m.InsecureURL+"/metrics", "", 200, `quartermaster_controller_problem{controller="ttl"} 0`); err != nil {
		t.Error(err)
	}
}
