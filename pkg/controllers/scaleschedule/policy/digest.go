// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// DigestNamespace returns what the cache keeps of a Namespace.
func (e *Evaluator) DigestNamespace(obj metav1.Object) []byte {
	o := Object{Values: valuesOf(obj.GetAnnotations(), e.Compat)}
	return o.Encode()
}

// Digest returns what the cache keeps of a workload, a HorizontalPodAutoscaler or a ScaledObject.
func (e *Evaluator) Digest(obj runtime.Object) []byte {
	metadata := obj.(metav1.Object)
	annotations := metadata.GetAnnotations()
	digested := Object{
		Values: valuesOf(annotations, e.Compat), Created: metadata.GetCreationTimestamp().Time,
		Unselected: !e.selector.Matches(labels.Set(metadata.GetLabels())),
	}
	if t, err := time.Parse(time.RFC3339, annotations[e.TimeAnnotation]); err == nil {
		digested.Created = t
	}
	switch workload := obj.(type) {
	case *appsv1.Deployment:
		digested.Number = int64(ptr.Deref(workload.Spec.Replicas, 1))
	case *appsv1.StatefulSet:
		digested.Number = int64(ptr.Deref(workload.Spec.Replicas, 1))
	case *batchv1.CronJob:
		if !ptr.Deref(workload.Spec.Suspend, false) {
			digested.Number = 1
		}
	case *autoscalingv2.HorizontalPodAutoscaler:
		digested.Number, digested.Max = int64(ptr.Deref(workload.Spec.MinReplicas, 1)), int64(workload.Spec.MaxReplicas)
		ref := workload.Spec.ScaleTargetRef
		digested.ScaleTarget = scaleTarget(ref.APIVersion, ref.Kind, ref.Name)
		if owner := metav1.GetControllerOfNoCopy(workload); owner != nil {
			digested.Owned = owner.Kind == string(ScaledObject) && strings.HasPrefix(owner.APIVersion, "keda.sh/")
		}
	case *unstructured.Unstructured:
		digested.readCustom(workload)
	default:
		digested.Unreadable = true
	}
	return digested.Encode()
}

// readCustom reads a Rollout or a ScaledObject. Its CustomResourceDefinition may permit anything.
func (o *Object) readCustom(custom *unstructured.Unstructured) {
	if custom.GetKind() == string(ScaledObject) {
		text := func(field string) string {
			value, _, _ := unstructured.NestedString(custom.Object, "spec", "scaleTargetRef", field)
			return value
		}
		o.ScaleTarget = scaleTarget(text("apiVersion"), text("kind"), text("name"))
		o.Number = Unpaused
		if paused, ok := custom.GetAnnotations()[pausedReplicas]; ok {
			n, err := strconv.ParseUint(paused, 10, 31)
			o.Number, o.Unreadable = int64(n), err != nil
		}
		return
	}
	n, found, err := unstructured.NestedInt64(custom.Object, "spec", "replicas")
	if !found {
		n = 1
	}
	o.Number, o.Unreadable = max(n, 0), err != nil
}

// scaleTarget returns KIND/NAME of a workload that something else scales; empty if it is none of ours.
func scaleTarget(apiVersion, kind, name string) string {
	group, _, _ := strings.Cut(apiVersion, "/")
	switch Kind(kind) {
	case "", Deployment:
		kind = string(Deployment)
	case StatefulSet:
	case Rollout:
		if group != "argoproj.io" {
			return ""
		}
	default:
		return ""
	}
	if len(name) > glob.MaxName {
		return ""
	}
	return kind + "/" + name
}
