// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// generatedPodLabels are set by the API server in the template of a Job that selects its Pods by them.
var generatedPodLabels = []string{"batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name", "controller-uid", "job-name"}

// retain copies into the object what belongs to the cluster.
func (r Request) retain(object map[string]any) error {
	live, metadata := r.Live.Object, object["metadata"].(map[string]any)
	liveMetadata, _ := live["metadata"].(map[string]any)
	for _, field := range []string{"resourceVersion", "finalizers", "annotations", "ownerReferences"} {
		if value, has := liveMetadata[field]; has {
			metadata[field] = runtime.DeepCopyJSONValue(value)
		}
	}
	switch (schema.GroupKind{Group: r.Type.Target.Group, Kind: r.Type.Target.Kind}) {
	case schema.GroupKind{Kind: "Namespace"}:
		for key := range r.Live.GetLabels() {
			if err := keep(object, live, "metadata", "labels", key); err != nil {
				return err
			}
		}
		return nil
	case schema.GroupKind{Kind: "Service"}:
		return keep(object, live, "spec", "loadBalancerClass")
	case schema.GroupKind{Kind: "ServiceAccount"}:
		if secrets, _ := object["secrets"].([]any); len(secrets) == 0 {
			delete(object, "secrets")
		}
		return keep(object, live, "secrets")
	case schema.GroupKind{Group: "batch", Kind: "Job"}:
		return retainJob(object, live)
	}
	return r.retainReplicas(object, live)
}

// keep copies a field that the object does not have.
func keep(object, live map[string]any, path ...string) error {
	if there, has, err := unstructured.NestedFieldNoCopy(object, path...); err != nil || has && there != nil {
		return err
	}
	return take(object, live, path...)
}

// take copies a field that the cluster's object has.
func take(object, live map[string]any, path ...string) error {
	value, has, err := unstructured.NestedFieldNoCopy(live, path...)
	if err != nil || !has {
		return nil
	}
	return unstructured.SetNestedField(object, value, path...)
}

func retainJob(object, live map[string]any) error {
	manual, _, err := unstructured.NestedBool(object, "spec", "manualSelector")
	if err != nil {
		return errors.New("spec.manualSelector: must be a boolean")
	}
	if manual {
		return nil
	}
	for _, label := range generatedPodLabels {
		if err := take(object, live, "spec", "template", "metadata", "labels", label); err != nil {
			return err
		}
	}
	return take(object, live, "spec", "selector")
}

func (r Request) retainReplicas(object, live map[string]any) error {
	retain, isBool := r.Federated.retainReplicas.(bool)
	switch {
	case r.Federated.retainReplicas != nil && !isBool:
		return errors.New("retainReplicas: must be a boolean")
	case !retain:
		return nil
	}
	return take(object, live, "spec", "replicas")
}
