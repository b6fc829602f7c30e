// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Failure is why a cluster does not get its object, with the status that the federated object reports of the
// cluster.
type Failure struct {
	Status string
	Err    error
}

func (f *Failure) Error() string { return f.Status + ": " + f.Err.Error() }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// Request says what to render.
type Request struct {
	Type      *TypeConfig
	Federated *Federated
	Cluster   string
	// Live is the cluster's object, read a moment ago, or nil to create it.
	Live *unstructured.Unstructured
	// Own is set if Live is the host's own Namespace.
	Own bool
}

// Render returns the object that the cluster should hold. The error is a *Failure.
func Render(r Request) (*unstructured.Unstructured, error) {
	object, err := r.compute()
	if err != nil {
		return nil, &Failure{ComputeResourceFailed, err}
	}
	if r.Live != nil {
		if err := r.retain(object); err != nil {
			return nil, &Failure{FieldRetentionFailed, err}
		}
	}
	operations, err := r.Federated.Operations(r.Cluster)
	if err == nil {
		object, err = override(object, operations)
	}
	if err == nil {
		err = r.mark(object)
	}
	if err != nil {
		return nil, &Failure{ApplyOverridesFailed, err}
	}
	return &unstructured.Unstructured{Object: object}, nil
}

// compute returns the template as an object of its own, without what belongs to the cluster.
func (r Request) compute() (map[string]any, error) {
	object := map[string]any{}
	switch template := r.Federated.Template.(type) {
	case nil:
	case map[string]any:
		object = copied(template)
	default:
		return nil, errors.New("template: must be an object")
	}
	metadata := map[string]any{"name": r.Federated.Name}
	if !r.Type.IsNamespace() && r.Federated.Namespace != "" {
		metadata["namespace"] = r.Federated.Namespace
	}
	labels, err := labelsOf(object)
	if err != nil {
		return nil, err
	} else if len(labels) > 0 {
		metadata["labels"] = labels
	}
	object["metadata"], object["kind"] = metadata, r.Type.Target.Kind
	delete(object, "status")
	if object["apiVersion"] == nil || object["apiVersion"] == "" {
		object["apiVersion"] = r.Type.Target.APIVersion()
	}
	// A template of another group would be written as another type than the one that was federated.
	if groupOf(object) != r.Type.Target.Group {
		return nil, fmt.Errorf("template.apiVersion: must be of the group %q", r.Type.Target.Group)
	}
	return object, nil
}

// mark sets the label that makes an object a managed one, whatever the overrides made of it.
func (r Request) mark(object map[string]any) error {
	labels, err := labelsOf(object)
	if err != nil {
		return err
	}
	if labels == nil {
		labels = map[string]any{}
	}
	labels[ManagedLabel] = "true"
	metadata := object["metadata"].(map[string]any)
	metadata["labels"] = labels
	if r.Type.IsNamespace() && r.Live != nil && !r.Own && r.Live.GetLabels()[ManagedLabel] != "true" {
		if metadata["annotations"] == nil {
			metadata["annotations"] = map[string]any{}
		}
		return unstructured.SetNestedField(metadata, "true", "annotations", AdoptedAnnotation)
	}
	return nil
}

// labelsOf returns the labels of an object, which may be nil.
func labelsOf(object map[string]any) (map[string]any, error) {
	metadata, _ := object["metadata"].(map[string]any)
	labels, isObject := metadata["labels"].(map[string]any)
	if metadata["labels"] != nil && !isObject {
		return nil, errors.New("metadata.labels: must be a map of strings")
	}
	for key, value := range labels {
		if _, isString := value.(string); !isString {
			return nil, fmt.Errorf("metadata.labels: %q must be a string", cut(key, maxError))
		}
	}
	return labels, nil
}
