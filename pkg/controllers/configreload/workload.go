// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// workloadKey is the key in the queue.
type workloadKey struct {
	kind string // as in a manifest
	cache.ObjectName
}

func (k workloadKey) String() string { return k.kind + "/" + k.ObjectName.String() }

// workload is what the decision needs of a workload of any kind.
type workload struct {
	workloadKey
	uid     types.UID
	version string            // resourceVersion
	meta    map[string]string // annotations
	content
}

// content is what the decision needs of a workload besides its metadata. The cache keeps it as the
// JSON from WorkloadDigest, one for each workload of the cluster, so the names are short and empty
// fields are left out.
type content struct {
	Template   map[string]string      `json:"t,omitempty"` // annotations of the pod template
	Inits      []container            `json:"i,omitempty"`
	Containers []container            `json:"c,omitempty"`
	Volumes    map[string][]sourceKey `json:"v,omitempty"` // by name, those of sources
	Paused     bool                   `json:"p,omitempty"` // Deployments
	Suspended  bool                   `json:"s,omitempty"` // CronJobs
	OwnedBy    string                 `json:"o,omitempty"` // kind of the controlling owner
	Elsewhere  bool                   `json:"e,omitempty"` // Rollouts: another object has the template
	// Digest identifies the version of the template. The cache has it only with AbsorbRollouts.
	Digest []byte `json:"d,omitempty"`
	// Problem is why the workload cannot be read; if it is set, the rest is empty.
	Problem string `json:"x,omitempty"`
}

type container struct {
	Name   string            `json:"n"`
	Mounts []string          `json:"m,omitempty"` // names of Volumes
	Env    []sourceKey       `json:"e,omitempty"` // through env and envFrom
	Vars   map[string]string `json:"v,omitempty"` // our variables, value by name
}

// WorkloadDigest returns the function that an informer's transform calls on a workload. What that
// function returns is kept in the cache in place of the content.
func WorkloadDigest(cfg Config) func(obj runtime.Object) []byte {
	annotations := WorkloadAnnotations(cfg)
	return func(obj runtime.Object) []byte {
		c, err := describe(obj)
		if err != nil {
			c = content{Problem: err.Error()}
		}
		c.Template = maps.Clone(c.Template) // the map belongs to the object
		maps.DeleteFunc(c.Template, func(key, _ string) bool { return !slices.Contains(annotations, key) })
		if cfg.AbsorbRollouts {
			c.Digest = digestTemplate(obj)
		}
		data, _ := json.Marshal(c) // strings always marshal
		return data
	}
}

// newWorkload reads a workload. One that the cache has reduced consists of its metadata and the
// result of WorkloadDigest. One from the API server or from a complete cache is the API type, or
// unstructured for an Argo Rollout.
func newWorkload(kind string, obj any) (*workload, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	w := &workload{
		workloadKey: workloadKey{kind: kind, ObjectName: cache.MetaObjectToName(m)},
		uid:         m.GetUID(),
		version:     m.GetResourceVersion(),
		meta:        m.GetAnnotations(),
	}
	if cached, ok := obj.(interface{ Digest(of string) []byte }); ok {
		err = json.Unmarshal(cached.Digest(Name), &w.content)
	} else {
		w.content, err = describe(obj)
	}
	if err == nil && w.Problem != "" {
		err = errors.New(w.Problem)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w.workloadKey, err)
	}
	return w, nil
}

func describe(obj any) (content, error) {
	switch o := obj.(type) {
	case *appsv1.Deployment:
		c := describeTemplate(o, &o.Spec.Template)
		c.Paused = o.Spec.Paused
		return c, nil
	case *appsv1.StatefulSet:
		return describeTemplate(o, &o.Spec.Template), nil
	case *appsv1.DaemonSet:
		return describeTemplate(o, &o.Spec.Template), nil
	case *batchv1.CronJob:
		// The metadata of jobTemplate itself is not read.
		c := describeTemplate(o, &o.Spec.JobTemplate.Spec.Template)
		c.Suspended = o.Spec.Suspend != nil && *o.Spec.Suspend
		return c, nil
	case *batchv1.Job:
		return describeTemplate(o, &o.Spec.Template), nil
	case *unstructured.Unstructured:
		return describeRollout(o)
	}
	return content{}, fmt.Errorf("%T is not a workload", obj)
}

func describeRollout(o *unstructured.Unstructured) (content, error) {
	template, err := rolloutTemplate(o)
	if err != nil {
		return content{}, err
	}
	c := describeTemplate(o, template)
	_, c.Elsewhere, _ = unstructured.NestedMap(o.Object, "spec", "workloadRef")
	return c, nil
}

