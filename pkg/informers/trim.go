// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// trim returns a new object of the same type with the declared parts of a workload.
func (p *plan) trim(obj runtime.Object) (runtime.Object, error) {
	trimmed, err := p.trimWorkload(obj)
	if err != nil {
		return nil, err
	}
	for i := range p.needs {
		t := p.needs[i].Template
		if t == nil || t.Digest == nil {
			continue
		}
		sum := t.Digest(obj)
		if sum == nil {
			continue
		}
		m, err := meta.Accessor(trimmed)
		if err != nil {
			return nil, err
		}
		annotations := m.GetAnnotations()
		if annotations == nil {
			annotations = make(map[string]string, 1)
		}
		annotations[t.DigestAnnotation] = hex.EncodeToString(sum)
		m.SetAnnotations(annotations)
	}
	return trimmed, nil
}

func (p *plan) trimWorkload(obj runtime.Object) (runtime.Object, error) {
	switch w := obj.(type) {
	case *appsv1.Deployment:
		return &appsv1.Deployment{ObjectMeta: p.trimMeta(w),
			Spec: appsv1.DeploymentSpec{Paused: w.Spec.Paused, Template: p.trimTemplate(&w.Spec.Template)}}, nil
	case *appsv1.StatefulSet:
		return &appsv1.StatefulSet{ObjectMeta: p.trimMeta(w),
			Spec: appsv1.StatefulSetSpec{Template: p.trimTemplate(&w.Spec.Template)}}, nil
	case *appsv1.DaemonSet:
		return &appsv1.DaemonSet{ObjectMeta: p.trimMeta(w),
			Spec: appsv1.DaemonSetSpec{Template: p.trimTemplate(&w.Spec.Template)}}, nil
	case *batchv1.Job:
		return &batchv1.Job{ObjectMeta: p.trimMeta(w), Spec: p.trimJob(&w.Spec)}, nil
	case *batchv1.CronJob:
		return &batchv1.CronJob{ObjectMeta: p.trimMeta(w),
			Spec: batchv1.CronJobSpec{
				Suspend:           w.Spec.Suspend,
				ConcurrencyPolicy: w.Spec.ConcurrencyPolicy,
				JobTemplate:       batchv1.JobTemplateSpec{Spec: p.trimJob(&w.Spec.JobTemplate.Spec)},
			},
			Status: batchv1.CronJobStatus{Active: w.Status.Active}}, nil
	case *unstructured.Unstructured:
		return p.trimUnstructured(w)
	}
	return nil, fmt.Errorf("%T has no pod template", obj)
}

// trimUnstructured is trim for a custom resource with a pod template.
func (p *plan) trimUnstructured(u *unstructured.Unstructured) (runtime.Object, error) {
	meta := p.trimMeta(u)
	metadata, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&meta)
	if err != nil {
		return nil, fmt.Errorf("trim %s/%s: %w", meta.Namespace, meta.Name, err)
	}
	kept := map[string]any{}
	spec, _ := u.Object["spec"].(map[string]any)
	if template, ok := spec["template"]; ok {
		kept["template"] = p.trimUnstructuredTemplate(template)
	}
	if ref, ok := spec["workloadRef"]; ok {
		kept["workloadRef"] = ref
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": u.Object["apiVersion"], "kind": u.Object["kind"], "metadata": metadata, "spec": kept,
	}}, nil
}

// trimUnstructuredTemplate leaves alone what is no pod template: one such object must not stop the others.
func (p *plan) trimUnstructuredTemplate(value any) any {
	object, ok := value.(map[string]any)
	if !ok {
		return value
	}
	var template corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, &template); err != nil {
		return value
	}
	template = p.trimTemplate(&template)
	trimmed, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&template)
	if err != nil {
		return value
	}
	return trimmed
}

func (p *plan) trimJob(spec *batchv1.JobSpec) batchv1.JobSpec {
	return batchv1.JobSpec{Suspend: spec.Suspend, ManualSelector: spec.ManualSelector, Template: p.trimTemplate(&spec.Template)}
}

