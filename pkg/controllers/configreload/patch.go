// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"
)

// marks are what reloads leave in a pod template.
type marks struct {
	env []envMark
	// key and value of an annotation; no annotation if key is empty.
	key, value string
}

// envMark sets a variable of a container; an empty value removes it.
type envMark struct {
	container int
	name      string
	value     string
}

// marks turns reloads, in order, into marks: all of them by variable, the last
// of them by annotation. Variables that are all there, from an earlier time at
// which the sources had this data, would roll nothing; the annotation does.
func (c *Config) marks(f *facts, reloads []reload) marks {
	var m marks
	switch {
	case c.byAnnotation(f):
		m.key = f.rules.markKey()
	case !slices.ContainsFunc(reloads, func(r reload) bool { return !f.hasVariable(r) }):
		m.key = nativeMark
	}
	if m.key != "" {
		last := reloads[len(reloads)-1]
		value, _ := json.Marshal(mark{ // strings and a number always marshal
			Type:          last.key.typ.mark(),
			Name:          last.key.name,
			Namespace:     f.workload.Namespace,
			Hash:          cmp.Or(last.hash, deletedHash),
			ContainerRefs: []string{f.workload.Containers[last.container].Name},
			ObservedAt:    f.now.Unix(),
		})
		m.value = string(value)
		return m
	}
	for _, r := range reloads {
		e := envMark{container: r.container, name: variable(r.key), value: r.hash}
		// Two names may come to one variable: the later write stands.
		replaced := false
		for i := range m.env {
			if m.env[i].container == e.container && m.env[i].name == e.name {
				m.env[i], replaced = e, true
			}
		}
		if !replaced {
			m.env = append(m.env, e)
		}
	}
	return m
}

// object is a JSON object under construction.
type object = map[string]any

// metadataPatch carries the resourceVersion, so that a write that rests on an
// outdated read is refused. The state is removed if it is empty or too large.
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

// templatePatch is a strategic merge patch with everything that a reload
// changes: marks, state, and the pause if there is one.
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

// template is the part of a strategic merge patch below spec.template.
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

// pausePatch ends a pause, or clears up after one that somebody else ended.
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
