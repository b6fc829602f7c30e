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

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

const (
	ds = "downscaler/"
	R  = ds + "original-replicas"
	// patchA is the write that most tests wait for.
	patchA = "patch deployments.apps shop/a"
)

// fixture is a cluster with a manager that runs scale-schedule, in a bubble of fake time, which begins at
// midnight UTC of 1 January 2000, a Saturday.
type fixture struct {
	*testing.T
	*controllertest.Host
	entry   controllers.Entry
	cfg     *scaleschedule.Config
	flags   []string
	objects []runtime.Object // until start
	told    int              // Events that were compared

	mu       sync.Mutex
	requests []string
	bodies   []string // of patches
	before   func(controllertest.Request) error
}

func newFixture(t *testing.T, configure func(*scaleschedule.Config)) *fixture {
	t.Helper()
	w := &fixture{T: t, entry: scaleschedule.Entry(), flags: []string{"--compat=downscaler"}}
	w.cfg = w.entry.Config.(*scaleschedule.Config)
	w.cfg.MaxPerSecond = 0 // tests of the limit set it, see limited
	if configure != nil {
		configure(w.cfg)
	}
	return w
}

// start starts the manager on what was put before.
func (w *fixture) start() {
	w.Helper()
	given := map[string]bool{}
	for _, obj := range w.objects {
		if n, ok := obj.(*corev1.Namespace); ok {
			given[n.Name] = true
		}
	}
	for _, obj := range w.objects {
		if name := obj.(metav1.Object).GetNamespace(); name != "" && !given[name] {
			given[name] = true
			w.objects = append(w.objects, namespace(name))
		}
	}
	controllertest.Setup{Entries: []controllers.Entry{w.entry}, Flags: w.flags, Prepare: func(h *controllertest.Host) {
		w.Host = h
		h.OnRead(w.request)
		h.OnWrite(w.request)
	}}.NewHost(w.T, w.objects...)
}

// request is called for requests of the controller, one at a time. Its search for the originals is left out.
func (w *fixture) request(r controllertest.Request) error {
	if r.Verb == "list" {
		return nil
	}
	w.mu.Lock()
	before := w.before
	w.mu.Unlock()
	text, err := r.String(), error(nil)
	if before != nil {
		if err = before(r); err != nil {
			text += " refused"
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, text)
	if r.Verb == "patch" {
		w.bodies = append(w.bodies, string(r.Body))
	}
	return err
}

// beforePatch calls f before each patch, and refuses it with the error, if any.
func (w *fixture) beforePatch(f func(controllertest.Request) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before = func(r controllertest.Request) error {
		if r.Verb == "patch" {
			return f(r)
		}
		return nil
	}
}

// asked compares the requests since the last time, without the reads that compare the clocks.
func (w *fixture) asked(want ...string) {
	w.Helper()
	var got []string
	for _, r := range w.all() {
		if !strings.HasPrefix(r, "get ") {
			got = append(got, r)
		}
	}
	if !slices.Equal(got, want) {
		w.Errorf("requests %q, want %q", got, want)
	}
}

// all returns all requests since the last time.
func (w *fixture) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.requests = nil }()
	return w.requests
}

// annotated returns annotations, given as keys and values.
func annotated(pairs []string) map[string]string {
	a := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		a[pairs[i]] = pairs[i+1]
	}
	return a
}

// meta is the metadata of an object that was created an hour ago.
func meta(name string, annotations ...string) metav1.ObjectMeta {
	namespace, name, _ := strings.Cut(name, "/")
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotated(annotations), CreationTimestamp: metav1.NewTime(time.Now().Add(-time.Hour))}
}

func deployment(name string, replicas int32, annotations ...string) *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: meta(name, annotations...), Spec: appsv1.DeploymentSpec{Replicas: &replicas}}
}

func namespace(name string, annotations ...string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: meta("/"+name, annotations...)}
}

