// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package widget

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	appsv1ac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	typedappsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/examples/greeter"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// fixture is an API server with the custom resource widgets, and a namespace in it.
type fixture struct {
	*testing.T
	ctx        context.Context
	widgets    dynamic.ResourceInterface
	configMaps typedcorev1.ConfigMapInterface
	secrets    typedcorev1.SecretInterface
	// deployments have a schema with lists, and a controller in the real one.
	deployments typedappsv1.DeploymentInterface
}

func newFixture(ctx context.Context, t *testing.T, config *rest.Config, namespace string) fixture {
	t.Helper()
	kube, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	objects, err := dynamic.NewForConfig(config)
	assert.NoError(t, err)
	return fixture{t, ctx, objects.Resource(widgets).Namespace(namespace), kube.CoreV1().ConfigMaps(namespace),
		kube.CoreV1().Secrets(namespace), kube.AppsV1().Deployments(namespace)}
}

// TestSemanticsOfTheTestKitsAPIServer runs each case against both, so that neither can differ
// from what controllers are tested with.
func TestSemanticsOfTheTestKitsAPIServer(t *testing.T) {
	for name, do := range semantics() {
		t.Run(name, func(t *testing.T) {
			t.Run("kube-apiserver", func(t *testing.T) {
				ctx := fleet.Within(t.Context(), t, fleet.Patience)
				do(newFixture(ctx, t, shared.AdminConfig(), shared.NewNamespace(ctx, t, nil)))
			})
			t.Run("test kit", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := controllertest.NewHost(t, greeter.Entry(), controllertest.ReadYAML(t, widgetCRD)...)
					do(newFixture(t.Context(), t, h.RESTConfig(), "shop"))
				})
			})
		})
	}
}

// TestKitRunsAManagerOnARealAPIServer has a ConfigMap greeted from within the test's process.
func TestKitRunsAManagerOnARealAPIServer(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, fleet.Patience)
	f := newFixture(ctx, t, shared.AdminConfig(), shared.NewNamespace(ctx, t, nil))
	asks := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{greeter.Annotation: "you"}}}
	if _, err := f.configMaps.Create(ctx, asks, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	controllertest.RunOn(t, shared.AdminConfig(), nil, greeter.Entry())
	fleet.Eventually(ctx, t, func() error {
		greeted, err := f.configMaps.Get(ctx, "a", metav1.GetOptions{})
		if err == nil && greeted.Annotations[greeter.Annotation] != "" {
			err = errors.New("nobody was greeted")
		}
		return err
	})
}

// widget returns a Widget of the name a with the given spec.message.
func (f fixture) widget(message string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": "a"},
		"spec": map[string]any{"image": "nginx", "replicas": int64(1), "message": message},
	}}
}

// createWidget creates widget(message).
func (f fixture) createWidget(message string) *unstructured.Unstructured {
	f.Helper()
	return f.must(f.widgets.Create(f.ctx, f.widget(message), metav1.CreateOptions{}))
}

func (f fixture) get() *unstructured.Unstructured {
	f.Helper()
	return f.must(f.widgets.Get(f.ctx, "a", metav1.GetOptions{}))
}

func (f fixture) update(obj *unstructured.Unstructured) *unstructured.Unstructured {
	f.Helper()
	return f.must(f.widgets.Update(f.ctx, obj, metav1.UpdateOptions{}))
}

// patch merges a patch, by which the object's version changes.
func (f fixture) patch(patch string, subresources ...string) *unstructured.Unstructured {
	f.Helper()
	return f.must(f.widgets.Patch(f.ctx, "a", types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...))
}

func (f fixture) must(obj *unstructured.Unstructured, err error) *unstructured.Unstructured {
	f.Helper()
	assert.NoError(f, err)
	return obj
}

// expect reports an error that is not of the kind that is expected.
func (f fixture) expect(matches func(error) bool, err error) {
	f.Helper()
	if !matches(err) {
		f.Errorf("the error is %v (%s)", err, apierrors.ReasonForError(err))
	}
}

