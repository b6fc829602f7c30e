// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
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

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// references returns a template that refers to sources in every possible way, and to other things.
func references() corev1.PodTemplateSpec {
	named := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	t := pod(readsSecret("db"), reads("app-config"), variableSet(cmVar, h1), variableSet("PLAIN", "x"),
		onTemplate(kAuto, "true", nativeMark, "mark", "example.com/other", "x"))
	t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: named("s")}})
	t.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "cm"}, {Name: "tmp"}, {Name: "both"}}
	t.Spec.InitContainers = []corev1.Container{{Name: "init", VolumeMounts: []corev1.VolumeMount{{Name: "secret"}}, Env: []corev1.EnvVar{
		{Name: "C", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named("c"), Key: "k"}}},
		{Name: "N", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}},
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

func TestWorkloadCachedReadsAsLive(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Annotations: map[string]string{kAuto: "true"}}
	owned := meta
	owned.OwnerReferences = []metav1.OwnerReference{{Kind: "Widget"}, {Kind: "CronJob", UID: "c", Controller: ptr.To(true)}}
	full := policy.Content{
		Template: map[string]string{kAuto: "true", nativeMark: "mark"},
		Inits:    []policy.Container{{Name: "init", Mounts: []string{"secret"}, Env: []policy.SourceKey{{Type: policy.ConfigMap, Name: "c"}, {Type: policy.Secret, Name: ""}}}},
		Containers: []policy.Container{{Name: "web", Mounts: []string{"cm", "both"}, Vars: []string{cmVar},
			Env: []policy.SourceKey{{Type: policy.Secret, Name: "db"}, {Type: policy.ConfigMap, Name: "app-config"}, {Type: policy.Secret, Name: "s"}}}},
		Volumes: map[string][]policy.SourceKey{"cm": {{Type: policy.ConfigMap, Name: "files"}}, "secret": {{Type: policy.Secret, Name: "certs"}}, "both": {{Type: policy.ConfigMap, Name: "p"}, {Type: policy.Secret, Name: "q"}}},
	}
	with := func(change func(*policy.Content)) policy.Content {
		c := full
		change(&c)
		return c
	}
	template := references()
	referring := rollout(t, &template, kAuto, "true")
	referring.Object["spec"].(map[string]any)["workloadRef"] = map[string]any{"kind": "Deployment", "name": "other"}
	cases := map[string]struct {
		obj  runtime.Object
		want policy.Content
	}{
		"Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Template: references()}}, full},
		"paused Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Paused: true, Template: references()}},
			with(func(c *policy.Content) { c.Paused = true })},
		"StatefulSet": {&appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Template: references()}}, full},
		"DaemonSet":   {&appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Template: references()}}, full},
		"suspended CronJob": {&batchv1.CronJob{ObjectMeta: meta, Spec: batchv1.CronJobSpec{Suspend: ptr.To(true),
			JobTemplate: batchv1.JobTemplateSpec{ObjectMeta: meta, Spec: batchv1.JobSpec{Template: references()}}}},
			with(func(c *policy.Content) { c.Suspended = true })},
		"a CronJob that forbids two Jobs at once": {&batchv1.CronJob{Spec: batchv1.CronJobSpec{
			ConcurrencyPolicy: batchv1.ForbidConcurrent, JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: template}}}},
			with(func(c *policy.Content) { c.Forbids = true })},
		"Job of a CronJob": {&batchv1.Job{ObjectMeta: owned, Spec: batchv1.JobSpec{Template: references()}},
			with(func(c *policy.Content) { c.CronJob, c.Elsewhere = "c", true })},
		"Rollout": {rollout(t, &template, kAuto, "true"), full},
		"Rollout that refers to another workload": {referring, with(func(c *policy.Content) { c.Elsewhere = true })},
		"Rollout without a template":              {rollout(t, nil, kAuto, "true"), policy.Content{}},
	}
	cfg := NewConfig()
	cfg.Compat = true
	reduce := reduceAs(Name, WorkloadAnnotations(cfg), WorkloadDigest(cfg), "")
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			before := tc.obj.DeepCopyObject()
			reduced, err := reduce(tc.obj)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, tc.obj); diff != "" {
				t.Errorf("the object has changed (-before +after):\n%s", diff)
			}
			cached, err := policy.NewWorkload(&policy.Kind{Name: "Kind"}, reduced, Name)
			if err != nil {
				t.Fatal(err)
			}
			cached.Since, cached.Asks = "", 0 // which only the cache has
			if diff := cmp.Diff(tc.want, cached.Content); diff != "" {
				t.Errorf("cached (-want +got):\n%s", diff)
			}
			live, err := policy.NewWorkload(&policy.Kind{Name: "Kind"}, tc.obj, Name)
			if err != nil {
				t.Fatal(err)
			}
			delete(live.Template, "example.com/other") // the only other difference
			if diff := cmp.Diff(live, cached, cmpopts.IgnoreUnexported(policy.Workload{})); diff != "" {
				t.Errorf("live and cached differ (-live +cached):\n%s", diff)
			}
		})
	}
}

func TestWorkloadUnreadableIsItsOwnError(t *testing.T) {
	broken := func(template any) *unstructured.Unstructured {
		r := rollout(t, nil)
		r.Object["spec"].(map[string]any)["template"] = template
		return r
	}
	cases := map[string]runtime.Object{
		"a template of another form":       broken(map[string]any{"spec": "none"}),
		"a template that is no object":     broken("none"),
		"an object that is not a workload": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}},
	}
	reduce := reduceAs(Name, nil, WorkloadDigest(NewConfig()), "")
	for name, obj := range cases {
		t.Run(name, func(t *testing.T) {
			reduced, err := reduce(obj)
			if err != nil {
				t.Fatal(err)
			}
			_, live := policy.NewWorkload(&policy.Kind{Name: "Rollout"}, obj, Name)
			_, cached := policy.NewWorkload(&policy.Kind{Name: "Rollout"}, reduced, Name)
			if live == nil || cached == nil || live.Error() != cached.Error() || !strings.Contains(live.Error(), "Rollout/shop/web: ") {
				t.Errorf("live %v, cached %v", live, cached)
			}
		})
	}
}
