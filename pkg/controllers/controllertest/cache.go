// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllertest holds fixtures for tests of controllers: what stands
// in for the caches and for the API server's bookkeeping.
package controllertest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Entry is a ConfigMap or Secret as a shared cache keeps it: without its data.
type Entry struct {
	metav1.ObjectMeta
	digests map[string][]byte
}

// Digest returns what the digest function of one controller returned.
func (e *Entry) Digest(of string) []byte { return e.digests[of] }

// Reduce returns a transform that makes an Entry of a source, with a digest for
// one controller and the annotations it declared.
func Reduce(name string, annotations []string, digest func(runtime.Object) []byte) cache.TransformFunc {
	return func(obj any) (any, error) {
		if _, done := obj.(*Entry); done {
			return obj, nil
		}
		m, err := meta.Accessor(obj)
		if err != nil {
			return obj, nil // a tombstone
		}
		return &Entry{
			ObjectMeta: trimMeta(m, annotations),
			digests:    map[string][]byte{name: digest(obj.(runtime.Object))},
		}, nil
	}
}

// Trim returns a transform that leaves of a workload what controllers declare:
// identity, owners, declared annotations, and of the pod template containers,
// references and variables that begin with the prefix. more is applied to the
// trimmed object and the original, and may be nil.
func Trim(annotations []string, prefix string, more func(trimmed metav1.Object, original runtime.Object)) cache.TransformFunc {
	return func(obj any) (any, error) {
		var trimmed metav1.Object
		switch o := obj.(type) {
		case *appsv1.Deployment:
			trimmed = &appsv1.Deployment{ObjectMeta: trimMeta(o, annotations), Spec: appsv1.DeploymentSpec{
				Paused: o.Spec.Paused, Template: trimTemplate(&o.Spec.Template, annotations, prefix),
			}}
		case *appsv1.StatefulSet:
			trimmed = &appsv1.StatefulSet{ObjectMeta: trimMeta(o, annotations), Spec: appsv1.StatefulSetSpec{
				Template: trimTemplate(&o.Spec.Template, annotations, prefix),
			}}
		case *appsv1.DaemonSet:
			trimmed = &appsv1.DaemonSet{ObjectMeta: trimMeta(o, annotations), Spec: appsv1.DaemonSetSpec{
				Template: trimTemplate(&o.Spec.Template, annotations, prefix),
			}}
		case *batchv1.CronJob:
			t := &batchv1.CronJob{ObjectMeta: trimMeta(o, annotations), Spec: batchv1.CronJobSpec{Suspend: o.Spec.Suspend}}
			t.Spec.JobTemplate.Spec.Template = trimTemplate(&o.Spec.JobTemplate.Spec.Template, annotations, prefix)
			trimmed = t
		case *batchv1.Job:
			trimmed = &batchv1.Job{ObjectMeta: trimMeta(o, annotations), Spec: batchv1.JobSpec{
				Template: trimTemplate(&o.Spec.Template, annotations, prefix),
			}}
		case cache.DeletedFinalStateUnknown:
			return obj, nil
		default:
			return nil, fmt.Errorf("no way to trim a %T", obj)
		}
		if more != nil {
			more(trimmed, obj.(runtime.Object))
		}
		return trimmed, nil
	}
}

func trimMeta(m metav1.Object, annotations []string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(), ResourceVersion: m.GetResourceVersion(),
		OwnerReferences: m.GetOwnerReferences(), Annotations: only(m.GetAnnotations(), annotations),
	}
}

func only(all map[string]string, keys []string) map[string]string {
	kept := maps.Clone(all)
	maps.DeleteFunc(kept, func(key, _ string) bool { return !slices.Contains(keys, key) })
	return kept
}

func trimTemplate(t *corev1.PodTemplateSpec, annotations []string, prefix string) corev1.PodTemplateSpec {
	var out corev1.PodTemplateSpec
	out.Annotations = only(t.Annotations, annotations)
	for _, v := range t.Spec.Volumes {
		if v.ConfigMap != nil || v.Secret != nil || v.Projected != nil {
			out.Spec.Volumes = append(out.Spec.Volumes, v)
		}
	}
	out.Spec.InitContainers = trimContainers(t.Spec.InitContainers, prefix)
	out.Spec.Containers = trimContainers(t.Spec.Containers, prefix)
	return out
}

func trimContainers(list []corev1.Container, prefix string) []corev1.Container {
	var out []corev1.Container
	for _, c := range list {
		t := corev1.Container{Name: c.Name, EnvFrom: c.EnvFrom}
		for _, m := range c.VolumeMounts {
			t.VolumeMounts = append(t.VolumeMounts, corev1.VolumeMount{Name: m.Name})
		}
		for _, e := range c.Env {
			source := e.ValueFrom != nil && (e.ValueFrom.ConfigMapKeyRef != nil || e.ValueFrom.SecretKeyRef != nil)
			if source || strings.HasPrefix(e.Name, prefix) {
				t.Env = append(t.Env, e)
			}
		}
		out = append(out, t)
	}
	return out
}
