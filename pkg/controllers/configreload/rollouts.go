// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// rolloutRestart is the value of compatStrategy that asks for a restart instead of a mark.
const rolloutRestart = "restart"

// restarts reports whether the workload is an Argo Rollout that takes no mark.
func (c *Config) restarts(f *facts) bool {
	return c.Compat && !f.rules.native && f.workload.kind == "Rollout" && f.workload.meta[compatStrategy] == rolloutRestart
}

// patchRollout reloads an Argo Rollout. Custom resources have no strategic merge, so a variable is
// set by JSON patch, at its index in the live object; everything else is a merge patch.
func (c *Controller) patchRollout(ctx context.Context, k *kind, f *facts, p *plan) (outcome, error) {
	w := f.workload
	s := p.state
	if c.cfg.State == StateOff {
		s = nil
	}
	merge := metadataPatch(w, s)
	if c.cfg.restarts(f) {
		merge["spec"] = object{"restartAt": f.now.UTC().Format(time.RFC3339)}
		version, err := c.patch(ctx, k, w, types.MergePatchType, merge)
		return outcome{version: version}, err
	}
	m := c.cfg.marks(f, p.reloads)
	if m.key != "" {
		merge["spec"] = object{"template": m.template(w)}
		version, err := c.patch(ctx, k, w, types.MergePatchType, merge)
		return outcome{version: version}, err
	}
	live, err := k.get(ctx, w.ObjectName)
	if err != nil {
		return outcome{}, err
	}
	if live.GetResourceVersion() != w.version {
		return outcome{}, errOutdated(w)
	}
	ops, err := jsonPatch(live.(*unstructured.Unstructured), merge, &m)
	if err != nil {
		return outcome{}, err
	}
	version, err := c.patch(ctx, k, w, types.JSONPatchType, ops)
	if apierrors.IsInvalid(err) {
		// The API server evaluates the patch's tests before it compares the versions, so a failed
		// test means a conflict as well.
		err = apierrors.NewConflict(RolloutsResource.GroupResource(), w.Name, err)
	}
	return outcome{version: version}, err
}

// jsonPatch sets the variables of m and the annotations of a merge patch in live. It sets the
// resourceVersion too, so that the API server refuses the patch with a conflict if the object has
// changed.
func jsonPatch(live *unstructured.Unstructured, merge object, m *marks) ([]object, error) {
	template, err := rolloutTemplate(live)
	if err != nil {
		return nil, err
	}
	op := func(op, path string, value any) object { return object{"op": op, "path": path, "value": value} }
	ops := []object{op("replace", "/metadata/resourceVersion", live.GetResourceVersion())}

	if live.GetAnnotations() == nil {
		ops = append(ops, op("add", "/metadata/annotations", object{}))
	}
	for key, value := range merge["metadata"].(object)["annotations"].(object) {
		path := "/metadata/annotations/" + escapePointer(key)
		if value != nil {
			ops = append(ops, op("add", path, value))
		} else if _, there := live.GetAnnotations()[key]; there {
			ops = append(ops, object{"op": "remove", "path": path})
		}
	}
	for _, e := range m.env {
		ctr := &template.Spec.Containers[e.container]
		base := fmt.Sprintf("/spec/template/spec/containers/%d", e.container)
		ops = append(ops, op("test", base+"/name", ctr.Name))
		ops = append(ops, envOps(base, ctr, e)...)
		// Later operations see the results of the earlier ones.
		switch i := indexOf(ctr.Env, e.name); {
		case e.value == "" && i >= 0:
			ctr.Env = slices.Delete(ctr.Env, i, i+1)
		case e.value != "" && i < 0:
			ctr.Env = append(ctr.Env, corev1.EnvVar{Name: e.name, Value: e.value})
		}
	}
	return ops, nil
}

// envOps sets or removes one variable of a container.
func envOps(base string, ctr *corev1.Container, e envMark) []object {
	i := indexOf(ctr.Env, e.name)
	at := fmt.Sprintf("%s/env/%d", base, i)
	test := object{"op": "test", "path": at + "/name", "value": e.name}
	variable := object{"name": e.name, "value": e.value}
	switch {
	case e.value == "" && i < 0:
		return nil
	case e.value == "":
		return []object{test, {"op": "remove", "path": at}}
	case i >= 0:
		return []object{test, {"op": "replace", "path": at, "value": variable}}
	case len(ctr.Env) == 0:
		return []object{{"op": "add", "path": base + "/env", "value": []object{variable}}}
	}
	return []object{{"op": "add", "path": base + "/env/-", "value": variable}}
}

func indexOf(env []corev1.EnvVar, name string) int {
	for i := range env {
		if env[i].Name == name {
			return i
		}
	}
	return -1
}

func escapePointer(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}
