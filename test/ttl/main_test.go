// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ttl tests the controller ttl in managers as processes on a real control plane. The audit log
// shows what was deleted, by whom, and with which preconditions.
package ttl

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// auditPolicy logs what deletions ask for.
const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
	{"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*"]},
	{"level": "Request", "verbs": ["delete", "deletecollection"]},
	{"level": "Metadata"}]}`

// All tests of the package share a control plane.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{
		Components: []string{"ttl-chosen-types", "ttl-every-type", "ttl-compat"}, Cluster: cluster.Options{AuditPolicy: auditPolicy},
	}))
}

// args are the arguments of managers in which config-reload does not run, and ttl deletes at once what is
// due when it is first seen. The installation switches on ttl, all types and both dialects.
func args(flags ...string) []string {
	return append([]string{"--controllers=-config-reload", "--insecure-metrics", "--ttl-grace-period=0"}, flags...)
}

// fixture is a namespace.
type fixture struct {
	*testing.T
	ctx       context.Context
	namespace string
	begin     time.Time
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{T: t, ctx: fleet.Context(t), begin: time.Now()}
	f.namespace = shared.NewNamespace(f.ctx, f, nil)
	return f
}

// expiresIn returns the native annotation of a deadline.
func expiresIn(d time.Duration) map[string]string {
	return map[string]string{"quartermaster.dev/expires": time.Now().Add(d).UTC().Format(time.RFC3339Nano)}
}

// createConfigMap creates a ConfigMap.
func (f *fixture) createConfigMap(name string, annotations map[string]string) *corev1.ConfigMap {
	f.Helper()
	return f.createConfigMapIn(f.namespace, name, annotations)
}

func (f *fixture) createConfigMapIn(namespace, name string, annotations map[string]string) *corev1.ConfigMap {
	f.Helper()
	cm, err := shared.Admin.CoreV1().ConfigMaps(namespace).Create(f.ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}, metav1.CreateOptions{})
	assert.NoError(f, err)
	return cm
}

// waitUntilGone waits until an object does not exist.
func waitUntilGone[T any](f *fixture, get func(context.Context, string, metav1.GetOptions) (T, error), name string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		_, err := get(f.ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%s exists: %w", name, err)
	})
}

func (f *fixture) waitUntilGone(names ...string) {
	f.Helper()
	for _, name := range names {
		waitUntilGone(f, shared.Admin.CoreV1().ConfigMaps(f.namespace).Get, name)
	}
}

// writeRules writes a file of rules, in which NS is the namespace, and returns its path.
func (f *fixture) writeRules(text string) string {
	f.Helper()
	return f.writeFile("rules:" + strings.ReplaceAll(text, "NS", f.namespace))
}

// writeFile writes a file, and returns its path.
func (f *fixture) writeFile(text string) string {
	f.Helper()
	path := filepath.Join(f.TempDir(), "rules.yaml")
	assert.NoError(f, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// settle waits until the controller has decided on everything that happened before.
func (f *fixture) settle() {
	f.Helper()
	name := fmt.Sprintf("canary-%d", time.Now().UnixNano())
	f.createConfigMap(name, expiresIn(0))
	f.waitUntilGone(name)
}

// waitForEvent waits for an Event.
func (f *fixture) waitForEvent(namespace, name, reason string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		events, err := shared.Admin.CoreV1().Events(namespace).List(f.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("no Event %s on %s", reason, name)
		}
		return err
	})
}

// deletion is a request of a manager.
type deletion struct {
	auditv1.Event
	options metav1.DeleteOptions
}

// deletions returns the deletions that managers have asked for since the beginning, and judges each:
// it must name one object in one version, and nothing that is protected.
func (f *fixture) deletions() (list []deletion) {
	f.Helper()
	for _, e := range shared.AuditSince(f, f.begin, func(e auditv1.Event) bool {
		return cluster.AuditPod(e) != "" && strings.HasPrefix(e.Verb, "delete") && e.Stage == auditv1.StageResponseComplete
	}) {
		d := deletion{Event: e}
		if e.RequestObject != nil {
			assert.NoError(f, json.Unmarshal(e.RequestObject.Raw, &d.options))
		}
		p := d.options.Preconditions
		if e.Verb != "delete" || p == nil || p.UID == nil || p.ResourceVersion == nil || *d.options.PropagationPolicy != metav1.DeletePropagationBackground {
			f.Errorf("%s %s with %v", e.Verb, e.RequestURI, d.options)
		}
		if ref := e.ObjectRef; strings.HasPrefix(ref.Namespace, "kube-") || slices.Contains([]string{"nodes", "persistentvolumes", "customresourcedefinitions"}, ref.Resource) ||
			ref.Resource == "namespaces" && (strings.HasPrefix(ref.Name, "kube-") || ref.Name == "default") {
			f.Errorf("%s %s: it is protected", e.Verb, e.RequestURI)
		}
		list = append(list, d)
	}
	return list
}

// expectDeleted compares what managers have deleted in the namespace, canaries left out.
func (f *fixture) expectDeleted(want ...string) {
	f.Helper()
	var got []string
	fleet.Eventually(f.ctx, f, func() error { // an object is gone before its deletion is in the audit log
		got = nil
		for _, d := range f.deletions() {
			if ref := d.ObjectRef; ref.Namespace == f.namespace && d.ResponseStatus.Code < 300 && !strings.HasPrefix(ref.Name, "canary-") {
				got = append(got, ref.Resource+"/"+ref.Name)
			}
		}
		if len(got) < len(want) {
			return fmt.Errorf("deleted %q, want %q", got, want)
		}
		return nil
	})
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.Errorf("deleted %q, want %q", got, want)
	}
}
