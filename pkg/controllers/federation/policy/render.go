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

// Failure is why a cluster does not get its object, with the status that the federated object reports of the
// cluster.
type Failure struct {
	Status string
	Err    error
}

func (f *Failure) Error() string { return f.Status + ": " + f.Err.Error() }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// RenderRequest says what to render.
type RenderRequest struct {
	Type      *TypeConfig
	Federated *Federated
	Cluster   string
	// Live is the cluster's object, read a moment ago, or nil to create it.
	Live *unstructured.Unstructured
	// IsHostNamespace is set if Live is the host's own Namespace.
	IsHostNamespace bool
}

// Render returns the object that the cluster should hold. The error is a *Failure.
func Render(r RenderRequest) (*unstructured.Unstructured, error) {
	object, err := r.renderTemplate()
	if err != nil {
		return nil, &Failure{ComputeResourceFailed, err}
	}
	if r.Live != nil {
		if err := r.retainFields(object); err != nil {
			return nil, &Failure{FieldRetentionFailed, err}
		}
	}
	operations, err := r.Federated.Operations(r.Cluster)
	if err == nil {
		object, err = applyOverrides(object, operations)
	}
	if err == nil {
		err = r.markManaged(object)
	}
	if err != nil {
		return nil, &Failure{ApplyOverridesFailed, err}
	}
	return &unstructured.Unstructured{Object: object}, nil
}

// renderTemplate returns the template as an object of its own, without what belongs to the cluster.
func (r RenderRequest) renderTemplate() (map[string]any, error) {
	object := map[string]any{}
	switch template := r.Federated.Template.(type) {
	case nil:
	case map[string]any:
		object = deepCopy(template)
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

// markManaged sets the managed label and, on an adopted Namespace, the annotation that protects it from
// deletion, whatever the overrides have changed.
func (r RenderRequest) markManaged(object map[string]any) error {
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
	if r.Type.IsNamespace() && r.Live != nil &&
		(!r.IsHostNamespace && r.Live.GetLabels()[ManagedLabel] != "true" || r.Live.GetAnnotations()[AdoptedAnnotation] == "true") {
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
			return nil, fmt.Errorf("metadata.labels: %q must be a string", truncate(key, maxError))
		}
	}
	return labels, nil
}

// generatedPodLabels are set by the API server in the template of a Job that selects its Pods by them.
var generatedPodLabels = []string{"batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name", "controller-uid", "job-name"}

// clusterFields are set by the cluster in objects of a kind. Some cannot be removed again, and without the
// others the object loses the object to which it is bound.
var clusterFields = map[schema.GroupKind][][]string{
	{Kind: "Service"}:                             {{"spec", "loadBalancerClass"}},
	{Kind: "ServiceAccount"}:                      {{"secrets"}},
	{Kind: "PersistentVolume"}:                    {{"spec", "claimRef"}, {"spec", "nodeAffinity"}},
	{Kind: "PersistentVolumeClaim"}:               {{"spec", "volumeName"}, {"spec", "storageClassName"}},
	{Group: "networking.k8s.io", Kind: "Ingress"}: {{"spec", "ingressClassName"}},
}

// retainFields copies into the object what belongs to the cluster.
func (r RenderRequest) retainFields(object map[string]any) error {
	live, metadata := r.Live.Object, object["metadata"].(map[string]any)
	liveMetadata, _ := live["metadata"].(map[string]any)
	// Without the UID, the create branch of some types' PUTs ignores the resourceVersion.
	for _, field := range []string{"uid", "resourceVersion", "finalizers", "annotations", "ownerReferences"} {
		if value, has := liveMetadata[field]; has {
			metadata[field] = runtime.DeepCopyJSONValue(value)
		}
	}
	// A type without the status subresource would lose its status. Other types ignore it in a PUT.
	if err := copyField(object, live, "status"); err != nil {
		return err
	}
	kind := schema.GroupKind{Group: r.Type.Target.Group, Kind: r.Type.Target.Kind}
	for _, path := range clusterFields[kind] {
		if err := copyMissingField(object, live, path...); err != nil {
			return err
		}
	}
	switch kind {
	case schema.GroupKind{Kind: "Namespace"}:
		for key := range r.Live.GetLabels() {
			if err := copyMissingField(object, live, "metadata", "labels", key); err != nil {
				return err
			}
		}
	case schema.GroupKind{Kind: "PersistentVolume"}:
		return retainClaim(object, live)
	case schema.GroupKind{Group: "batch", Kind: "Job"}:
		return retainJob(object, live)
	case schema.GroupKind{Group: "rbac.authorization.k8s.io", Kind: "ClusterRole"}:
		if object["aggregationRule"] != nil {
			return copyField(object, live, "rules")
		}
	}
	retain, isBool := r.Federated.retainReplicas.(bool)
	if r.Federated.retainReplicas != nil && !isBool {
		return errors.New("retainReplicas: must be a boolean")
	}
	if !retain {
		return nil
	}
	return copyField(object, live, "spec", "replicas")
}

// copyMissingField copies a field that the object does not have. An empty list counts as none.
func copyMissingField(object, live map[string]any, path ...string) error {
	existing, _, err := unstructured.NestedFieldNoCopy(object, path...)
	if list, isList := existing.([]any); err != nil || existing != nil && (!isList || len(list) > 0) {
		return err
	}
	return copyField(object, live, path...)
}

// copyField copies a field that the cluster's object has.
func copyField(object, live map[string]any, path ...string) error {
	value, has, err := unstructured.NestedFieldNoCopy(live, path...)
	if err != nil || !has {
		return nil
	}
	return unstructured.SetNestedField(object, value, path...)
}

// retainClaim keeps the UID of the claim that is bound to a volume. A template may name the claim, but does
// not know its UID, and a claim whose volume lacks the UID becomes Lost.
func retainClaim(object, live map[string]any) error {
	for _, field := range []string{"namespace", "name"} {
		wanted, _, err := unstructured.NestedString(object, "spec", "claimRef", field)
		if err != nil {
			return err
		}
		if bound, _, _ := unstructured.NestedString(live, "spec", "claimRef", field); wanted != bound {
			return nil
		}
	}
	return copyField(object, live, "spec", "claimRef")
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
		if err := copyField(object, live, "spec", "template", "metadata", "labels", label); err != nil {
			return err
		}
	}
	return copyField(object, live, "spec", "selector")
}