func (f fixture) apply(manager string, force bool, data map[string]string) (*corev1.ConfigMap, error) {
	return f.configMaps.Apply(f.ctx, corev1ac.ConfigMap("a", "").WithData(data), metav1.ApplyOptions{FieldManager: manager, Force: force})
}

func message(obj *unstructured.Unstructured) string {
	text, _, _ := unstructured.NestedString(obj.Object, "spec", "message")
	return text
}

func setMessage(obj *unstructured.Unstructured, text string) {
	_ = unstructured.SetNestedField(obj.Object, text, "spec", "message")
}

func ready(obj *unstructured.Unstructured) int64 {
	n, _, _ := unstructured.NestedInt64(obj.Object, "status", "readyReplicas")
	return n
}

func setReady(obj *unstructured.Unstructured, n int64) {
	_ = unstructured.SetNestedField(obj.Object, n, "status", "readyReplicas")
}

// semantics returns what controllers rely on.
func semantics() map[string]func(f fixture) {
	all := creations()
	for _, others := range []map[string]func(f fixture){updates(), patches(), applies(), deletions(), reads()} {
		maps.Copy(all, others)
	}
	return all
}

func creations() map[string]func(f fixture) {
	return map[string]func(f fixture){
		"a creation drops the status and sets UID, version, generation and time": func(f fixture) {
			obj := f.widget("red")
			setReady(obj, 3)
			got := f.must(f.widgets.Create(f.ctx, obj, metav1.CreateOptions{}))
			at := got.GetCreationTimestamp()
			if got.GetUID() == "" || got.GetResourceVersion() == "" || got.GetGeneration() != 1 || at.IsZero() || ready(got) != 0 {
				f.Error(got)
			}
		},
		"a second creation is refused": func(f fixture) {
			f.createWidget("")
			_, err := f.widgets.Create(f.ctx, f.widget(""), metav1.CreateOptions{})
			f.expect(apierrors.IsAlreadyExists, err)
		},
		"a creation without a name is refused": func(f fixture) {
			obj := f.widget("")
			obj.SetName("")
			_, err := f.widgets.Create(f.ctx, obj, metav1.CreateOptions{})
			f.expect(apierrors.IsInvalid, err)
		},
		"generateName makes a new name at each creation": func(f fixture) {
			var names []string
			for range 3 {
				obj := f.widget("")
				obj.SetName("")
				obj.SetGenerateName("made-")
				name := f.must(f.widgets.Create(f.ctx, obj, metav1.CreateOptions{})).GetName()
				if !strings.HasPrefix(name, "made-") || len(name) != len("made-")+5 || slices.Contains(names, name) {
					f.Errorf("the name is %q after %q", name, names)
				}
				names = append(names, name)
			}
		},
		"a creation with a resourceVersion is refused": func(f fixture) {
			obj := f.widget("")
			obj.SetResourceVersion("1")
			_, err := f.widgets.Create(f.ctx, obj, metav1.CreateOptions{})
			if err == nil || !strings.Contains(err.Error(), "resourceVersion should not be set on objects to be created") {
				f.Errorf("the error is %v", err)
			}
		},
		"a creation in another namespace than that of the object is refused": func(f fixture) {
			obj := f.widget("")
			obj.SetNamespace("elsewhere")
			_, err := f.widgets.Create(f.ctx, obj, metav1.CreateOptions{})
			f.expect(apierrors.IsBadRequest, err)
		},
		"a dry run stores nothing": func(f fixture) {
			f.must(f.widgets.Create(f.ctx, f.widget(""), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}))
			_, err := f.widgets.Get(f.ctx, "a", metav1.GetOptions{})
			f.expect(apierrors.IsNotFound, err)
		},
		"stringData of a Secret becomes data": func(f fixture) {
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "v"}}
			got, err := f.secrets.Create(f.ctx, secret, metav1.CreateOptions{})
			if err != nil || string(got.Data["k"]) != "v" || len(got.StringData) > 0 || got.Type != corev1.SecretTypeOpaque {
				f.Error(got, err)
			}
		},
	}
}

