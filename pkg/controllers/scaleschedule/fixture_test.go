// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

const (
	ds        = "downscaler/"
	recordKey = ds + "original-replicas"
	// patchA is the write that most tests wait for.
	patchA = "patch deployments.apps shop/a"
)

// fixture is a cluster with a manager that runs scale-schedule, in a bubble of fake time, which begins at
// midnight UTC of 1 January 2000, a Saturday.
type fixture struct {
	*testing.T
	*controllertest.Host
	entry          controllers.Entry
	cfg            *scaleschedule.Config
	flags          []string
	objects        []runtime.Object // until start
	comparedEvents int              // Events that were compared

	mu          sync.Mutex
	requests    []string
	bodies      []string // of patches
	requestHook func(controllertest.Request) error
}

func newFixture(t *testing.T, configure func(*scaleschedule.Config)) *fixture {
	t.Helper()
	f := &fixture{T: t, entry: scaleschedule.Entry(), flags: []string{"--compat=downscaler"}}
	f.cfg = f.entry.Config.(*scaleschedule.Config)
	f.cfg.MaxWritesPerSecond = 0 // tests of the limit set it, see withWriteLimit
	if configure != nil {
		configure(f.cfg)
	}
	return f
}

// start starts the manager on what was put before.
func (f *fixture) start() {
	f.Helper()
	known := map[string]bool{}
	for _, obj := range f.objects {
		if n, ok := obj.(*corev1.Namespace); ok {
			known[n.Name] = true
		}
	}
	for _, obj := range f.objects {
		if name := obj.(metav1.Object).GetNamespace(); name != "" && !known[name] {
			known[name] = true
			f.objects = append(f.objects, namespace(name))
		}
	}
	controllertest.Setup{Entries: []controllers.Entry{f.entry}, Flags: f.flags, Prepare: func(h *controllertest.Host) {
		f.Host = h
		h.OnRead(f.request)
		h.OnWrite(f.request)
	}}.NewHost(f.T, f.objects...)
}

// request is called for requests of the controller, one at a time. Its search for the originals is left out.
func (f *fixture) request(r controllertest.Request) error {
	if r.Verb == "list" {
		return nil
	}
	f.mu.Lock()
	hook := f.requestHook
	f.mu.Unlock()
	text, err := r.String(), error(nil)
	if hook != nil {
		if err = hook(r); err != nil {
			text += " refused"
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, text)
	if r.Verb == "patch" {
		f.bodies = append(f.bodies, string(r.Body))
	}
	return err
}

// beforePatch calls hook before each patch, and refuses it with the error, if any.
func (f *fixture) beforePatch(hook func(controllertest.Request) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requestHook = func(r controllertest.Request) error {
		if r.Verb == "patch" {
			return hook(r)
		}
		return nil
	}
}

// expectWrites compares the requests since the last time, without the reads that compare the clocks.
func (f *fixture) expectWrites(want ...string) {
	f.Helper()
	var got []string
	for _, r := range f.takeRequests() {
		if !strings.HasPrefix(r, "get ") {
			got = append(got, r)
		}
	}
	if !slices.Equal(got, want) {
		f.Errorf("requests %q, want %q", got, want)
	}
}

// takeRequests returns all requests since the last time.
func (f *fixture) takeRequests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.requests = nil }()
	return f.requests
}

// annotationMap returns annotations, given as keys and values.
func annotationMap(pairs []string) map[string]string {
	annotations := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		annotations[pairs[i]] = pairs[i+1]
	}
	return annotations
}

// objectMeta returns the metadata of an object that was created an hour ago.
func objectMeta(name string, annotations ...string) metav1.ObjectMeta {
	namespace, name, _ := strings.Cut(name, "/")
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotationMap(annotations), CreationTimestamp: metav1.NewTime(time.Now().Add(-time.Hour))}
}

func deployment(name string, replicas int32, annotations ...string) *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: objectMeta(name, annotations...), Spec: appsv1.DeploymentSpec{Replicas: &replicas}}
}

func namespace(name string, annotations ...string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: objectMeta("/"+name, annotations...)}
}

// span returns a span from one time after now until another.
func span(start, end time.Duration) string {
	return time.Now().Add(start).UTC().Format(time.RFC3339) + "-" + time.Now().Add(end).UTC().Format(time.RFC3339)
}

// add creates or replaces objects, and lets the controller work.
func (f *fixture) add(objects ...runtime.Object) {
	f.Helper()
	if f.Host == nil {
		f.objects = append(f.objects, objects...)
		return
	}
	f.Put(objects...)
	f.Settle()
}

// scale changes the replicas of a Deployment as somebody else does.
func (f *fixture) scale(name string, replicas int32) {
	f.Helper()
	f.editDeployment(name, func(d *appsv1.Deployment) { d.Spec.Replicas = &replicas })
}