// rolloutTemplate returns the template of a Rollout; an empty one if it has none or null.
func rolloutTemplate(o *unstructured.Unstructured) (*corev1.PodTemplateSpec, error) {
	var template corev1.PodTemplateSpec
	if value, _, _ := unstructured.NestedFieldNoCopy(o.Object, "spec", "template"); value == nil {
		return &template, nil
	}
	spec, _, err := unstructured.NestedMap(o.Object, "spec", "template")
	if err == nil {
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &template)
	}
	if err != nil {
		return nil, fmt.Errorf("spec.template: %w", err)
	}
	return &template, nil
}

func describeTemplate(o metav1.Object, template *corev1.PodTemplateSpec) content {
	c := content{Template: template.Annotations}
	if owner := metav1.GetControllerOfNoCopy(o); owner != nil {
		c.OwnedBy = owner.Kind
	}
	for i := range template.Spec.Volumes {
		v := &template.Spec.Volumes[i]
		if sources := volumeSources(v); len(sources) > 0 {
			if c.Volumes == nil {
				c.Volumes = map[string][]sourceKey{}
			}
			c.Volumes[v.Name] = sources
		}
	}
	c.Inits = c.describeContainers(template.Spec.InitContainers)
	c.Containers = c.describeContainers(template.Spec.Containers)
	return c
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

func (c *content) describeContainers(list []corev1.Container) []container {
	var out []container
	for i := range list {
		ctr := container{Name: list[i].Name}
		for _, m := range list[i].VolumeMounts {
			if _, ok := c.Volumes[m.Name]; ok {
				ctr.Mounts = append(ctr.Mounts, m.Name)
			}
		}
		for _, e := range list[i].Env {
			if strings.HasPrefix(e.Name, variablePrefix) {
				if ctr.Vars == nil {
					ctr.Vars = map[string]string{}
				}
				ctr.Vars[e.Name] = e.Value
			}
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				ctr.Env = append(ctr.Env, sourceKey{configMap, e.ValueFrom.ConfigMapKeyRef.Name})
			}
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				ctr.Env = append(ctr.Env, sourceKey{secret, e.ValueFrom.SecretKeyRef.Name})
			}
		}
		for _, e := range list[i].EnvFrom {
			if e.ConfigMapRef != nil {
				ctr.Env = append(ctr.Env, sourceKey{configMap, e.ConfigMapRef.Name})
			}
			if e.SecretRef != nil {
				ctr.Env = append(ctr.Env, sourceKey{secret, e.SecretRef.Name})
			}
		}
		out = append(out, ctr)
	}
	return out
}

// references returns every source that a container of the template uses, in order and without
// duplicates. Volumes that nobody mounts do not count.
func (w *workload) references() []sourceKey {
	var list []sourceKey
	for _, c := range slices.Concat(w.Inits, w.Containers) {
		for _, mount := range c.Mounts {
			list = append(list, w.Volumes[mount]...)
		}
		list = append(list, c.Env...)
	}
	// The API server accepts a variable of a source without a name.
	list = slices.DeleteFunc(list, func(key sourceKey) bool { return key.name == "" })
	slices.SortFunc(list, compareKeys)
	return slices.Compact(list)
}

// chooseContainer returns the index of the container that carries the mark for a source: the first
// that mounts it, else the first that reads its environment from it. Init containers are never
// changed: if an init container uses the source, or the source is named and nobody references it,
// the first container carries the mark. It returns false if there is no such container.
func (w *workload) chooseContainer(key sourceKey, m match) (int, bool) {
	mounts := func(c container) bool {
		return slices.ContainsFunc(c.Mounts, func(v string) bool { return slices.Contains(w.Volumes[v], key) })
	}
	reads := func(c container) bool { return slices.Contains(c.Env, key) }
	for _, uses := range []func(container) bool{mounts, reads} {
		if i := slices.IndexFunc(w.Containers, uses); i >= 0 {
			return i, true
		}
		if slices.ContainsFunc(w.Inits, uses) {
			return 0, len(w.Containers) > 0
		}
	}
	return 0, m == named && len(w.Containers) > 0
}

const variablePrefix = "STAKATER_"

// variable returns the name of the environment variable that marks a source: upper case, each run
// of other characters replaced by one underscore, no underscore at the start.
func variable(key sourceKey) string {
	var b strings.Builder
	b.WriteString(variablePrefix)
	last := false // the last character was kept
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

// digestTemplate returns a digest of a workload's pod template; nil for kinds that nobody else
// rolls and for objects that the cache has reduced.
func digestTemplate(obj runtime.Object) []byte {
	var template *corev1.PodTemplateSpec
	switch o := obj.(type) {
	case *appsv1.Deployment:
		template = &o.Spec.Template
	case *appsv1.StatefulSet:
		template = &o.Spec.Template
	case *appsv1.DaemonSet:
		template = &o.Spec.Template
	case *unstructured.Unstructured:
		var err error
		if template, err = rolloutTemplate(o); err != nil {
			return nil
		}
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
