// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
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

// Kind is what decisions need to know of a kind of workload.
type Kind struct {
	Name string // as in a manifest
	// Pauses is set if a reload may pause a workload of the kind: Deployments.
	Pauses bool
	// Restarts is set if a field may restart a workload of the kind in place of a mark: Argo Rollouts.
	Restarts bool
	// Stateless is set if no state is recorded on workloads of the kind: Jobs are many, and a late second run is
	// worse than none.
	Stateless bool
}

// QueueKey names a workload, a source or, without a name, a namespace. It is the key in the queue.
type QueueKey struct {
	Kind string // as in a manifest
	cache.ObjectName
}

// String returns KIND/NAMESPACE/NAME.
func (k QueueKey) String() string { return k.Kind + "/" + k.ObjectName.String() }

// Workload is what the decision needs of a workload of any kind.
type Workload struct {
	QueueKey
	Kind    *Kind
	UID     types.UID
	Version string // resourceVersion
	// ContentVersion is the version since which the workload has this content and these annotations, as far as
	// this process has seen.
	ContentVersion string
	// CreatedVersion is the version at the creation; empty if this process has not seen the creation.
	CreatedVersion string
	Deleting       bool
	Annotations    map[string]string
	Content
	references []SourceKey // see References
}

// Content is what the decision needs of a workload besides its metadata. The cache keeps it as the
// JSON from [AnnotationKeys.DigestWorkload], one for each workload of the cluster, so the names are short and
// empty fields are left out.
type Content struct {
	TemplateAnnotations map[string]string      `json:"t,omitempty"`
	Inits               []Container            `json:"i,omitempty"`
	Containers          []Container            `json:"c,omitempty"`
	Volumes             map[string][]SourceKey `json:"v,omitempty"` // the sources of volumes, by the volume's name
	Paused              bool                   `json:"p,omitempty"` // Deployments
	Suspended           bool                   `json:"s,omitempty"` // CronJobs
	ForbidsConcurrent   bool                   `json:"b,omitempty"` // CronJobs: two Jobs at once
	Finished            bool                   `json:"f,omitempty"` // Jobs
	CronJob             types.UID              `json:"j,omitempty"` // of the CronJob that controls a Job
	RolledElsewhere     bool                   `json:"e,omitempty"` // rolled through another object
	// AnnotationSum distinguishes the annotations of the workload, so that its digest changes when the workload
	// begins to select sources. Only the cached content has the sum.
	AnnotationSum uint32 `json:"a,omitempty"`
	// Problem is why the workload cannot be read; if it is set, the rest is empty.
	Problem string `json:"x,omitempty"`
}

// Container is what the decision needs of a container.
type Container struct {
	Name   string      `json:"n"`
	Mounts []string    `json:"m,omitempty"` // names of Volumes
	Env    []SourceKey `json:"e,omitempty"` // through env and envFrom
	Vars   []string    `json:"v,omitempty"` // our variables
}

// DigestWorkload returns what the cache keeps of a workload in place of the content.
func (k *AnnotationKeys) DigestWorkload(obj runtime.Object) []byte {
	c, err := describeWorkload(obj)
	if err != nil {
		c = Content{Problem: err.Error()}
	} else {
		c.AnnotationSum = k.annotationSum(obj.(metav1.Object).GetAnnotations())
	}
	c.TemplateAnnotations = clipAll(c.TemplateAnnotations, k.workloadKeys)
	data, _ := json.Marshal(c) // strings always marshal
	return data
}

// annotationSum returns a checksum of the annotations that the selection is made of; 0 without any.
func (k *AnnotationKeys) annotationSum(annotations map[string]string) uint32 {
	var sum hash.Hash32
	for _, key := range k.selectionKeys {
		if value, ok := annotations[key]; ok {
			if sum == nil {
				sum = fnv.New32a()
			}
			_, _ = fmt.Fprintf(sum, "%s=%s\x00", key, clip(value))
		}
	}
	if sum == nil {
		return 0
	}
	return sum.Sum32()
}

// Cached is a workload that the cache has reduced.
type Cached interface {
	// Digest returns the result of [AnnotationKeys.DigestWorkload].
	Digest(controller string) []byte
	History
}

// History says when things happened to a cached object, in versions; empty if that was not seen.
type History interface {
	FirstVersion() string   // it came to the cache
	CreatedVersion() string // it was created
	ChangedVersion() string // its digest changed last
}