func updates() map[string]func(f fixture) {
	return map[string]func(f fixture){
		"an update keeps the status, and raises the generation with the spec": func(f fixture) {
			obj := f.createWidget("red")
			setReady(obj, 3)
			obj = f.must(f.widgets.UpdateStatus(f.ctx, obj, metav1.UpdateOptions{}))
			if obj.GetGeneration() != 1 || ready(obj) != 3 {
				f.Errorf("after the update of the status: %v", obj)
			}
			setReady(obj, 4)
			setMessage(obj, "blue")
			if obj = f.update(obj); obj.GetGeneration() != 2 || ready(obj) != 3 || message(obj) != "blue" {
				f.Errorf("after the update: %v", obj)
			}
		},
		"an update of the metadata leaves the generation": func(f fixture) {
			obj := f.createWidget("red")
			obj.SetLabels(map[string]string{"x": "y"})
			obj.SetFinalizers([]string{"example.com/f"})
			if got := f.update(obj); got.GetGeneration() != 1 || got.GetLabels()["x"] != "y" || len(got.GetFinalizers()) != 1 {
				f.Error(got)
			}
			f.patch(`{"metadata":{"finalizers":null}}`) // so that the namespace can go
		},
		"an update of the status changes neither spec nor metadata": func(f fixture) {
			obj := f.createWidget("red")
			setMessage(obj, "blue")
			obj.SetLabels(map[string]string{"x": "y"})
			if obj = f.must(f.widgets.UpdateStatus(f.ctx, obj, metav1.UpdateOptions{})); message(obj) != "red" || len(obj.GetLabels()) > 0 {
				f.Error(obj)
			}
		},
		"an update of an old version is a conflict, and so is one of the status": func(f fixture) {
			old := f.createWidget("red")
			f.patch(`{"spec":{"message":"blue"}}`)
			_, err := f.widgets.Update(f.ctx, old.DeepCopy(), metav1.UpdateOptions{})
			f.expect(apierrors.IsConflict, err)
			setReady(old, 1)
			_, err = f.widgets.UpdateStatus(f.ctx, old, metav1.UpdateOptions{})
			f.expect(apierrors.IsConflict, err)
		},
		"an update of another UID is a conflict": func(f fixture) {
			obj := f.createWidget("red")
			obj.SetUID("00000000-0000-4000-8000-00000000000f")
			_, err := f.widgets.Update(f.ctx, obj, metav1.UpdateOptions{})
			f.expect(apierrors.IsConflict, err)
		},
		"an update of a custom resource without a version is invalid": func(f fixture) {
			obj := f.createWidget("")
			obj.SetResourceVersion("")
			_, err := f.widgets.Update(f.ctx, obj, metav1.UpdateOptions{})
			f.expect(apierrors.IsInvalid, err)
		},
		"an update of a ConfigMap without a version replaces any": func(f fixture) {
			configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Data: map[string]string{"k": "v"}}
			if _, err := f.configMaps.Create(f.ctx, configMap.DeepCopy(), metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			configMap.Data["k"] = "w"
			if got, err := f.configMaps.Update(f.ctx, configMap, metav1.UpdateOptions{}); err != nil || got.Data["k"] != "w" {
				f.Error(got, err)
			}
		},
		"an update that changes nothing keeps the version": func(f fixture) {
			obj := f.createWidget("red")
			if unchanged := f.update(obj.DeepCopy()); unchanged.GetResourceVersion() != obj.GetResourceVersion() {
				f.Errorf("version %s, then %s", obj.GetResourceVersion(), unchanged.GetResourceVersion())
			}
		},
		"an update of what is not there is not found": func(f fixture) {
			obj := f.createWidget("red")
			assert.NoError(f, f.widgets.Delete(f.ctx, "a", metav1.DeleteOptions{}))
			_, err := f.widgets.Update(f.ctx, obj, metav1.UpdateOptions{})
			f.expect(apierrors.IsNotFound, err)
			_, err = f.widgets.UpdateStatus(f.ctx, obj, metav1.UpdateOptions{})
			f.expect(apierrors.IsNotFound, err)
		},
	}
}

