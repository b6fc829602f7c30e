// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"
)

// marks are what reloads write into a pod template.
type marks struct {
	env []envMark
	// key and value are those of an annotation; without a key there is no annotation.
	key, value string
}

// envMark sets a variable of a container; an empty value removes it.
type envMark struct {
	container int
	name      string
	value     string
}

// variable returns the mark of one reload as a variable.
func (r *reload) variable() envMark {
	return envMark{container: r.container, name: variable(r.key), value: r.hash}
}

// marks turns reloads, in order, into marks: all of them as variables, or the last of them as an
// annotation. If all variables are there already, from an earlier time at which the sources had
// this data, they would not roll the workload; then the annotation is used.
func (c *Config) marks(f *facts, reloads []reload) marks {
	key := f.rules.markKey()
	if !c.byAnnotation(f) {
		env := variables(reloads)
		if slices.ContainsFunc(env, func(e envMark) bool { return !f.hasVariable(e) }) {
			return marks{env: env}
		}
		key = nativeMark
	}
	last := reloads[len(reloads)-1]
	value, _ := json.Marshal(mark{ // strings and a number always marshal
		Type:          last.key.typ.mark(),
		Name:          last.key.name,
		Namespace:     f.workload.Namespace,
		Hash:          cmp.Or(last.hash, deletedHash),
		ContainerRefs: []string{f.workload.Containers[last.container].Name},
		ObservedAt:    f.now.Unix(),
	})
	return marks{key: key, value: string(value)}
}

// variables returns the variables of reloads. If two names map to one variable, the later reload
// sets it.
func variables(reloads []reload) []envMark {
	var env []envMark
	for _, r := range reloads {
		e := r.variable()
		same := func(o envMark) bool { return o.container == e.container && o.name == e.name }
		if i := slices.IndexFunc(env, same); i >= 0 {
			env[i] = e
		} else {
			env = append(env, e)
		}
	}
	return env
}

// object is a JSON object under construction.
type object = map[string]any

// metadataPatch contains the resourceVersion, so that a write based on an outdated read is refused.
// The state is removed if it is empty or too large.
func metadataPatch(w *workload, s state) object {
	annotations := object{}
	text := s.annotation()
	if was, annotated := w.meta[nativeState]; text != was || annotated && text == "" {
		annotations[nativeState] = orNull(text)
	}
	return object{"metadata": object{"resourceVersion": w.version, "annotations": annotations}}
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

// templatePatch returns a strategic merge patch with everything that a reload changes: marks, state
// and, if there is one, the pause.
func (c *Config) templatePatch(f *facts, k *keys, p *plan) object {
	s := p.state
	if c.State == StateOff {
		s = nil
	}
	patch := metadataPatch(f.workload, s)
	m := c.marks(f, p.reloads)
	spec := object{"template": m.template(f.workload)}
	if d, _ := k.pausePeriod(f.workload, &f.rules); d > 0 && !f.workload.Paused {
		spec["paused"] = true
		patch["metadata"].(object)["annotations"].(object)[k.pauseAt] = f.now.UTC().Format(time.RFC3339)
	}
	patch["spec"] = spec
	return patch
}

// template returns the part of a strategic merge patch below spec.template.
func (m *marks) template(w *workload) object {
	if m.key != "" {
		return object{"metadata": object{"annotations": object{m.key: m.value}}}
	}
	var containers []object
	for i := range w.Containers {
		var env []object
		for _, e := range m.env {
			switch {
			case e.container != i:
			case e.value == "":
				env = append(env, object{"name": e.name, "$patch": "delete"})
			default:
				env = append(env, object{"name": e.name, "value": e.value})
			}
		}
		if env != nil {
			containers = append(containers, object{"name": w.Containers[i].Name, "env": env})
		}
	}
	return object{"spec": object{"containers": containers}}
}

// pausePatch ends a pause, or removes what is left of one that somebody else ended.
func (k *keys) pausePatch(w *workload, step pauseStep) object {
	patch := object{"metadata": object{
		"resourceVersion": w.version,
		"annotations":     object{k.pauseAt: nil},
	}}
	if step == pauseEnds {
		patch["spec"] = object{"paused": false}
	}
	return patch
}
