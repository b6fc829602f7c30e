// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package scaleschedule tests the controller scale-schedule in managers as processes on a real control plane,
// without the controllers that would make Pods. Objects and the audit log show what was scaled, and by how
// many requests.
package scaleschedule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// auditPolicy logs what patches ask for.
const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
	{"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*"]},
	{"level": "Request", "verbs": ["patch"]},
	{"level": "Metadata"}]}`

// All tests of the package share a control plane.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{
		Components: []string{"scale-schedule", "scale-schedule-compat"},
		Cluster:    cluster.Options{AuditPolicy: auditPolicy, WithoutControllerManager: true},
	}))
}

const (
	prefix = "downscaler/"
	record = prefix + "original-replicas"
)

// args are the arguments of managers in which config-reload does not run, and nothing is too young to be
// scaled.
func args(flags ...string) []string {
	return append([]string{"--controllers=-config-reload", "--insecure-metrics", "--scale-schedule-grace-period=0"}, flags...)
}

// fixture is a namespace with Deployments.
type fixture struct {
	*testing.T
	ctx       context.Context
	namespace string
	begin     time.Time
}

func newFixture(t *testing.T, patience time.Duration) *fixture {
	t.Helper()
	f := &fixture{T: t, ctx: fleet.Within(t.Context(), t, patience), begin: time.Now()}
	f.namespace = shared.NewNamespace(f.ctx, f, nil)
	return f
}

// deploy creates a Deployment of three replicas.
func (f *fixture) deploy(name string, annotations map[string]string) {
	f.Helper()
	labels := map[string]string{"app": name}
	_, err := shared.Admin.AppsV1().Deployments(f.namespace).Create(f.ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](3), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		f.Error(err)
	}
}

// deployAll creates Deployments, several at a time.
func (f *fixture) deployAll(n int) {
	f.Helper()
	var creating sync.WaitGroup
	for part := range 10 {
		creating.Go(func() {
			for i := part; i < n; i += 10 {
				f.deploy(fmt.Sprintf("a%d", i), nil)
			}
		})
	}
	creating.Wait()
}

// annotate sets an annotation of the Namespace; an empty value removes it.
func (f *fixture) annotate(key, value string) {
	f.Helper()
	annotations := map[string]any{key: value}
	if value == "" {
		annotations[key] = nil
	}
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if _, err := shared.Admin.CoreV1().Namespaces().Patch(f.ctx, f.namespace, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		f.Fatal(err)
	}
}

// state returns the replicas and the record of a Deployment, such as "0 (3)".
func state(d *appsv1.Deployment) string {
	text := fmt.Sprint(*d.Spec.Replicas)
	if r, ok := d.Annotations[record]; ok {
		text += " (" + r + ")"
	}
	return text
}

// states counts the Deployments of the namespace by their state.
func (f *fixture) states() map[string]int {
	f.Helper()
	list, err := shared.Admin.AppsV1().Deployments(f.namespace).List(f.ctx, metav1.ListOptions{})
	assert.NoError(f, err)
	states := map[string]int{}
	for i := range list.Items {
		states[state(&list.Items[i])]++
	}
	return states
}

// waitForState waits until so many Deployments are in a state.
func (f *fixture) waitForState(want string, n int) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		if states := f.states(); states[want] < n {
			return fmt.Errorf("%v, want %d of %s", states, n, want)
		}
		return nil
	})
}

// patches returns the patches that managers have sent since a time, by the name of the Deployment, as
// "CODE BODY".
func (f *fixture) patches(since time.Time) map[string][]string {
	f.Helper()
	all := map[string][]string{}
	for _, e := range shared.AuditSince(f, since, func(e auditv1.Event) bool {
		return cluster.AuditPod(e) != "" && e.Verb == "patch" && e.Stage == auditv1.StageResponseComplete &&
			e.ObjectRef != nil && e.ObjectRef.Namespace == f.namespace && e.ObjectRef.Resource == "deployments"
	}) {
		if e.RequestObject == nil || !strings.Contains(string(e.RequestObject.Raw), `"resourceVersion"`) {
			f.Errorf("%s without a version: %v", e.RequestURI, e.RequestObject)
			continue
		}
		all[e.ObjectRef.Name] = append(all[e.ObjectRef.Name], fmt.Sprintf("%d %s", e.ResponseStatus.Code, e.RequestObject.Raw))
	}
	return all
}

// expectOneWriteEach holds that no Deployment was scaled twice, and that all but a few have their write in
// the log: it has no answer to what was in flight when a leader was killed.
func (f *fixture) expectOneWriteEach(since time.Time, n, unanswered int, part string) {
	f.Helper()
	scaled := func() (count int) {
		for name, patches := range f.patches(since) {
			done := slices.DeleteFunc(patches, func(p string) bool { return !strings.HasPrefix(p, "2") })
			if len(done) > 1 {
				f.Errorf("%s was scaled %d times: %q", name, len(done), done)
			}
			for _, p := range done {
				if count++; !strings.Contains(p, part) {
					f.Errorf("%s: %s, want %s", name, p, part)
				}
			}
		}
		return count
	}
	fleet.Eventually(f.ctx, f, func() error { // an object is written before its patch is in the audit log
		if count := scaled(); count < n-unanswered {
			return fmt.Errorf("%d writes in the audit log, want %d", count, n)
		}
		return nil
	})
}

// waitForEvent waits for an Event on a Deployment.
func (f *fixture) waitForEvent(name, reason string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		events, err := shared.Admin.CoreV1().Events(f.namespace).List(f.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("no Event " + reason + " on " + name)
		}
		return err
	})
}