func patches() map[string]func(f fixture) {
	return map[string]func(f fixture){
		"a merge patch with an old version is a conflict": func(f fixture) {
			old := f.createWidget("").GetResourceVersion()
			f.patch(`{"spec":{"message":"blue"}}`)
			_, err := f.widgets.Patch(f.ctx, "a", types.MergePatchType,
				[]byte(`{"metadata":{"resourceVersion":"`+old+`"},"spec":{"message":"green"}}`), metav1.PatchOptions{})
			f.expect(apierrors.IsConflict, err)
		},
		"a merge patch of the status changes that only": func(f fixture) {
			f.createWidget("red")
			got := f.patch(`{"spec":{"message":"blue"},"status":{"readyReplicas":2}}`, "status")
			if message(got) != "red" || ready(got) != 2 || got.GetGeneration() != 1 {
				f.Error(got)
			}
			got = f.patch(`{"spec":{"message":"blue"},"status":{"readyReplicas":3}}`)
			if message(got) != "blue" || ready(got) != 2 || got.GetGeneration() != 2 {
				f.Error(got)
			}
		},
		"a patch that changes nothing keeps the version": func(f fixture) {
			obj := f.createWidget("red")
			if unchanged := f.patch(`{"spec":{"message":"red"}}`); unchanged.GetResourceVersion() != obj.GetResourceVersion() {
				f.Errorf("version %s, then %s", obj.GetResourceVersion(), unchanged.GetResourceVersion())
			}
		},
		"a JSON patch whose test fails is invalid": func(f fixture) {
			f.createWidget("red")
			_, err := f.widgets.Patch(f.ctx, "a", types.JSONPatchType, []byte(`[{"op":"test","path":"/spec/message","value":"blue"}]`), metav1.PatchOptions{})
			f.expect(apierrors.IsInvalid, err)
		},
		"a custom resource has no strategic merge patch": func(f fixture) {
			f.createWidget("")
			_, err := f.widgets.Patch(f.ctx, "a", types.StrategicMergePatchType, []byte(`{}`), metav1.PatchOptions{})
			f.expect(apierrors.IsUnsupportedMediaType, err)
		},
		"a patch of what is not there is not found": func(f fixture) {
			_, err := f.widgets.Patch(f.ctx, "a", types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
			f.expect(apierrors.IsNotFound, err)
		},
	}
}

func applies() map[string]func(f fixture) {
	return map[string]func(f fixture){
		"an apply creates, and a second one changes nothing": func(f fixture) {
			first, err := f.apply("m", false, map[string]string{"k": "v"})
			assert.NoError(f, err)
			second, err := f.apply("m", false, map[string]string{"k": "v"})
			if err != nil || first.ResourceVersion != second.ResourceVersion || second.Data["k"] != "v" {
				f.Error(first, second, err)
			}
		},
		"an apply removes what it no longer names, and leaves what others wrote": func(f fixture) {
			if _, err := f.apply("m", false, map[string]string{"mine": "1", "old": "1"}); err != nil {
				f.Fatal(err)
			}
			_, err := f.configMaps.Patch(f.ctx, "a", types.MergePatchType, []byte(`{"data":{"theirs":"2"}}`), metav1.PatchOptions{FieldManager: "other"})
			assert.NoError(f, err)
			got, err := f.apply("m", false, map[string]string{"mine": "1"})
			if err != nil || len(got.Data) != 2 || got.Data["theirs"] != "2" {
				f.Error(got, err)
			}
		},
		"an apply of another's field is a conflict unless it is forced": func(f fixture) {
			if _, err := f.apply("m", false, map[string]string{"k": "v"}); err != nil {
				f.Fatal(err)
			}
			_, err := f.apply("other", false, map[string]string{"k": "w"})
			f.expect(apierrors.IsConflict, err)
			if got, err := f.apply("other", true, map[string]string{"k": "w"}); err != nil || got.Data["k"] != "w" {
				f.Error(got, err)
			}
		},
		"an apply merges the containers of a Deployment by their names, and raises its generation": func(f fixture) {
			config := func(name string, replicas int32) *appsv1ac.DeploymentApplyConfiguration {
				labels := map[string]string{"x": "y"}
				pod := corev1ac.PodSpec().WithContainers(corev1ac.Container().WithName(name).WithImage("i"))
				return appsv1ac.Deployment("a", "").WithSpec(appsv1ac.DeploymentSpec().WithReplicas(replicas).WithPaused(true).
					WithSelector(metav1ac.LabelSelector().WithMatchLabels(labels)).
					WithTemplate(corev1ac.PodTemplateSpec().WithLabels(labels).WithSpec(pod)))
			}
			if _, err := f.deployments.Apply(f.ctx, config("mine", 0), metav1.ApplyOptions{FieldManager: "m"}); err != nil {
				f.Fatal(err)
			}
			_, err := f.deployments.Apply(f.ctx, config("theirs", 1), metav1.ApplyOptions{FieldManager: "other"})
			f.expect(apierrors.IsConflict, err)
			got, err := f.deployments.Apply(f.ctx, config("theirs", 1), metav1.ApplyOptions{FieldManager: "other", Force: true})
			if err != nil || *got.Spec.Replicas != 1 || len(got.Spec.Template.Spec.Containers) != 2 || got.Generation != 2 {
				f.Error(got, err)
			}
		},
		"an apply of the status changes that only, and a forced one takes it over": func(f fixture) {
			f.createWidget("red")
			status := f.widget("blue")
			setReady(status, 2)
			got := f.must(f.widgets.ApplyStatus(f.ctx, "a", status, metav1.ApplyOptions{FieldManager: "m", Force: true}))
			if message(got) != "red" || ready(got) != 2 || got.GetGeneration() != 1 {
				f.Error(got)
			}
		},
		"an apply without a field manager is refused": func(f fixture) {
			_, err := f.apply("", true, map[string]string{"k": "v"})
			if err == nil {
				f.Error("accepted")
			}
		},
	}
}

func deletions() map[string]func(f fixture) {
	remove := func(f fixture, p *metav1.Preconditions) error {
		return f.widgets.Delete(f.ctx, "a", metav1.DeleteOptions{Preconditions: p})
	}
	return map[string]func(f fixture){
		"an object is not found after its deletion": func(f fixture) {
			f.createWidget("")
			assert.NoError(f, remove(f, nil))
			_, err := f.widgets.Get(f.ctx, "a", metav1.GetOptions{})
			f.expect(apierrors.IsNotFound, err)
			f.expect(apierrors.IsNotFound, remove(f, nil))
		},
		"an object of the same name has another UID": func(f fixture) {
			first := f.createWidget("").GetUID()
			assert.NoError(f, remove(f, nil))
			if second := f.createWidget("").GetUID(); second == first {
				f.Errorf("both have %s", first)
			}
		},
		"an object with a finalizer goes when that is removed": func(f fixture) {
			obj := f.createWidget("")
			obj.SetFinalizers([]string{"example.com/f"})
			f.update(obj)
			for range 2 { // the second changes nothing
				assert.NoError(f, remove(f, nil))
				if obj = f.get(); obj.GetDeletionTimestamp() == nil || obj.GetGeneration() != 2 || ptr.Deref(obj.GetDeletionGracePeriodSeconds(), -1) != 0 {
					f.Fatalf("not marked: %v", obj)
				}
			}
			extended := obj.DeepCopy()
			extended.SetFinalizers([]string{"example.com/f", "example.com/g"})
			_, err := f.widgets.Update(f.ctx, extended, metav1.UpdateOptions{})
			f.expect(apierrors.IsInvalid, err)
			restored := obj.DeepCopy()
			restored.SetDeletionTimestamp(nil)
			if got := f.update(restored); got.GetDeletionTimestamp() == nil {
				f.Error("an update takes the deletion back")
			}
			obj = f.get()
			obj.SetFinalizers(nil)
			f.update(obj)
			_, err = f.widgets.Get(f.ctx, "a", metav1.GetOptions{})
			f.expect(apierrors.IsNotFound, err)
		},
		"a deletion of another UID is a conflict": func(f fixture) {
			obj := f.createWidget("")
			f.expect(apierrors.IsConflict, remove(f, metav1.NewUIDPreconditions("other")))
			if err := remove(f, metav1.NewUIDPreconditions(string(obj.GetUID()))); err != nil {
				f.Error(err)
			}
		},
		"a deletion of another version is a conflict": func(f fixture) {
			old := f.createWidget("")
			f.patch(`{"spec":{"message":"blue"}}`)
			f.expect(apierrors.IsConflict, remove(f, &metav1.Preconditions{UID: ptr.To(old.GetUID()), ResourceVersion: ptr.To(old.GetResourceVersion())}))
			if err := remove(f, &metav1.Preconditions{UID: ptr.To(old.GetUID()), ResourceVersion: ptr.To(f.get().GetResourceVersion())}); err != nil {
				f.Error(err)
			}
		},
		"a deletion as a dry run deletes nothing": func(f fixture) {
			f.createWidget("")
			assert.NoError(f, f.widgets.Delete(f.ctx, "a", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}))
			f.get()
		},
		"a deletion of a collection takes what the selector selects": func(f fixture) {
			f.createWidget("")
			f.patch(`{"metadata":{"labels":{"x":"y"}}}`)
			for _, selector := range []string{"x=z", "x=y"} {
				assert.NoError(f, f.widgets.DeleteCollection(f.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: selector}))
				if _, err := f.widgets.Get(f.ctx, "a", metav1.GetOptions{}); apierrors.IsNotFound(err) != (selector == "x=y") {
					f.Errorf("after the deletion of %s: %v", selector, err)
				}
			}
		},
	}
}