func (p *plan) trimMeta(obj metav1.Object) metav1.ObjectMeta {
	var x extra
	p.keepMetadata(&x, obj)
	return metav1.ObjectMeta{
		Namespace:         obj.GetNamespace(),
		Name:              obj.GetName(),
		UID:               obj.GetUID(),
		ResourceVersion:   obj.GetResourceVersion(),
		Generation:        obj.GetGeneration(),
		OwnerReferences:   obj.GetOwnerReferences(),
		DeletionTimestamp: x.deleted,
		CreationTimestamp: x.created,
		Annotations:       x.annotations,
		Labels:            x.labels,
	}
}

func (p *plan) trimTemplate(t *corev1.PodTemplateSpec) corev1.PodTemplateSpec {
	out := corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		InitContainers: p.trimContainers(t.Spec.InitContainers),
		Containers:     p.trimContainers(t.Spec.Containers),
		Volumes:        trimVolumes(t.Spec.Volumes),
	}}
	for i := range p.needs {
		if p.needs[i].Template == nil {
			continue
		}
		for _, key := range p.needs[i].Template.Annotations {
			if value, ok := t.Annotations[key]; ok {
				if out.Annotations == nil {
					out.Annotations = make(map[string]string, 1)
				}
				out.Annotations[key] = value
			}
		}
	}
	return out
}

func (p *plan) trimContainers(containers []corev1.Container) []corev1.Container {
	if len(containers) == 0 {
		return nil
	}
	out := make([]corev1.Container, len(containers))
	for i := range containers {
		c := &containers[i]
		out[i] = corev1.Container{Name: c.Name, EnvFrom: c.EnvFrom}
		for j := range c.Env {
			if p.keepsVariable(&c.Env[j]) {
				out[i].Env = append(out[i].Env, c.Env[j])
			}
		}
		for j := range c.VolumeMounts {
			out[i].VolumeMounts = append(out[i].VolumeMounts, corev1.VolumeMount{Name: c.VolumeMounts[j].Name})
		}
	}
	return out
}

func (p *plan) keepsVariable(v *corev1.EnvVar) bool {
	if v.ValueFrom != nil {
		return v.ValueFrom.ConfigMapKeyRef != nil || v.ValueFrom.SecretKeyRef != nil
	}
	return slices.ContainsFunc(p.needs, func(n Need) bool {
		return n.Template != nil && slices.ContainsFunc(n.Template.EnvPrefixes, func(prefix string) bool {
			return strings.HasPrefix(v.Name, prefix)
		})
	})
}

// trimVolumes keeps the volumes that stand for ConfigMaps or Secrets, and of a projected one the
// sources that do.
func trimVolumes(volumes []corev1.Volume) []corev1.Volume {
	var out []corev1.Volume
	for i := range volumes {
		v := &volumes[i]
		kept := corev1.Volume{Name: v.Name}
		switch {
		case v.ConfigMap != nil:
			kept.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: v.ConfigMap.LocalObjectReference}
		case v.Secret != nil:
			kept.Secret = &corev1.SecretVolumeSource{SecretName: v.Secret.SecretName}
		case v.Projected != nil:
			kept.Projected = &corev1.ProjectedVolumeSource{}
			for j := range v.Projected.Sources {
				s := &v.Projected.Sources[j]
				if s.ConfigMap != nil || s.Secret != nil {
					kept.Projected.Sources = append(kept.Projected.Sources, trimProjection(s))
				}
			}
			if len(kept.Projected.Sources) == 0 {
				continue
			}
		default:
			continue
		}
		out = append(out, kept)
	}
	return out
}

func trimProjection(s *corev1.VolumeProjection) corev1.VolumeProjection {
	var out corev1.VolumeProjection
	if s.ConfigMap != nil {
		out.ConfigMap = &corev1.ConfigMapProjection{LocalObjectReference: s.ConfigMap.LocalObjectReference}
	}
	if s.Secret != nil {
		out.Secret = &corev1.SecretProjection{LocalObjectReference: s.Secret.LocalObjectReference}
	}
	return out
}
