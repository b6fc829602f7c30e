// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

const kAuto = "reloader.stakater.com/auto"

// cached is a workload as the cache keeps it.
type cached struct {
	*metav1.ObjectMeta
	digest []byte
}

func (c cached) Digest(string) []byte { return c.digest }
func (cached) FirstVersion() string   { return "" }
func (cached) CreatedVersion() string { return "" }
func (cached) ChangedVersion() string { return "" }

// reduce returns a workload as the cache keeps it.
func reduce(k *AnnotationKeys, obj runtime.Object) cached {
	m := obj.(metav1.Object)
	kept := maps.Clone(m.GetAnnotations())
	maps.DeleteFunc(kept, func(key, _ string) bool { return !slices.Contains(k.WorkloadKeys(), key) })
	return cached{&metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(),
		ResourceVersion: m.GetResourceVersion(), Annotations: kept}, k.DigestWorkload(obj)}
}

// references returns a template that refers to sources in every possible way, and to other things.
func references() corev1.PodTemplateSpec {
	named := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	fromSecret := func(name string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: named(name), Key: "k"}}
	}
	t := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kAuto: "true", nativeMark: "mark", "example.com/other": "x"}}}
	t.Spec.Containers = []corev1.Container{{
		Name: "web",
		Env: []corev1.EnvVar{{Name: "PASSWORD", ValueFrom: fromSecret("db")}, {Name: "STAKATER_APP_CONFIG_CONFIGMAP", Value: "1"},
			{Name: "PLAIN", Value: "x"}},
		EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: named("app-config")}},
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: named("s")}}},
		VolumeMounts: []corev1.VolumeMount{{Name: "cm"}, {Name: "tmp"}, {Name: "both"}},
	}}
	t.Spec.InitContainers = []corev1.Container{{Name: "init", VolumeMounts: []corev1.VolumeMount{{Name: "secret"}}, Env: []corev1.EnvVar{
		{Name: "C", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named("c"), Key: "k"}}},
		{Name: "N", ValueFrom: fromSecret("")},
		{Name: "F", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}}}
	t.Spec.Volumes = []corev1.Volume{
		{Name: "cm", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: named("files")}}},
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "certs"}}},
		{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "both", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}},
			{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: named("p")}},
			{Secret: &corev1.SecretProjection{LocalObjectReference: named("q")}},
		}}}},
	}
	return t
}

// rollout returns an Argo Rollout with this spec.
func rollout(spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "spec": spec,
		"metadata": map[string]any{"namespace": "shop", "name": "web", "uid": "u", "annotations": map[string]any{kAuto: "true"}}}}
}