// in returns a span from one time after now until another.
func in(from, until time.Duration) string {
	return time.Now().Add(from).UTC().Format(time.RFC3339) + "-" + time.Now().Add(until).UTC().Format(time.RFC3339)
}

// add creates or replaces objects, and lets the controller work.
func (w *fixture) add(objects ...runtime.Object) {
	w.Helper()
	if w.Host == nil {
		w.objects = append(w.objects, objects...)
		return
	}
	w.Put(objects...)
	w.Settle()
}

// scale changes the replicas of a Deployment as somebody else does.
func (w *fixture) scale(name string, replicas int32) {
	w.Helper()
	w.edit(name, func(d *appsv1.Deployment) { d.Spec.Replicas = &replicas })
}

// annotate sets annotations of a Deployment, or removes those with an empty value.
func (w *fixture) annotate(name string, pairs ...string) {
	w.Helper()
	w.edit(name, func(d *appsv1.Deployment) {
		if d.Annotations == nil {
			d.Annotations = map[string]string{}
		}
		maps.Copy(d.Annotations, annotated(pairs))
		maps.DeleteFunc(d.Annotations, func(_, value string) bool { return value == "" })
	})
}

func (w *fixture) edit(name string, change func(*appsv1.Deployment)) {
	w.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	d := controllertest.Get[appsv1.Deployment](w.Host, namespace, name)
	change(d)
	w.add(d)
}

// is compares the replicas of a Deployment and its record, such as "0 (3)".
func (w *fixture) is(name, want string) {
	w.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	if got := stateOf(controllertest.Get[appsv1.Deployment](w.Host, namespace, name)); got != want {
		w.Errorf("%s is %s, want %s", name, got, want)
	}
}

func stateOf(d *appsv1.Deployment) string {
	state := fmt.Sprint(ptr.Deref(d.Spec.Replicas, -1))
	if record, ok := d.Annotations[R]; ok {
		state += " (" + record + ")"
	}
	return state
}

// toldOf compares the reasons of the Events since the last time, and what they are about.
func (w *fixture) toldOf(want ...string) {
	w.Helper()
	all := w.Events()
	var got []string
	for _, text := range all[w.told:] {
		fields := strings.Fields(text)
		got = append(got, fields[1]+" "+strings.TrimSuffix(fields[2], ":"))
	}
	w.told = len(all)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		w.Errorf("Events %q, want %q", got, want)
	}
}

// records returns the records that were written, in order.
func (w *fixture) records() (records []string) {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, body := range w.bodies {
		var sent metav1.PartialObjectMetadata
		if err := json.Unmarshal([]byte(body), &sent); err != nil {
			w.Fatal(err)
		}
		records = append(records, sent.Annotations[R])
	}
	w.bodies = nil
	return records
}

// metric compares a metric.
func (w *fixture) metric(want float64, name string, labels ...string) {
	w.Helper()
	if got := w.Metric("quartermaster_scale_schedule_"+name, labels...); got != want {
		w.Errorf("%s is %v, want %v", name, got, want)
	}
}

// repeated returns how often an Event was told. Events with the same text are one object.
func (w *fixture) repeated(reason string) (n int) {
	for _, e := range controllertest.List[corev1.Event](w.Host) {
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
	return &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: meta(name, annotations...), Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
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
	m := meta(name, annotations...)
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
func (w *fixture) scaledObject() *unstructured.Unstructured {
	w.Helper()
	client, err := dynamic.NewForConfig(w.RESTConfig())
	if err != nil {
		w.Fatal(err)
	}
	resource := schema.GroupVersionResource{Group: "keda.sh", Version: "v1alpha1", Resource: "scaledobjects"}
	u, err := client.Resource(resource).Namespace("shop").Get(w.Context(), "s", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return u
}

func rollout(name string, annotations ...string) *unstructured.Unstructured {
	return customObject("argoproj.io/v1alpha1", "Rollout", name, map[string]any{"replicas": int64(3)}, annotations...)
}