// annotate sets annotations of a Deployment, or removes those with an empty value.
func (f *fixture) annotate(name string, pairs ...string) {
	f.Helper()
	f.editDeployment(name, func(d *appsv1.Deployment) {
		if d.Annotations == nil {
			d.Annotations = map[string]string{}
		}
		maps.Copy(d.Annotations, annotationMap(pairs))
		maps.DeleteFunc(d.Annotations, func(_, value string) bool { return value == "" })
	})
}

func (f *fixture) editDeployment(name string, change func(*appsv1.Deployment)) {
	f.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	d := controllertest.Get[appsv1.Deployment](f.Host, namespace, name)
	change(d)
	f.add(d)
}

// expectReplicas compares the replicas of a Deployment and its record, such as "0 (3)".
func (f *fixture) expectReplicas(name, want string) {
	f.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	if got := stateOf(controllertest.Get[appsv1.Deployment](f.Host, namespace, name)); got != want {
		f.Errorf("%s is %s, want %s", name, got, want)
	}
}

func stateOf(d *appsv1.Deployment) string {
	state := fmt.Sprint(ptr.Deref(d.Spec.Replicas, -1))
	if record, ok := d.Annotations[recordKey]; ok {
		state += " (" + record + ")"
	}
	return state
}

// expectEvents compares the reasons of the Events since the last time, and what they are about.
func (f *fixture) expectEvents(want ...string) {
	f.Helper()
	all := f.Events()
	var got []string
	for _, text := range all[f.comparedEvents:] {
		fields := strings.Fields(text)
		got = append(got, fields[1]+" "+strings.TrimSuffix(fields[2], ":"))
	}
	f.comparedEvents = len(all)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		f.Errorf("Events %q, want %q", got, want)
	}
}

// takeRecords returns the records that were written, in order.
func (f *fixture) takeRecords() (records []string) {
	f.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, body := range f.bodies {
		var sent metav1.PartialObjectMetadata
		assert.NoError(f, json.Unmarshal([]byte(body), &sent))
		records = append(records, sent.Annotations[recordKey])
	}
	f.bodies = nil
	return records
}

// expectMetric compares a metric.
func (f *fixture) expectMetric(want float64, name string, labels ...string) {
	f.Helper()
	if got := f.Metric("quartermaster_scale_schedule_"+name, labels...); got != want {
		f.Errorf("%s is %v, want %v", name, got, want)
	}
}

// countEvents returns how often an Event was recorded. Events with the same text are one object.
func (f *fixture) countEvents(reason string) (n int) {
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		if e.Reason == reason {
			n += int(max(e.Count, 1))
		}
	}
	return n
}

func withKind(name string) func(*scaleschedule.Config) {
	return func(c *scaleschedule.Config) { c.Kinds = append(c.Kinds, name) }
}

// autoscaler has at least 4 and at most 6 replicas.
func autoscaler(name, kind, target string, annotations ...string) *autoscalingv2.HorizontalPodAutoscaler {
	return &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: objectMeta(name, annotations...), Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
		MinReplicas: ptr.To[int32](4), MaxReplicas: 6, ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: kind, Name: target}}}
}

// definition is a CustomResourceDefinition.
func definition(group, version, kind, plural string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": plural + "." + group},
		"spec": map[string]any{"group": group, "scope": "Namespaced", "names": map[string]any{"kind": kind, "plural": plural},
			"versions": []any{map[string]any{"name": version, "served": true, "storage": true}}},
	}}
}

func customObject(apiVersion, kind, name string, spec map[string]any, annotations ...string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": apiVersion, "kind": kind, "spec": spec}}
	m := objectMeta(name, annotations...)
	u.SetNamespace(m.Namespace)
	u.SetName(m.Name)
	u.SetCreationTimestamp(m.CreationTimestamp)
	u.SetAnnotations(m.Annotations)
	return u
}

func scaledObject(name, target string, annotations ...string) *unstructured.Unstructured {
	return customObject("keda.sh/v1alpha1", "ScaledObject", name, map[string]any{"scaleTargetRef": map[string]any{"name": target}}, annotations...)
}

// scaledObject returns the ScaledObject shop/s.
func (f *fixture) scaledObject() *unstructured.Unstructured {
	f.Helper()
	client, err := dynamic.NewForConfig(f.RESTConfig())
	assert.NoError(f, err)
	resource := schema.GroupVersionResource{Group: "keda.sh", Version: "v1alpha1", Resource: "scaledobjects"}
	u, err := client.Resource(resource).Namespace("shop").Get(f.Context(), "s", metav1.GetOptions{})
	assert.NoError(f, err)
	return u
}

func rollout(name string, annotations ...string) *unstructured.Unstructured {
	return customObject("argoproj.io/v1alpha1", "Rollout", name, map[string]any{"replicas": int64(3)}, annotations...)
}
