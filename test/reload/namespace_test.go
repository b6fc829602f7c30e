// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// testNamespace is the namespace of a test. Its methods end the test on an error. They name objects
// RESOURCE/NAME.
type testNamespace struct {
	t         *testing.T
	namespace string
}

func newTestNamespace(t *testing.T, labels map[string]string) testNamespace {
	t.Helper()
	return testNamespace{t, shared.NewNamespace(t.Context(), t, labels)}
}

// forSubtest returns the same namespace for a subtest.
func (s testNamespace) forSubtest(t *testing.T) testNamespace {
	t.Helper()
	return testNamespace{t, s.namespace}
}

func (s testNamespace) client(object string) (dynamic.ResourceInterface, string) {
	s.t.Helper()
	resource, name, ok := strings.Cut(object, "/")
	if !ok {
		s.t.Fatalf("%q is not RESOURCE/NAME", object)
	}
	return shared.Objects.Resource(resourceOf(resource)).Namespace(s.namespace), name
}

// create creates typed objects and unstructured ones.
func (s testNamespace) create(list ...runtime.Object) {
	s.t.Helper()
	for _, o := range list {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		assert.NoError(s.t, err)
		u := &unstructured.Unstructured{Object: content}
		client, _ := s.client(strings.ToLower(u.GetKind()) + "s/")
		if _, err := client.Create(s.t.Context(), u, metav1.CreateOptions{}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// configMap creates a ConfigMap with the content, or gives it this content.
func (s testNamespace) configMap(name, content string) {
	s.t.Helper()
	s.put(newConfigMap(name, content))
}

// secret is configMap for a Secret.
func (s testNamespace) secret(name, content string) { s.t.Helper(); s.put(newSecret(name, content)) }

// put creates a source, or changes its data and keeps the rest.
func (s testNamespace) put(o runtime.Object) {
	s.t.Helper()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	assert.NoError(s.t, err)
	u := &unstructured.Unstructured{Object: content}
	client, _ := s.client(strings.ToLower(u.GetKind()) + "s/")
	_, err = client.Create(s.t.Context(), u, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		var data []byte
		if data, err = json.Marshal(map[string]any{"data": u.Object["data"]}); err == nil {
			_, err = client.Patch(s.t.Context(), u.GetName(), types.MergePatchType, data, metav1.PatchOptions{})
		}
	}
	assert.NoError(s.t, err)
}

// patch sends a merge patch.
func (s testNamespace) patch(object, body string) {
	s.t.Helper()
	client, name := s.client(object)
	if _, err := client.Patch(s.t.Context(), name, types.MergePatchType, []byte(body), metav1.PatchOptions{}); err != nil {
		s.t.Fatalf("patch %s: %v", object, err)
	}
}

// delete deletes an object and waits until it is gone.
func (s testNamespace) delete(object string) {
	s.t.Helper()
	client, name := s.client(object)
	background := metav1.DeletePropagationBackground
	assert.NoError(s.t, client.Delete(s.t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &background}))
	s.eventually(func() error {
		if _, err := client.Get(s.t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%s is still there (%w)", object, err)
		}
		return nil
	})
}

func (s testNamespace) eventually(check func() error) {
	s.t.Helper()
	fleet.Eventually(fleet.Context(s.t), s.t, check)
}

func (s testNamespace) get(object string) *unstructured.Unstructured {
	s.t.Helper()
	client, name := s.client(object)
	o, err := client.Get(s.t.Context(), name, metav1.GetOptions{})
	assert.NoError(s.t, err)
	return o
}

func (s testNamespace) annotation(object, key string) string {
	s.t.Helper()
	return s.get(object).GetAnnotations()[key]
}

// list returns the names of all objects of a resource.
func (s testNamespace) list(resource string) []string {
	s.t.Helper()
	list, err := shared.Objects.Resource(resourceOf(resource)).Namespace(s.namespace).List(s.t.Context(), metav1.ListOptions{})
	assert.NoError(s.t, err)
	var names []string
	for _, o := range list.Items {
		names = append(names, o.GetName())
	}
	return names
}

// countEvents counts the Events about an object.
func (s testNamespace) countEvents(object, reason string) int {
	s.t.Helper()
	_, name := s.client(object)
	list, err := shared.Admin.CoreV1().Events(s.namespace).List(s.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
	assert.NoError(s.t, err)
	n := 0
	for _, e := range list.Items {
		n += max(int(e.Count), 1)
	}
	return n
}

// waitForEvent waits until there are n Events about an object.
func (s testNamespace) waitForEvent(object, reason string, n int) {
	s.t.Helper()
	s.eventually(func() error {
		if got := s.countEvents(object, reason); got != n {
			return fmt.Errorf("%d Events %s on %s, want %d", got, reason, object, n)
		}
		return nil
	})
}

// hash returns the hash of a source, configmap/NAME or secret/NAME, as it is now.
func (s testNamespace) hash(source string) string {
	s.t.Helper()
	typ, name, _ := strings.Cut(source, "/")
	u := s.get(typ + "s/" + name)
	if typ == "secret" {
		var o corev1.Secret
		assert.NoError(s.t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o))
		return hex.EncodeToString(policy.DigestSecret(&o))
	}
	var o corev1.ConfigMap
	assert.NoError(s.t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o))
	return hex.EncodeToString(policy.DigestConfigMap(&o))
}

// waitForState waits until exactly these sources are recorded on an object, as they are now.
func (s testNamespace) waitForState(object string, sources ...string) {
	s.t.Helper()
	want := map[string]string{}
	for _, source := range sources {
		want[source] = s.hash(source)[:16]
	}
	s.waitForStateOf(object, want)
}

// waitForAbsent waits until exactly this source is recorded on an object, as absent.
func (s testNamespace) waitForAbsent(object, source string) {
	s.t.Helper()
	s.waitForStateOf(object, map[string]string{source: ""})
}

func (s testNamespace) waitForStateOf(object string, state map[string]string) {
	s.t.Helper()
	state["workload"] = s.get(object).GetKind() + "/" + s.namespace + object[strings.Index(object, "/"):]
	s.eventually(func() error {
		if got := fleet.ParseState(s.annotation(object, fleet.StateAnnotation)); !maps.Equal(got, state) {
			return fmt.Errorf("state of %s is %v, want %v", object, got, state)
		}
		return nil
	})
}

// waitForController waits until kube-controller-manager has written what it writes of a new workload
// without replicas. A patch that is under way meanwhile would meet a conflict and be decided on again.
func (s testNamespace) waitForController(object string) {
	s.t.Helper()
	s.eventually(func() error {
		o := s.get(object)
		if observed, _, _ := unstructured.NestedInt64(o.Object, "status", "observedGeneration"); observed != o.GetGeneration() {
			return fmt.Errorf("the controller of %s has seen generation %d of %d", object, observed, o.GetGeneration())
		}
		return nil
	})
}

// waitForMark waits until the pod template of an object carries the mark of the source as it is
// now.
func (s testNamespace) waitForMark(object, source string) {
	s.t.Helper()
	want := s.hash(source)
	s.eventually(func() error {
		got := marks(s.template(object))
		if got[variableName(source)] != want && got[source] != want {
			return fmt.Errorf("marks of %s are %v, want %s of %s", object, got, want, source)
		}
		return nil
	})
}

func (s testNamespace) template(object string) corev1.PodTemplateSpec {
	s.t.Helper()
	var o struct {
		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	raw, err := s.get(object).MarshalJSON()
	if err == nil {
		err = json.Unmarshal(raw, &o)
	}
	assert.NoError(s.t, err)
	return o.Spec.Template
}

// rollouts waits until every version is known, and returns the changes of an object's template that
// were not made by the tests. Read the log before.
func (s testNamespace) rollouts(object string) []judge.Template {
	s.t.Helper()
	client, name := s.client(object)
	resource, _, _ := strings.Cut(object, "/")
	full := objectName(resource, s.namespace, name)
	if o, err := client.Get(s.t.Context(), name, metav1.GetOptions{}); err == nil {
		revision, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
		assert.NoError(s.t, err)
		s.eventually(func() error {
			if !rollouts.Knows(full, revision) {
				return fmt.Errorf("the watch has not shown revision %d of %s", revision, full)
			}
			return nil
		})
	} else if !apierrors.IsNotFound(err) {
		s.t.Fatal(err)
	}
	var list []judge.Template
	for _, v := range rollouts.Find(full) {
		if v.Writer != admin && v.Writer != "kubectl" {
			list = append(list, v)
		}
	}
	return list
}

// countRollouts returns the numbers of rollouts in the namespace, without objects that had none. Read the
// log before.
func (s testNamespace) countRollouts() map[string]int {
	s.t.Helper()
	got := map[string]int{}
	for _, full := range rollouts.Objects() {
		parts := strings.SplitN(full, "/", 3)
		if parts[1] != s.namespace {
			continue
		}
		object := parts[0] + "/" + parts[2]
		if n := len(s.rollouts(object)); n > 0 {
			got[object] = n
		}
	}
	return got
}