func TestWorkloadCachedReadsAsLive(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Annotations: map[string]string{kAuto: "true"}}
	owned := meta
	owned.OwnerReferences = []metav1.OwnerReference{{Kind: "Widget"}, {Kind: "CronJob", UID: "c", Controller: ptr.To(true)}}
	full := func() Content {
		return Content{
			Template: map[string]string{kAuto: "true", nativeMark: "mark"},
			Inits:    []Container{{Name: "init", Mounts: []string{"secret"}, Env: []SourceKey{{ConfigMap, "c"}, {Secret, ""}}}},
			Containers: []Container{{Name: "web", Mounts: []string{"cm", "both"}, Vars: []string{"STAKATER_APP_CONFIG_CONFIGMAP"},
				Env: []SourceKey{{Secret, "db"}, {ConfigMap, "app-config"}, {Secret, "s"}}}},
			Volumes: map[string][]SourceKey{"cm": {{ConfigMap, "files"}}, "secret": {{Secret, "certs"}}, "both": {{ConfigMap, "p"}, {Secret, "q"}}},
		}
	}
	with := func(change func(*Content)) Content {
		c := full()
		change(&c)
		return c
	}
	template := references()
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&template)
	if err != nil {
		t.Fatal(err)
	}
	k := compatKeys()
	for name, tc := range map[string]struct {
		obj  runtime.Object
		want Content
	}{
		"Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Template: references()}}, full()},
		"paused Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Paused: true, Template: references()}},
			with(func(c *Content) { c.Paused = true })},
		"StatefulSet": {&appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Template: references()}}, full()},
		"DaemonSet":   {&appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Template: references()}}, full()},
		"suspended CronJob": {&batchv1.CronJob{ObjectMeta: meta, Spec: batchv1.CronJobSpec{Suspend: ptr.To(true),
			JobTemplate: batchv1.JobTemplateSpec{ObjectMeta: meta, Spec: batchv1.JobSpec{Template: references()}}}},
			with(func(c *Content) { c.Suspended = true })},
		"a CronJob that forbids two Jobs at once": {&batchv1.CronJob{Spec: batchv1.CronJobSpec{
			ConcurrencyPolicy: batchv1.ForbidConcurrent, JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: references()}}}},
			with(func(c *Content) { c.Forbids = true })},
		"Job of a CronJob": {&batchv1.Job{ObjectMeta: owned, Spec: batchv1.JobSpec{Template: references()}},
			with(func(c *Content) { c.CronJob, c.Elsewhere = "c", true })},
		"Rollout": {rollout(map[string]any{"template": object}), full()},
		"Rollout that refers to another workload": {rollout(map[string]any{"template": object, "workloadRef": map[string]any{"kind": "Deployment", "name": "x"}}),
			with(func(c *Content) { c.Elsewhere = true })},
		"Rollout without a template": {rollout(map[string]any{}), Content{}},
	} {
		t.Run(name, func(t *testing.T) {
			before := tc.obj.DeepCopyObject()
			cached, err := NewWorkload(&Kind{Name: "Kind"}, reduce(k, tc.obj), "config-reload")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, tc.obj); diff != "" {
				t.Errorf("the object has changed (-before +after):\n%s", diff)
			}
			cached.Asks = 0 // which only the cache has
			if diff := cmp.Diff(tc.want, cached.Content); diff != "" {
				t.Errorf("cached (-want +got):\n%s", diff)
			}
			live, err := NewWorkload(&Kind{Name: "Kind"}, tc.obj.(metav1.Object), "config-reload")
			if err != nil {
				t.Fatal(err)
			}
			delete(live.Template, "example.com/other") // the only other difference
			if diff := cmp.Diff(live, cached, cmpopts.IgnoreUnexported(Workload{}), cmpopts.IgnoreFields(Workload{}, "Since")); diff != "" {
				t.Errorf("live and cached differ (-live +cached):\n%s", diff)
			}
		})
	}
}

func TestWorkloadUnreadableIsItsOwnError(t *testing.T) {
	for name, obj := range map[string]runtime.Object{
		"a template of another form":       rollout(map[string]any{"template": map[string]any{"spec": "none"}}),
		"a template that is no object":     rollout(map[string]any{"template": "none"}),
		"an object that is not a workload": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, live := NewWorkload(&Kind{Name: "Rollout"}, obj.(metav1.Object), "config-reload")
			_, cached := NewWorkload(&Kind{Name: "Rollout"}, reduce(compatKeys(), obj), "config-reload")
			if live == nil || cached == nil || live.Error() != cached.Error() || !strings.Contains(live.Error(), "Rollout/shop/web: ") {
				t.Errorf("live %v, cached %v", live, cached)
			}
		})
	}
}

// Annotations may be as large as the API server takes.
func TestHugeAnnotationIsRefusedAndNotKept(t *testing.T) {
	k := compatKeys()
	for name, annotation := range map[string][2]string{
		"a list of 256 KiB":       {kCM, strings.Repeat("app-.*,", 256<<10/7)},
		"a native list":           {nativeReload, strings.Repeat("configmap/a*b,", 256<<10/14)},
		"a delay that is no such": {nativeDelay, strings.Repeat("1", 256<<10)},
	} {
		t.Run(name, func(t *testing.T) {
			meta := metav1.ObjectMeta{Annotations: map[string]string{annotation[0]: annotation[1]}}
			d := &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{ObjectMeta: meta}}}
			if kept := len(k.DigestWorkload(d)); kept > 16<<10 {
				t.Errorf("the cache keeps %d bytes of the template", kept)
			}
			w, err := NewWorkload(&Kind{Name: "Deployment"}, d, "config-reload")
			if err != nil {
				t.Fatal(err)
			}
			r := k.Selection(w)
			if len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0].String(), annotation[0]+": ") || len(r.Problems[0].String()) > 600 {
				t.Errorf("problems %v, want one that names the annotation", r.Problems)
			}
			if steps := r.Steps(SourceKey{Name: strings.Repeat("a", 253)}); steps > 1000 {
				t.Errorf("a name takes %d steps", steps)
			}
		})
	}
}
