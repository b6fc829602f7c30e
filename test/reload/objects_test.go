// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/json"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// Annotations of stakater/Reloader.
const (
	auto            = "reloader.stakater.com/auto"
	search          = "reloader.stakater.com/search"
	match           = "reloader.stakater.com/match"
	configMapReload = "configmap.reloader.stakater.com/reload"
	secretReload    = "secret.reloader.stakater.com/reload"
	pausePeriod     = "deployment.reloader.stakater.com/pause-period"
	pausedAt        = "deployment.reloader.stakater.com/paused-at"
	lastReloaded    = "reloader.stakater.com/last-reloaded-from"

	nativeMark = "quartermaster.dev/reloaded-from"
)

// annotated returns annotations from keys and values.
func annotated(pairs ...string) map[string]string {
	a := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		a[pairs[i]] = pairs[i+1]
	}
	return a
}

func newConfigMap(name, content string) *corev1.ConfigMap {
	return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"content": content}}
}

func newSecret(name, content string) *corev1.Secret {
	return &corev1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"content": []byte(content)}}
}

// option changes a part of a pod template.
type option func(*corev1.PodTemplateSpec)

// uses makes the first container take its environment from configmap/NAME or secret/NAME.
func uses(source string) option {
	typ, name, _ := strings.Cut(source, "/")
	return func(t *corev1.PodTemplateSpec) {
		envFrom := corev1.EnvFromSource{}
		if typ == "secret" {
			envFrom.SecretRef = &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}
		} else {
			envFrom.ConfigMapRef = &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}
		}
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, envFrom)
	}
}

// mounts mounts configmap/NAME or secret/NAME as part of a projected volume, in the init container
// or the last container.
func mounts(source string, inInit bool) option {
	typ, name, _ := strings.Cut(source, "/")
	return func(t *corev1.PodTemplateSpec) {
		part := corev1.VolumeProjection{}
		if typ == "secret" {
			part.Secret = &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: name}}
		} else {
			part.ConfigMap = &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: name}}
		}
		volume := "of-" + name
		t.Spec.Volumes = append(t.Spec.Volumes, corev1.Volume{Name: volume, VolumeSource: corev1.VolumeSource{
			Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{part}}}})
		if inInit {
			t.Spec.InitContainers = append(t.Spec.InitContainers, corev1.Container{Name: "init", Image: "init"})
		}
		containers := t.Spec.Containers
		if inInit {
			containers = t.Spec.InitContainers
		}
		c := &containers[len(containers)-1]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: "/" + volume})
	}
}

func sidecar(t *corev1.PodTemplateSpec) {
	t.Spec.Containers = append(t.Spec.Containers, corev1.Container{Name: "sidecar", Image: "sidecar"})
}

func newTemplate(app string, options []option) corev1.PodTemplateSpec {
	t := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}}}
	t.Spec.Containers = []corev1.Container{{Name: "web", Image: "web"}}
	for _, o := range options {
		o(&t)
	}
	return t
}

func newMeta(kind, name string, annotations map[string]string) (metav1.TypeMeta, metav1.ObjectMeta) {
	group := "apps/v1"
	if strings.HasSuffix(kind, "Job") {
		group = "batch/v1"
	}
	return metav1.TypeMeta{APIVersion: group, Kind: kind}, metav1.ObjectMeta{Name: name, Annotations: annotations}
}

func selects(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

// The workloads have no Pods, since nobody would run them.

func newDeployment(name string, annotations map[string]string, options ...option) *appsv1.Deployment {
	d := &appsv1.Deployment{}
	d.TypeMeta, d.ObjectMeta = newMeta("Deployment", name, annotations)
	d.Spec = appsv1.DeploymentSpec{Replicas: ptr.To[int32](0), Selector: selects(name), Template: newTemplate(name, options)}
	return d
}

func newStatefulSet(name string, annotations map[string]string, options ...option) *appsv1.StatefulSet {
	d := &appsv1.StatefulSet{}
	d.TypeMeta, d.ObjectMeta = newMeta("StatefulSet", name, annotations)
	d.Spec = appsv1.StatefulSetSpec{Replicas: ptr.To[int32](0), Selector: selects(name), Template: newTemplate(name, options)}
	return d
}

func newDaemonSet(name string, annotations map[string]string, options ...option) *appsv1.DaemonSet {
	d := &appsv1.DaemonSet{}
	d.TypeMeta, d.ObjectMeta = newMeta("DaemonSet", name, annotations)
	d.Spec = appsv1.DaemonSetSpec{Selector: selects(name), Template: newTemplate(name, options)}
	return d
}

func newJob(name string, annotations map[string]string, options ...option) *batchv1.Job {
	j := &batchv1.Job{}
	j.TypeMeta, j.ObjectMeta = newMeta("Job", name, annotations)
	j.Spec = batchv1.JobSpec{Parallelism: ptr.To[int32](0), Template: newTemplate(name, options)}
	j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	return j
}

// newCronJob returns a CronJob that is due once a year.
func newCronJob(name string, annotations map[string]string, options ...option) *batchv1.CronJob {
	c := &batchv1.CronJob{}
	c.TypeMeta, c.ObjectMeta = newMeta("CronJob", name, annotations)
	c.Spec = batchv1.CronJobSpec{Schedule: "0 0 1 1 *", JobTemplate: batchv1.JobTemplateSpec{Spec: newJob(name, nil, options...).Spec}}
	return c
}

// newRollout returns an Argo Rollout with an unknown field.
func newRollout(name string, annotations map[string]string, options ...option) *unstructured.Unstructured {
	d := newDeployment(name, annotations, options...)
	content, _ := runtime.DefaultUnstructuredConverter.ToUnstructured(d) // of a built-in type
	u := &unstructured.Unstructured{Object: content}
	u.SetAPIVersion("argoproj.io/v1alpha1")
	u.SetKind("Rollout")
	// The parent is a map.
	_ = unstructured.SetNestedField(u.Object, "25", "spec", "strategy", "canary", "unknown")
	return u
}

// variableName returns the variable with which stakater/Reloader marks configmap/NAME or secret/NAME.
// The names here contain no special characters.
func variableName(source string) string {
	typ, name, _ := strings.Cut(source, "/")
	return "STAKATER_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_")) + "_" + strings.ToUpper(typ)
}

// marks returns the hashes with which a template is marked: by variable, or by configmap/NAME or
// secret/NAME.
func marks(t corev1.PodTemplateSpec) map[string]string {
	m := map[string]string{}
	for _, c := range t.Spec.Containers {
		for _, e := range c.Env {
			if strings.HasPrefix(e.Name, "STAKATER_") {
				m[e.Name] = e.Value
			}
		}
	}
	for _, key := range []string{lastReloaded, nativeMark} {
		var mark struct{ Type, Name, Hash string }
		if err := json.Unmarshal([]byte(t.Annotations[key]), &mark); err == nil {
			m[strings.ToLower(mark.Type)+"/"+mark.Name] = mark.Hash
		}
	}
	return m
}

// reloadedFrom returns the annotation that stakater/Reloader writes to a template.
func reloadedFrom(namespace, source, hash string) string {
	typ, name, _ := strings.Cut(source, "/")
	return fmt.Sprintf(`{"type":%q,"name":%q,"namespace":%q,"hash":%q,"containerRefs":["web"],"observedAt":1700000000}`,
		strings.ToUpper(typ), name, namespace, hash)
}
