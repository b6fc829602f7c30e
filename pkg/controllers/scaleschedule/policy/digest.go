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
	m := obj.(metav1.Object)
	annotations := m.GetAnnotations()
	o := Object{
		Values: valuesOf(annotations, e.Compat), Created: m.GetCreationTimestamp().Time,
		Unselected: !e.selector.Matches(labels.Set(m.GetLabels())),
	}
	if t, err := time.Parse(time.RFC3339, annotations[e.TimeAnnotation]); err == nil {
		o.Created = t
	}
	switch w := obj.(type) {
	case *appsv1.Deployment:
		o.Number = int64(ptr.Deref(w.Spec.Replicas, 1))
	case *appsv1.StatefulSet:
		o.Number = int64(ptr.Deref(w.Spec.Replicas, 1))
	case *batchv1.CronJob:
		if !ptr.Deref(w.Spec.Suspend, false) {
			o.Number = 1
		}
	case *autoscalingv2.HorizontalPodAutoscaler:
		o.Number, o.Max = int64(ptr.Deref(w.Spec.MinReplicas, 1)), int64(w.Spec.MaxReplicas)
		ref := w.Spec.ScaleTargetRef
		o.Target = target(ref.APIVersion, ref.Kind, ref.Name)
		if owner := metav1.GetControllerOfNoCopy(w); owner != nil {
			o.Owned = owner.Kind == string(ScaledObject) && strings.HasPrefix(owner.APIVersion, "keda.sh/")
		}
	case *unstructured.Unstructured:
		o.readCustom(w)
	default:
		o.Unreadable = true
	}
	return o.Encode()
}

// readCustom reads a Rollout or a ScaledObject. Its CustomResourceDefinition may permit anything.
func (o *Object) readCustom(w *unstructured.Unstructured) {
	if w.GetKind() == string(ScaledObject) {
		text := func(field string) string {
			value, _, _ := unstructured.NestedString(w.Object, "spec", "scaleTargetRef", field)
			return value
		}
		o.Target = target(text("apiVersion"), text("kind"), text("name"))
		o.Number = Unpaused
		if paused, ok := w.GetAnnotations()[pausedReplicas]; ok {
			n, err := strconv.ParseUint(paused, 10, 31)
			o.Number, o.Unreadable = int64(n), err != nil
		}
		return
	}
	n, found, err := unstructured.NestedInt64(w.Object, "spec", "replicas")
	if !found {
		n = 1
	}
	o.Number, o.Unreadable = max(n, 0), err != nil
}

// target returns KIND/NAME of a workload that something else scales; empty if it is none of ours.
func target(apiVersion, kind, name string) string {
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
