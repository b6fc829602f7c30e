// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// workloadKey is what the queue holds.
type workloadKey struct {
	kind string // as in a manifest
	cache.ObjectName
}

func (k workloadKey) String() string { return k.kind + "/" + k.ObjectName.String() }

// workload is what the decision needs of a workload, whatever its kind.
type workload struct {
	workloadKey
	uid     types.UID
	version string // resourceVersion

	meta, template map[string]string // annotations
	inits          []container
	containers     []container
	volumes        map[string][]sourceKey // by volume name
	paused         bool                   // Deployments
	suspended      bool                   // CronJobs
	ownedBy        string                 // kind of the controlling owner
	elsewhere      bool                   // Rollouts: the template is another object's
}

type container struct {
	name   string
	mounts []string            // volume names
	env    []sourceKey         // through env and envFrom
	vars   map[string]envValue // variables of ours, by name
}

// envValue is a variable's value and its position in env.
type envValue struct {
	value string
	index int
}

// newWorkload reads a typed object, from the cache or from the API server, or
// an Argo Rollout as unstructured.
func newWorkload(obj any) (*workload, error) {
	switch o := obj.(type) {
	case *appsv1.Deployment:
		w := describe("Deployment", o, &o.Spec.Template)
		w.paused = o.Spec.Paused
		return w, nil
	case *appsv1.StatefulSet:
		return describe("StatefulSet", o, &o.Spec.Template), nil
	case *appsv1.DaemonSet:
		return describe("DaemonSet", o, &o.Spec.Template), nil
	case *batchv1.CronJob:
		// The metadata of jobTemplate itself is not read.
		w := describe("CronJob", o, &o.Spec.JobTemplate.Spec.Template)
		w.suspended = o.Spec.Suspend != nil && *o.Spec.Suspend
		return w, nil
	case *batchv1.Job:
		return describe("Job", o, &o.Spec.Template), nil
	case *unstructured.Unstructured:
		return newRollout(o)
	}
	return nil, fmt.Errorf("%T is not a workload", obj)
}

func newRollout(o *unstructured.Unstructured) (*workload, error) {
	var template corev1.PodTemplateSpec
	spec, _, err := unstructured.NestedMap(o.Object, "spec", "template")
	if err == nil {
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &template)
	}
	if err != nil {
		return nil, fmt.Errorf("template of Rollout %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	w := describe("Rollout", o, &template)
	_, w.elsewhere, _ = unstructured.NestedMap(o.Object, "spec", "workloadRef")
	return w, nil
}

func describe(kind string, o metav1.Object, template *corev1.PodTemplateSpec) *workload {
	w := &workload{
		workloadKey: workloadKey{kind: kind, ObjectName: cache.NewObjectName(o.GetNamespace(), o.GetName())},
		uid:         o.GetUID(),
		version:     o.GetResourceVersion(),
		meta:        o.GetAnnotations(),
		template:    template.Annotations,
		volumes:     map[string][]sourceKey{},
	}
	if owner := metav1.GetControllerOfNoCopy(o); owner != nil {
		w.ownedBy = owner.Kind
	}
	for i := range template.Spec.Volumes {
		v := &template.Spec.Volumes[i]
		w.volumes[v.Name] = volumeSources(v)
	}
	w.inits = describeContainers(template.Spec.InitContainers)
	w.containers = describeContainers(template.Spec.Containers)
	return w
}

func volumeSources(v *corev1.Volume) []sourceKey {
	var list []sourceKey
	if v.ConfigMap != nil {
		list = append(list, sourceKey{configMap, v.ConfigMap.Name})
	}
	if v.Secret != nil {
		list = append(list, sourceKey{secret, v.Secret.SecretName})
	}
	if v.Projected != nil {
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				list = append(list, sourceKey{configMap, p.ConfigMap.Name})
			}
			if p.Secret != nil {
				list = append(list, sourceKey{secret, p.Secret.Name})
			}
		}
	}
	return list
}

func describeContainers(list []corev1.Container) []container {
	out := make([]container, 0, len(list))
	for i := range list {
		c := container{name: list[i].Name}
		for _, m := range list[i].VolumeMounts {
			c.mounts = append(c.mounts, m.Name)
		}
		for index, e := range list[i].Env {
			if strings.HasPrefix(e.Name, variablePrefix) {
				if c.vars == nil {
					c.vars = map[string]envValue{}
				}
				c.vars[e.Name] = envValue{value: e.Value, index: index}
			}
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				c.env = append(c.env, sourceKey{configMap, e.ValueFrom.ConfigMapKeyRef.Name})
			}
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				c.env = append(c.env, sourceKey{secret, e.ValueFrom.SecretKeyRef.Name})
			}
		}
		for _, e := range list[i].EnvFrom {
			if e.ConfigMapRef != nil {
				c.env = append(c.env, sourceKey{configMap, e.ConfigMapRef.Name})
			}
			if e.SecretRef != nil {
				c.env = append(c.env, sourceKey{secret, e.SecretRef.Name})
			}
		}
		out = append(out, c)
	}
	return out
}

// references returns every source that a container of the template uses, in
// order and once. Volumes that nobody mounts do not count.
func (w *workload) references() []sourceKey {
	var list []sourceKey
	for _, c := range slices.Concat(w.inits, w.containers) {
		for _, mount := range c.mounts {
			list = append(list, w.volumes[mount]...)
		}
		list = append(list, c.env...)
	}
	slices.SortFunc(list, compareKeys)
	return slices.Compact(list)
}

// chooseContainer returns the index of the container that carries the mark for
// a source: the first that mounts it, else the first that reads its
// environment from it. An init container is never changed, so
// the first container stands in for one, and for a named source that nobody
// references. It returns false if no container is to be had.
func (w *workload) chooseContainer(key sourceKey, m match) (int, bool) {
	mounts := func(c container) bool {
		return slices.ContainsFunc(c.mounts, func(v string) bool { return slices.Contains(w.volumes[v], key) })
	}
	reads := func(c container) bool { return slices.Contains(c.env, key) }
	for _, uses := range []func(container) bool{mounts, reads} {
		if i := slices.IndexFunc(w.containers, uses); i >= 0 {
			return i, true
		}
		if slices.ContainsFunc(w.inits, uses) {
			return 0, len(w.containers) > 0
		}
	}
	return 0, m == named && len(w.containers) > 0
}

const variablePrefix = "STAKATER_"

// variable is the name of the environment variable that marks a source: upper
// case, every run of other characters one underscore, none at the start.
func variable(key sourceKey) string {
	var b strings.Builder
	b.WriteString(variablePrefix)
	last := false // the last character was one that stays
	for _, r := range strings.ToUpper(key.name) {
		stays := r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if stays {
			b.WriteRune(r)
		} else if last {
			b.WriteByte('_')
		}
		last = stays
	}
	b.WriteByte('_')
	b.WriteString(key.typ.mark())
	return b.String()
}

// DigestTemplate returns a digest of a workload's pod template, nil for other
// objects. It tells whether two versions of one workload differ in it.
func DigestTemplate(obj runtime.Object) []byte {
	var template *corev1.PodTemplateSpec
	switch o := obj.(type) {
	case *appsv1.Deployment:
		template = &o.Spec.Template
	case *appsv1.StatefulSet:
		template = &o.Spec.Template
	case *appsv1.DaemonSet:
		template = &o.Spec.Template
	default:
		return nil
	}
	data, err := template.Marshal()
	if err != nil {
		return nil
	}
	sum := sha256.Sum256(data)
	return sum[:8]
}
