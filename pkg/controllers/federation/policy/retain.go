// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"

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
		for key, value := range r.Live.GetLabels() {
			if _, has, err := unstructured.NestedFieldNoCopy(object, "metadata", "labels", key); err != nil {
				return err
			} else if !has {
				if err := unstructured.SetNestedField(object, value, "metadata", "labels", key); err != nil {
					return err
				}
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
	value, has, err := unstructured.NestedFieldNoCopy(live, path...)
	if err != nil || !has {
		return nil
	}
	if there, has, err := unstructured.NestedFieldNoCopy(object, path...); err != nil {
		return err
	} else if has && there != nil {
		return nil
	}
	return unstructured.SetNestedField(object, value, path...)
}

func retainJob(object, live map[string]any) error {
	manual, _, err := unstructured.NestedBool(object, "spec", "manualSelector")
	if err != nil {
		return errors.New("spec.manualSelector: must be a boolean")
	}
	selector, has, err := unstructured.NestedFieldNoCopy(live, "spec", "selector")
	if manual || !has || err != nil {
		return nil
	}
	if err := unstructured.SetNestedField(object, selector, "spec", "selector"); err != nil {
		return err
	}
	for _, label := range generatedPodLabels {
		value, has, err := unstructured.NestedString(live, "spec", "template", "metadata", "labels", label)
		if err != nil || !has {
			continue
		}
		if err := unstructured.SetNestedField(object, value, "spec", "template", "metadata", "labels", label); err != nil {
			return err
		}
	}
	return nil
}

func (r Request) retainReplicas(object, live map[string]any) error {
	switch retain := r.Federated.retainReplicas.(type) {
	case nil:
		return nil
	case bool:
		if !retain {
			return nil
		}
	default:
		return errors.New("retainReplicas: must be a boolean")
	}
	replicas, has, err := unstructured.NestedFieldNoCopy(live, "spec", "replicas")
	if err != nil || !has {
		return nil
	}
	if err := unstructured.SetNestedField(object, replicas, "spec", "replicas"); err != nil {
		return fmt.Errorf("spec.replicas: %w", err)
	}
	return nil
}