// NewWorkload reads a workload. A workload that the cache has reduced consists of its metadata and the
// digest for the controller. From the API server it is the API type, or unstructured for an Argo Rollout.
func NewWorkload(kind *Kind, obj any, controller string) (*Workload, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kind.Name, err)
	}
	workload := &Workload{
		QueueKey:    QueueKey{Kind: kind.Name, ObjectName: cache.MetaObjectToName(m)},
		Kind:        kind,
		UID:         m.GetUID(),
		Version:     m.GetResourceVersion(),
		Deleting:    m.GetDeletionTimestamp() != nil,
		Annotations: m.GetAnnotations(),
	}
	if cached, ok := obj.(Cached); ok {
		workload.ContentVersion, workload.CreatedVersion = cmp.Or(cached.ChangedVersion(), cached.FirstVersion()), cached.CreatedVersion()
		err = json.Unmarshal(cached.Digest(controller), &workload.Content)
	} else {
		workload.Content, err = describeWorkload(obj)
	}
	if err == nil && workload.Problem != "" {
		err = errors.New(workload.Problem)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", workload.QueueKey, err)
	}
	return workload, nil
}

// InheritVersions gives a workload that was read live the versions of the cached workload.
func (w *Workload) InheritVersions(cached *Workload) {
	w.ContentVersion = w.Version
	if w.UID == cached.UID {
		w.ContentVersion, w.CreatedVersion = cached.ContentVersion, cached.CreatedVersion
	}
}

func describeWorkload(obj any) (Content, error) {
	switch o := obj.(type) {
	case *appsv1.Deployment:
		c := describeTemplate(&o.Spec.Template)
		c.Paused = o.Spec.Paused
		return c, nil
	case *appsv1.StatefulSet:
		return describeTemplate(&o.Spec.Template), nil
	case *appsv1.DaemonSet:
		return describeTemplate(&o.Spec.Template), nil
	case *batchv1.CronJob:
		// The metadata of jobTemplate itself is not read.
		c := describeTemplate(&o.Spec.JobTemplate.Spec.Template)
		c.Suspended = o.Spec.Suspend != nil && *o.Spec.Suspend
		c.ForbidsConcurrent = o.Spec.ConcurrencyPolicy == batchv1.ForbidConcurrent
		return c, nil
	case *batchv1.Job:
		c := describeTemplate(&o.Spec.Template)
		c.Finished = JobFinished(o)
		if owner := metav1.GetControllerOfNoCopy(o); owner != nil && owner.Kind == "CronJob" {
			c.CronJob, c.RolledElsewhere = owner.UID, true
		}
		return c, nil
	case *unstructured.Unstructured:
		return describeRollout(o)
	}
	return Content{}, fmt.Errorf("%T is not a workload", obj)
}

func describeRollout(o *unstructured.Unstructured) (Content, error) {
	template, err := rolloutTemplate(o)
	if err != nil {
		return Content{}, err
	}
	c := describeTemplate(template)
	_, c.RolledElsewhere, _ = unstructured.NestedMap(o.Object, "spec", "workloadRef")
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

// JobFinished reports whether a Job has finished.
func JobFinished(job *batchv1.Job) bool {
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		return (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue
	})
}

func describeTemplate(template *corev1.PodTemplateSpec) Content {
	c := Content{TemplateAnnotations: template.Annotations}
	for i := range template.Spec.Volumes {
		v := &template.Spec.Volumes[i]
		if sources := volumeSources(v); len(sources) > 0 {
			if c.Volumes == nil {
				c.Volumes = map[string][]SourceKey{}
			}
			c.Volumes[v.Name] = sources
		}
	}
	c.Inits = c.describeContainers(template.Spec.InitContainers)
	c.Containers = c.describeContainers(template.Spec.Containers)
	return c
}

// A volume of the Secrets Store CSI driver names its class in an attribute.
const (
	csiDriver = "secrets-store.csi.k8s.io"
	csiClass  = "secretProviderClass"
)

func volumeSources(v *corev1.Volume) []SourceKey {
	var list []SourceKey
	if v.ConfigMap != nil {
		list = append(list, SourceKey{ConfigMap, v.ConfigMap.Name})
	}
	if v.Secret != nil {
		list = append(list, SourceKey{Secret, v.Secret.SecretName})
	}
	if v.CSI != nil && v.CSI.Driver == csiDriver && v.CSI.VolumeAttributes[csiClass] != "" {
		list = append(list, SourceKey{SecretProviderClass, v.CSI.VolumeAttributes[csiClass]})
	}
	if v.Projected != nil {
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				list = append(list, SourceKey{ConfigMap, p.ConfigMap.Name})
			}
			if p.Secret != nil {
				list = append(list, SourceKey{Secret, p.Secret.Name})
			}
		}
	}
	return list
}

