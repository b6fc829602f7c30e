// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Object is a JSON object under construction.
type Object = map[string]any

// MetadataPatch records a state and changes nothing else; an empty state removes the annotation. The
// patch contains the resourceVersion, so that a write based on an outdated read is refused. changes
// is false if the annotation is there already.
func MetadataPatch(workload *Workload, s State) (patch Object, changes bool) {
	annotations := Object{}
	changes = !s.IsRecordedOn(workload)
	switch {
	case changes && len(s) == 0:
		annotations[StateKey] = nil
	case changes:
		annotations[StateKey] = s.Text(workload.QueueKey, workload.Version)
	}
	return Object{"metadata": Object{"resourceVersion": workload.Version, "annotations": annotations}}, changes
}

// TemplatePatch returns a strategic merge patch with everything that a reload changes: marks, state
// and, for a workload that pauses, the pause.
func (o *Options) TemplatePatch(facts *Facts, k *AnnotationKeys, plan *Plan) Object {
	patch, _ := MetadataPatch(facts.Workload, plan.State)
	m := o.marks(facts, plan.Reloads)
	spec := Object{"template": m.templatePatch(facts.Workload)}
	if facts.Workload.Kind.Pauses && facts.Selection.pause > 0 && !facts.Workload.Paused {
		spec["paused"] = true
		patch["metadata"].(Object)["annotations"].(Object)[k.pauseAt] = facts.Now.UTC().Format(time.RFC3339)
	}
	patch["spec"] = spec
	return patch
}

// MergePatch is TemplatePatch for a custom resource, which has no strategic merge. containers returns the
// containers of the live object at the workload's version; they are sent as a whole.
func (o *Options) MergePatch(facts *Facts, plan *Plan, containers func() ([]any, error)) (Object, error) {
	patch, _ := MetadataPatch(facts.Workload, plan.State)
	if o.mustRestart(facts) {
		patch["spec"] = Object{"restartAt": facts.Now.UTC().Format(time.RFC3339)}
		return patch, nil
	}
	m := o.marks(facts, plan.Reloads)
	if m.key != "" {
		patch["spec"] = Object{"template": m.templatePatch(facts.Workload)}
		return patch, nil
	}
	list, err := containers()
	if err == nil {
		err = m.applyToContainers(list)
	}
	if err != nil {
		return nil, err
	}
	patch["spec"] = Object{"template": Object{"spec": Object{"containers": list}}}
	return patch, nil
}

// mustRestart reports whether the workload is an Argo Rollout that takes no mark.
func (o *Options) mustRestart(facts *Facts) bool {
	return o.Compat && !facts.Selection.native && facts.Workload.Kind.Restarts && facts.Workload.Annotations[compatStrategy] == rolloutRestart
}

// rolloutRestart is the value of compatStrategy that asks for a restart instead of a mark.
const rolloutRestart = "restart"

// Mark sets the marks of a reload in the template of an object that is to be created.
func (o *Options) Mark(facts *Facts, plan *Plan, template *corev1.PodTemplateSpec) {
	m := o.marks(facts, plan.Reloads)
	m.applyToTemplate(template)
}

// templatePatch returns the part of a strategic merge patch below spec.template.
func (m *marks) templatePatch(workload *Workload) Object {
	if m.key != "" {
		return Object{"metadata": Object{"annotations": Object{m.key: m.value}}}
	}
	var containers []Object
	for i := range workload.Containers {
		var env []Object
		for _, e := range m.env {
			switch {
			case e.container != i:
			case e.value == "":
				env = append(env, Object{"name": e.name, "$patch": "delete"})
			default:
				env = append(env, Object{"name": e.name, "value": e.value})
			}
		}
		if env != nil {
			containers = append(containers, Object{"name": workload.Containers[i].Name, "env": env})
		}
	}
	return Object{"spec": Object{"containers": containers}}
}

// PausePatch ends a pause, or removes what is left of a pause that somebody else ended.
func (k *AnnotationKeys) PausePatch(workload *Workload, step PauseStep) Object {
	patch := Object{"metadata": Object{
		"resourceVersion": workload.Version,
		"annotations":     Object{k.pauseAt: nil},
	}}
	if step == PauseEnds {
		patch["spec"] = Object{"paused": false}
	}
	return patch
}