func reads() map[string]func(f fixture) {
	return map[string]func(f fixture){
		"a list selects by label and by field": func(f fixture) {
			for name, secret := range map[string]*corev1.Secret{
				"a": {ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"x": "y"}}, Type: "example.com/t"},
				"b": {Type: "example.com/u"},
			} {
				secret.Name = name
				if _, err := f.secrets.Create(f.ctx, secret, metav1.CreateOptions{}); err != nil {
					f.Fatal(err)
				}
			}
			for _, tc := range []struct {
				opts metav1.ListOptions
				want string
			}{
				{metav1.ListOptions{LabelSelector: "x=y"}, "a"},
				{metav1.ListOptions{LabelSelector: "x in (y,z)"}, "a"},
				{metav1.ListOptions{LabelSelector: "x"}, "a"},
				{metav1.ListOptions{LabelSelector: "!x"}, "b"},
				{metav1.ListOptions{LabelSelector: "x!=y"}, "b"},
				{metav1.ListOptions{FieldSelector: "metadata.name=b"}, "b"},
				{metav1.ListOptions{FieldSelector: "type!=example.com/t"}, "b"},
				{metav1.ListOptions{LabelSelector: "x=y", FieldSelector: "metadata.name=b"}, ""},
			} {
				list, err := f.secrets.List(f.ctx, tc.opts)
				assert.NoError(f, err)
				var names []string
				for _, s := range list.Items {
					names = append(names, s.Name)
				}
				if got := strings.Join(names, " "); got != tc.want {
					f.Errorf("%+v selects %q, want %q", tc.opts, got, tc.want)
				}
			}
			_, err := f.secrets.List(f.ctx, metav1.ListOptions{FieldSelector: "data.k=v"})
			f.expect(apierrors.IsBadRequest, err)
		},
	}
}