func (c *Content) describeContainers(list []corev1.Container) []Container {
	var out []Container
	for i := range list {
		ctr := Container{Name: list[i].Name}
		for _, m := range list[i].VolumeMounts {
			if _, ok := c.Volumes[m.Name]; ok {
				ctr.Mounts = append(ctr.Mounts, m.Name)
			}
		}
		for _, e := range list[i].Env {
			if strings.HasPrefix(e.Name, variablePrefix) {
				ctr.Vars = append(ctr.Vars, e.Name)
			}
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				ctr.Env = append(ctr.Env, SourceKey{ConfigMap, e.ValueFrom.ConfigMapKeyRef.Name})
			}
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				ctr.Env = append(ctr.Env, SourceKey{Secret, e.ValueFrom.SecretKeyRef.Name})
			}
		}
		for _, e := range list[i].EnvFrom {
			if e.ConfigMapRef != nil {
				ctr.Env = append(ctr.Env, SourceKey{ConfigMap, e.ConfigMapRef.Name})
			}
			if e.SecretRef != nil {
				ctr.Env = append(ctr.Env, SourceKey{Secret, e.SecretRef.Name})
			}
		}
		out = append(out, ctr)
	}
	return out
}

// References returns every source that a container of the template uses, in order and without duplicates.
// Volumes that nobody mounts do not count. There may be thousands of references, so the workload keeps the
// list.
func (w *Workload) References() []SourceKey {
	if w.references != nil {
		return w.references
	}
	list := []SourceKey{}
	for _, c := range slices.Concat(w.Inits, w.Containers) {
		for _, mount := range c.Mounts {
			list = append(list, w.Volumes[mount]...)
		}
		list = append(list, c.Env...)
	}
	// The API server accepts a variable of a source without a name.
	list = slices.DeleteFunc(list, func(key SourceKey) bool { return key.Name == "" })
	slices.SortFunc(list, compareKeys)
	w.references = slices.Compact(list)
	return w.references
}

// RefersTo reports whether a source is among the references.
func (w *Workload) RefersTo(key SourceKey) bool {
	_, found := slices.BinarySearchFunc(w.References(), key, compareKeys)
	return found
}

// chooseContainer returns the index of the container that carries the mark for a source: the first
// that mounts it, else the first that reads its environment from it. Init containers are never
// changed: if an init container uses the source, or the source is named and nobody references it,
// the first container carries the mark. It returns false if there is no such container.
func (w *Workload) chooseContainer(key SourceKey, m Match) (int, bool) {
	mounts := func(c Container) bool {
		return slices.ContainsFunc(c.Mounts, func(v string) bool { return slices.Contains(w.Volumes[v], key) })
	}
	reads := func(c Container) bool { return slices.Contains(c.Env, key) }
	for _, uses := range []func(Container) bool{mounts, reads} {
		if i := slices.IndexFunc(w.Containers, uses); i >= 0 {
			return i, true
		}
		if slices.ContainsFunc(w.Inits, uses) {
			return 0, len(w.Containers) > 0
		}
	}
	return 0, m == Named && len(w.Containers) > 0
}

const variablePrefix = "STAKATER_"

// variableName returns the name of the environment variable that marks a source: upper case, each run
// of other characters replaced by one underscore, no underscore at the start.
func variableName(key SourceKey) string {
	var b strings.Builder
	b.WriteString(variablePrefix)
	lastKept := false // the last character was kept
	for _, r := range strings.ToUpper(key.Name) {
		stays := r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if stays {
			b.WriteRune(r)
		} else if lastKept {
			b.WriteByte('_')
		}
		lastKept = stays
	}
	b.WriteByte('_')
	b.WriteString(key.Type.markType())
	return b.String()
}

// RequestsNothing reports whether there is nothing to do for the workload: it asks for no source, and has
// none of our annotations.
func (k *AnnotationKeys) RequestsNothing(workload *Workload) bool {
	_, recorded := workload.Annotations[StateKey]
	s := k.Selection(workload)
	return s.Empty() && len(s.Problems) == 0 && !recorded && !k.PausedByUs(workload)
}
