// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// marks are what reloads write into a pod template.
type marks struct {
	env []envMark
	// key and value are an annotation; without a key there is no annotation.
	key, value string
}

// envMark sets a variable of a container; an empty value removes it.
type envMark struct {
	container int
	name      string
	value     string
}

// envMark returns the mark of one reload as a variable.
func (r *Reload) envMark() envMark {
	return envMark{container: r.container, name: variableName(r.Key), value: r.Hash}
}

// marks turns reloads, in order, into marks: all of them as variables, or the last of them as an
// annotation.
func (o *Options) marks(facts *Facts, reloads []Reload) marks {
	if !o.marksByAnnotation(facts) {
		return marks{env: variables(reloads)}
	}
	last := reloads[len(reloads)-1]
	value, _ := json.Marshal(mark{ // strings and a number always marshal
		Type:          last.Key.Type.markType(),
		Name:          last.Key.Name,
		Namespace:     facts.Workload.Namespace,
		Hash:          cmp.Or(last.Hash, deletedHash),
		ContainerRefs: []string{facts.Workload.Containers[last.container].Name},
		ObservedAt:    facts.Now.Unix(),
	})
	return marks{key: facts.Selection.markKey(), value: string(value)}
}

// variables returns the variables of reloads. If two names map to one variable, the later reload
// sets it.
func variables(reloads []Reload) []envMark {
	var env []envMark
	for _, r := range reloads {
		e := r.envMark()
		same := func(o envMark) bool { return o.container == e.container && o.name == e.name }
		if i := slices.IndexFunc(env, same); i >= 0 {
			env[i] = e
		} else {
			env = append(env, e)
		}
	}
	return env
}

// mark is the value of the annotation that marks a template, with the fields in the order in which
// the original writes them.
type mark struct {
	Type          string   `json:"type"`
	Name          string   `json:"name"`
	Namespace     string   `json:"namespace"`
	Hash          string   `json:"hash"`
	ContainerRefs []string `json:"containerRefs"`
	ObservedAt    int64    `json:"observedAt"`
}

// applyToTemplate sets the marks in the template of an object that is to be created.
func (m *marks) applyToTemplate(template *corev1.PodTemplateSpec) {
	if m.key != "" {
		metav1.SetMetaDataAnnotation(&template.ObjectMeta, m.key, m.value)
	}
	for _, e := range m.env {
		ctr := &template.Spec.Containers[e.container]
		ctr.Env = slices.DeleteFunc(ctr.Env, func(v corev1.EnvVar) bool { return v.Name == e.name })
		if e.value != "" {
			ctr.Env = append(ctr.Env, corev1.EnvVar{Name: e.name, Value: e.value})
		}
	}
}

// applyToContainers sets the marks in the containers of an unstructured template, which keeps unknown fields.
// It returns an error if the containers differ from the containers of the decision.
func (m *marks) applyToContainers(containers []any) error {
	for _, e := range m.env {
		if e.container >= len(containers) {
			return fmt.Errorf("there is no container %d", e.container)
		}
		ctr, ok := containers[e.container].(Object)
		if !ok {
			return fmt.Errorf("container %d is not an object", e.container)
		}
		env, _ := ctr["env"].([]any)
		i := slices.IndexFunc(env, func(v any) bool {
			fields, ok := v.(Object)
			return ok && fields["name"] == e.name
		})
		switch variable := (Object{"name": e.name, "value": e.value}); {
		case e.value == "" && i >= 0:
			env = slices.Delete(env, i, i+1)
		case e.value != "" && i >= 0:
			env[i] = variable
		case e.value != "":
			env = append(env, variable)
		}
		ctr["env"] = env
	}
	return nil
}
