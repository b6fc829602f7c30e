// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
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

func TestACachedWorkloadReadsAsALiveOne(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Annotations: map[string]string{kAuto: "true"}}
	owned := meta
	owned.OwnerReferences = []metav1.OwnerReference{{Kind: "Widget"}, {Kind: "CronJob", Controller: ptr.To(true)}}
	full := content{
		Template: map[string]string{kAuto: "true", nativeMark: "mark"},
		Inits:    []container{{Name: "init", Mounts: []string{"secret"}, Env: []sourceKey{{configMap, "c"}, {secret, ""}}}},
		Containers: []container{{Name: "web", Mounts: []string{"cm", "both"}, Vars: map[string]string{cmVar: h1},
			Env: []sourceKey{{secret, "db"}, {configMap, "app-config"}, {secret, "s"}}}},
		Volumes: map[string][]sourceKey{"cm": {{configMap, "files"}}, "secret": {{secret, "certs"}}, "both": {{configMap, "p"}, {secret, "q"}}},
	}
	with := func(change func(*content)) content {
		c := full
		change(&c)
		return c
	}
	template := references()
	referring := rollout(t, &template, kAuto, "true")
	referring.Object["spec"].(map[string]any)["workloadRef"] = map[string]any{"kind": "Deployment", "name": "other"}
	cases := map[string]struct {
		obj  runtime.Object
		want content
	}{
		"Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Template: references()}}, full},
		"paused Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Paused: true, Template: references()}},
			with(func(c *content) { c.Paused = true })},
		"StatefulSet": {&appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Template: references()}}, full},
		"DaemonSet":   {&appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Template: references()}}, full},
		"suspended CronJob": {&batchv1.CronJob{ObjectMeta: meta, Spec: batchv1.CronJobSpec{Suspend: ptr.To(true),
			JobTemplate: batchv1.JobTemplateSpec{ObjectMeta: meta, Spec: batchv1.JobSpec{Template: references()}}}},
			with(func(c *content) { c.Suspended = true })},
		"Job of a CronJob": {&batchv1.Job{ObjectMeta: owned, Spec: batchv1.JobSpec{Template: references()}},
			with(func(c *content) { c.OwnedBy = "CronJob" })},
		"Rollout": {rollout(t, &template, kAuto, "true"), full},
		"Rollout that refers to another workload": {referring, with(func(c *content) { c.Elsewhere = true })},
		"Rollout without a template":              {rollout(t, nil, kAuto, "true"), content{}},
	}
	cfg := DefaultConfig()
	cfg.Compat = true
	reduce := controllertest.Reduce(Name, WorkloadAnnotations(cfg), WorkloadDigest(cfg))
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
			cached, err := newWorkload("Kind", reduced)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, cached.content, cmp.AllowUnexported(sourceKey{})); diff != "" {
				t.Errorf("cached (-want +got):\n%s", diff)
			}
			live, err := newWorkload("Kind", tc.obj)
			if err != nil {
				t.Fatal(err)
			}
			delete(live.Template, "example.com/other") // the only other difference
			if diff := cmp.Diff(live, cached, cmp.AllowUnexported(workload{}, workloadKey{}, sourceKey{})); diff != "" {
				t.Errorf("live and cached differ (-live +cached):\n%s", diff)
			}
		})
	}
}

func TestAWorkloadThatCannotBeReadIsAnErrorOfItsOwn(t *testing.T) {
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
	reduce := controllertest.Reduce(Name, nil, WorkloadDigest(DefaultConfig()))
	for name, obj := range cases {
		t.Run(name, func(t *testing.T) {
			reduced, err := reduce(obj)
			if err != nil {
				t.Fatal(err)
			}
			_, live := newWorkload("Rollout", obj)
			_, cached := newWorkload("Rollout", reduced)
			if live == nil || cached == nil || live.Error() != cached.Error() || !strings.Contains(live.Error(), "Rollout/shop/web: ") {
				t.Errorf("live %v, cached %v", live, cached)
			}
		})
	}
}

func TestTheDigestOfATemplateIsCachedIfRolloutsAreAbsorbed(t *testing.T) {
	digests := func(absorb bool, obj runtime.Object) (whole, cached []byte) {
		cfg := DefaultConfig()
		cfg.AbsorbRollouts = absorb
		reduced, err := controllertest.Reduce(Name, nil, WorkloadDigest(cfg))(obj)
		if err != nil {
			t.Fatal(err)
		}
		return cachedDigest("Deployment", obj.(metav1.Object)), cachedDigest("Deployment", reduced.(metav1.Object))
	}
	red, red2 := digests(true, deploy(pod(variableSet("COLOR", "red"))))
	blue, _ := digests(true, deploy(pod(variableSet("COLOR", "blue"))))
	if len(red) == 0 || string(red) != string(red2) || string(red) == string(blue) {
		t.Errorf("red %x, cached %x, blue %x", red, red2, blue)
	}
	template := pod(variableSet("COLOR", "red"))
	if _, ro := digests(true, rollout(t, &template)); string(ro) != string(red) {
		t.Errorf("of a Rollout %x, of a Deployment %x", ro, red)
	}
	if _, none := digests(false, deploy(pod())); none != nil {
		t.Errorf("digest %x", none)
	}
}
